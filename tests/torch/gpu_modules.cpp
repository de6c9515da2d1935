#include <cstdint>
#include <vector>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "steps.hpp"

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/adapters/staged.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/batch_norm_group.hpp>
#include <syncnorm/torch/cuda.hpp>
#include <syncnorm/torch/micro_batches.hpp>

// The module over tensors of a GPU, by a libtorch that has CUDA, against the module over the same tensors on the CPU.
namespace test::on_gpu {

using syncnorm::activation;
using syncnorm::torch::use_cuda;

torch::Device const gpu{torch::kCUDA, 0};

syncnorm::nccl_communicator nccl_alone() {
  int const device = 0;
  ncclComm_t comm = nullptr;
  REQUIRE(ncclCommInitAll(&comm, 1, &device) == ncclSuccess);
  return syncnorm::nccl_communicator::adopt(comm);
}

template <class C>
SyncBatchNorm on_device(SyncBatchNorm const& norm, C const& comm) {
  auto copy = copy_of(norm);
  copy->to(gpu);
  use_cuda(*copy, comm);
  return copy;
}
SyncBatchNorm on_device(SyncBatchNorm const& norm) { return on_device(norm, syncnorm::self_communicator{}); }

/// Each of `tensors`, as leaves on a device.
std::vector<Tensor> leaves_of(std::vector<Tensor> const& tensors, torch::Device const& on) {
  std::vector<Tensor> leaves;
  for (auto const& tensor : tensors) leaves.push_back(tensor.detach().to(on).requires_grad_());
  return leaves;
}

TEST_CASE("on a GPU, training of all types and layouts agrees with the CPU's, over NCCL, too") {
  torch::manual_seed(91);
  struct types {
    torch::Dtype element, parameter;
  };
  auto const nccl = nccl_alone();
  for (auto const& [element, parameter] :
       {types{torch::kFloat, torch::kFloat}, types{torch::kDouble, torch::kDouble}, types{torch::kHalf, torch::kFloat},
        types{torch::kBFloat16, torch::kFloat}, types{torch::kBFloat16, torch::kBFloat16}})
    for (auto const& shape : std::vector<std::vector<std::int64_t>>{{5, 12, 9, 7}, {33, 16, 1, 1}, {2, 3, 64, 80}})
      for (auto const format : {torch::MemoryFormat::Contiguous, torch::MemoryFormat::ChannelsLast}) {
        auto const x = random(shape).to(element).contiguous(format), dy = random(shape).to(element).contiguous(format);
        auto const norm = make_norm(BatchNormOptions{shape[1]}, {}, parameter);
        auto host = copy_of(norm), alone = on_device(norm), over_nccl = on_device(norm, nccl);
        auto const scale = static_cast<double>(x.numel() / shape[1]);
        for (int i = 0; i < 2; ++i) {
          auto const expected = run_step(host, x + i, dy);
          check_same(run_step(alone, x + i, dy, {}, gpu), expected, scale);
          check_same(run_step(over_nccl, x + i, dy, {}, gpu), expected, scale);
        }
      }
}

TEST_CASE("on a GPU, a step agrees with libtorch's own batch norm there") {
  torch::manual_seed(92);
  auto const x = torch::randn({8, 24, 14, 14}).to(gpu), dy = torch::randn({8, 24, 14, 14}).to(gpu);
  torch::nn::BatchNorm2d theirs{BatchNormOptions{24}};
  theirs->to(gpu);
  auto ours = on_device(SyncBatchNorm{BatchNormOptions{24}});
  auto const inputs = leaves_of({x, x}, gpu);
  auto const expected = theirs->forward(inputs[0]), got = ours->forward(inputs[1]);
  expected.backward(dy);
  got.backward(dy);
  ours->synchronize();
  CHECK(error_of(got, expected) <= 2e-5);
  CHECK(error_of(inputs[1].grad(), inputs[0].grad()) <= 2e-5);
  CHECK(error_of(ours->weight.grad(), theirs->weight.grad()) <= 2e-5);
  CHECK(error_of(ours->running_var, theirs->running_var) <= 2e-5);
}

TEST_CASE("on a GPU, modes and epilogues agree with the CPU's, on a stream of the caller's") {
  torch::manual_seed(93);
  auto const x = torch::randn({5, 6, 9, 5}), dy = torch::randn({5, 6, 9, 5}), residual = torch::randn({5, 6, 9, 5});
  auto const mask = torch::rand({5, 9, 5}) > 0.4;
  std::vector<norm_epilogue> const epilogues{{},
                                             {activation::leaky_relu(0.2), residual},
                                             {activation::relu(), residual, mask, syncnorm::masked_outputs::zero}};
  c10::cuda::CUDAStreamGuard const stream{c10::cuda::getStreamFromPool(false, 0)};
  for (auto const& with : epilogues)
    for (bool const trains : {true, false})
      for (bool const in_place : {false, true})
        for (bool const frozen : {false, true}) {
          auto norm = make_norm(BatchNormOptions{6}, {}, torch::kFloat);
          norm->train(trains);
          for (auto& parameter : norm->parameters()) parameter.set_requires_grad(!frozen);
          auto host = copy_of(norm), device = on_device(norm);
          for (auto& each : {host, device}) each.ptr()->set_in_place(in_place);
          auto const copy = [&](Tensor const& whole) { return in_place ? whole.clone() : whole; };
          auto const expected = run_step(host, x, dy, with, torch::kCPU, copy);
          check_same(run_step(device, x, dy, with, gpu, copy), expected, 225);
        }
}

TEST_CASE("on a GPU, groups in two phases, micro-batches and gradient penalties agree with the CPU's") {
  torch::manual_seed(94);
  auto const x = random({6, 4, 5, 3}), u = random({3, 7, 2, 2}), dy = random({6, 4, 5, 3});
  auto const a = make_norm(BatchNormOptions{4}.eps(0.1)), b = make_norm(BatchNormOptions{7}.eps(0.1));
  auto const nccl = nccl_alone();
  std::vector<std::vector<Tensor>> results;
  for (auto const& on : {torch::Device{torch::kCPU}, gpu}) {
    auto const placed = [&](SyncBatchNorm const& norm) { return on.is_cuda() ? on_device(norm, nccl) : copy_of(norm); };
    auto first = placed(a), second = placed(b), third = placed(a);
    auto const in = leaves_of({x, u, x.slice(0, 0, 2), x.slice(0, 2, 6), x}, on);
    auto pending = syncnorm::torch::begin_group_forward({{first, in[0]}, {second, in[1], {activation::relu()}}});
    auto const parts = syncnorm::torch::forward_batches(third, {in[2], in[3]});
    auto const y = pending.finish();
    auto loss = y[0].pow(3).sum() + y[1].pow(2).sum() + parts[0].pow(3).sum() + parts[1].pow(2).sum();
    auto const again = third->forward_with(in[4], {activation::leaky_relu(0.3)});
    auto const slope = torch::autograd::grad({again}, {in[4]}, {dy.to(on)}, true, /*create_graph=*/true)[0];
    (loss + slope.pow(2).sum()).backward();
    auto& all = results.emplace_back(left_of(first, y, in));
    for (auto& norm : {second, third})
      for (auto const& tensor : left_of(norm.ptr() == second.ptr() ? second : third, parts, {})) all.push_back(tensor);
  }
  check_close(results[1], results[0], 1e-12);
}

TEST_CASE("on a GPU, ranks that are threads of one device agree with the CPU's in evaluation and training") {
  torch::manual_seed(95);
  auto const x = torch::randn({5, 8, 6, 6});
  auto const norm = make_norm(BatchNormOptions{8}, {}, torch::kFloat);
  auto host = copy_of(norm);
  auto const expected = host->forward(x);
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    torch::NoGradGuard const no_recording; // autograd has one thread for all ranks of a device
    c10::cuda::CUDAStreamGuard const stream{c10::cuda::getStreamFromPool(false, 0)};
    auto device = on_device(norm, syncnorm::staged{comm});
    auto const y = device->forward(rows_of(x, comm.rank()).to(gpu));
    device->synchronize();
    CHECK(error_of(y.cpu(), rows_of(expected, comm.rank()), 5) <= 2e-5);
    CHECK(error_of(device->running_var.cpu(), host->running_var) <= 2e-5);
  });
}

TEST_CASE("on a GPU, what is wrong is an error that says so") {
  auto device = on_device(make_norm(BatchNormOptions{3}, {}, torch::kFloat));
  auto const text = message_of<syncnorm::error>([&] { device->forward(torch::ones({2, 3})); });
  CHECK_MESSAGE(contains(text, "cpu"), text);
  CHECK_THROWS_AS(device->forward(torch::ones({2, 4}).to(gpu)), syncnorm::error);
  CHECK_NOTHROW(device->forward(torch::randn({2, 3}).to(gpu)));
}

} // namespace test::on_gpu
