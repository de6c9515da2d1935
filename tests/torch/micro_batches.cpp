#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/micro_batches.hpp>

using namespace test;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;

TEST_CASE("micro-batches of tensors by one statistic are their concatenation") {
  torch::manual_seed(41);
  // Samples of each micro-batch of each rank.
  std::vector<std::vector<std::vector<std::int64_t>>> const cases{{{2, 3, 1}}, {{2, 1}, {3}}, {{0}, {1, 2}, {0, 4}}};
  for (auto const& shares : cases)
    for (auto const type : {torch::kFloat, torch::kDouble}) {
      std::int64_t samples = 0;
      for (auto const& of_rank : shares)
        for (auto const n : of_rank) samples += n;
      auto const x = torch::randn({samples, 3, 2, 2}, torch::kDouble).to(type), dy = torch::randn_like(x);
      auto whole = make_norm(BatchNormOptions{3}, {}, torch::kDouble);
      auto const whole_x = x.to(torch::kDouble).detach().clone().requires_grad_();
      auto const whole_y = whole->forward(whole_x);
      whole_y.backward(dy.to(torch::kDouble));
      run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
        auto const tolerance = tolerance_of(type);
        auto norm = make_norm(BatchNormOptions{3}, comm, type);
        std::int64_t first = 0;
        for (int r = 0; r < comm.rank(); ++r)
          for (auto const n : shares[static_cast<std::size_t>(r)]) first += n;
        std::vector<Tensor> inputs, gradients;
        std::vector<std::pair<std::int64_t, std::int64_t>> spans;
        for (auto const n : shares[static_cast<std::size_t>(comm.rank())]) {
          auto input = x.slice(0, first, first + n).clone();
          // Micro-batches may lie in memory as they like.
          if (inputs.size() == 1) input = input.contiguous(torch::MemoryFormat::ChannelsLast);
          inputs.push_back(input.requires_grad_(inputs.size() != 2));
          gradients.push_back(dy.slice(0, first, first + n));
          spans.emplace_back(first, first + n);
          first += n;
        }
        auto const outputs = syncnorm::torch::forward_batches(norm, inputs);
        torch::autograd::backward(outputs, gradients);
        CHECK(outputs.size() == inputs.size());
        for (std::size_t k = 0; k < inputs.size(); ++k) {
          auto const cut = [&](Tensor const& of) { return of.slice(0, spans[k].first, spans[k].second); };
          CHECK(error_of(outputs[k], cut(whole_y), scale_of(whole_y)) <= tolerance);
          CHECK(inputs[k].grad().defined() == (k != 2));
          if (k != 2) CHECK(error_of(inputs[k].grad(), cut(whole_x.grad()), scale_of(whole_x.grad())) <= tolerance);
        }
        auto const sum = [&](Tensor const& of_rank) {
          auto all = of_rank.to(torch::kDouble).contiguous().clone();
          std::span const values{all.data_ptr<double>(), static_cast<std::size_t>(all.numel())};
          syncnorm::allreduce(comm, std::span<double const>{values}, values);
          return all;
        };
        CHECK(error_of(sum(norm->weight.grad()), whole->weight.grad(), 1) <= tolerance);
        CHECK(error_of(sum(norm->bias.grad()), whole->bias.grad(), 1) <= tolerance);
        CHECK(error_of(norm->running_mean, whole->running_mean, 1) <= tolerance);
        CHECK(error_of(norm->running_var, whole->running_var, 1) <= tolerance);
        CHECK(norm->num_batches_tracked.item<std::int64_t>() == 1);

        norm->eval();
        auto const evaluated = syncnorm::torch::forward_batches(norm, inputs);
        for (std::size_t k = 0; k < inputs.size(); ++k) CHECK(torch::equal(evaluated[k], norm->forward(inputs[k])));
      });
    }
}

TEST_CASE("micro-batches: what is wrong on one rank, and what cannot be done, are errors on every rank") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    auto const before = state_of(*norm);
    auto const x = random({2, 3}).requires_grad_();
    auto const thrown = [&](std::vector<Tensor> const& inputs) {
      return message_of<syncnorm::invalid_argument_error>(
          [&] { (void)syncnorm::torch::forward_batches(norm, inputs); });
    };
    auto text = thrown(comm.rank() == 1 ? std::vector<Tensor>{} : std::vector<Tensor>{x});
    CHECK_MESSAGE(contains(text, "rank 1: there are no micro-batches"), text);
    text = thrown({x, comm.rank() == 0 ? random({2, 4}) : x});
    CHECK_MESSAGE(contains(text, "rank 0: x[1] has 4 channels"), text);
    text = thrown({x, comm.rank() == 0 ? x.to(torch::kFloat) : x});
    CHECK_MESSAGE(contains(text, "rank 0: micro-batch 1: the input is of"), text);
    CHECK(same_state(before, state_of(*norm)));
    auto const y = syncnorm::torch::forward_batches(norm, {x, x});
    auto const slope = torch::autograd::grad({(y[0] * y[1]).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    text = message_of<syncnorm::error>([&] { slope.sum().backward(); });
    CHECK_MESSAGE(contains(text, "micro-batches (double backward) cannot be differentiated"), text);
  });
}
