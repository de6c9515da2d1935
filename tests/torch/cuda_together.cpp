#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_support.hpp"

#include <syncnorm/torch/micro_batches.hpp>

namespace test::on_cuda {

namespace {

/// All that is left of a step on the CPU: `results`, gradients of `leaves` and of the module, and its buffers.
std::vector<Tensor> left_of(SyncBatchNorm& norm, std::vector<Tensor> const& results,
                            std::vector<Tensor> const& leaves) {
  norm->synchronize();
  std::vector<Tensor> all;
  for (auto const& result : results) all.push_back(result.detach().cpu());
  for (auto const& leaf : leaves) all.push_back(gradient_of(leaf));
  for (auto const& parameter : norm->parameters()) all.push_back(gradient_of(parameter));
  for (auto const& buffer : norm->buffers()) all.push_back(buffer.detach().cpu());
  return all;
}

void check_close(std::vector<Tensor> const& got, std::vector<Tensor> const& expected, double tolerance) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    REQUIRE(got[i].defined() == expected[i].defined());
    if (!got[i].defined()) continue;
    CHECK(got[i].strides() == expected[i].strides());
    CHECK(error_of(got[i], expected[i], 5) <= tolerance);
  }
}

} // namespace

TEST_CASE("CUDA tensors: micro-batches by one statistic and their gradient penalty agree with the CPU's") {
  torch::manual_seed(77);
  // Samples of each micro-batch of each rank.
  for (auto const& shares : std::vector<std::vector<std::vector<std::int64_t>>>{{{2, 3, 1}}, {{0}, {1, 2}, {0, 4}}})
    for (auto const type : {torch::kHalf, torch::kDouble}) {
      auto const norm = make_norm(BatchNormOptions{3}.eps(0.1), {}, type == torch::kHalf ? torch::kFloat : type);
      auto const x = random({6, 3, 2, 2}).to(type), dy = random({6, 3, 2, 2}).to(type);
      run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
        INFO("rank ", comm.rank(), " of ", comm.size());
        auto const step = [&](SyncBatchNorm of, torch::Device const& on, bool penalty) {
          std::vector<Tensor> inputs, gradients;
          for (auto const n : shares[static_cast<std::size_t>(comm.rank())]) {
            auto input = (x.slice(0, 0, n) + comm.rank() + static_cast<int>(inputs.size())).to(on);
            if (inputs.size() == 1) input = input.contiguous(torch::MemoryFormat::ChannelsLast);
            inputs.push_back(input.detach().requires_grad_(inputs.size() != 2));
            gradients.push_back(dy.slice(0, 0, n).to(on));
          }
          auto const y = syncnorm::torch::forward_batches(of, inputs);
          if (penalty) {
            auto loss = torch::zeros({}, inputs[0].options());
            auto const edges = std::vector(inputs.begin(), inputs.begin() + (inputs.size() > 1 ? 2 : 1));
            for (auto const& slope : torch::autograd::grad(y, edges, gradients, true, /*create_graph=*/true))
              loss = loss + slope.pow(2).sum();
            loss.backward();
          } else {
            torch::autograd::backward(y, gradients);
          }
          return left_of(of, y, inputs);
        };
        auto host = on_host(norm, comm), device = on_device(norm, comm);
        for (bool const penalty : {false, true}) {
          if (penalty && type == torch::kHalf) continue;
          auto const expected = step(host, torch::kCPU, penalty);
          check_close(step(device, device_of(comm), penalty), expected, allowed(type));
        }
        for (auto& each : {host, device}) each.ptr()->eval();
        auto const own = x + comm.rank();
        auto const expected = syncnorm::torch::forward_batches(host, {own, own.slice(0, 0, 1)});
        auto const got =
            syncnorm::torch::forward_batches(device, {own.to(device_of(comm)), own.slice(0, 0, 1).to(device_of(comm))});
        check_close({got[0].cpu(), got[1].cpu()}, expected, allowed(type));
      });
    }
  check_no_violations();
}

} // namespace test::on_cuda
