#include <cstddef>
#include <cstdint>
#include <span>
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

TEST_CASE("micro-batches in two phases give the bits of those in one") {
  torch::manual_seed(43);
  std::vector<std::vector<std::vector<std::int64_t>>> const cases{{{2, 3}}, {{2, 1}, {3}}, {{0}, {1, 2}, {0, 4}}};
  for (auto const& shares : cases)
    run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
      auto norm = make_norm(BatchNormOptions{3}, comm), twin = make_norm(BatchNormOptions{3}, comm);
      std::vector<Tensor> inputs, same, gradients;
      for (auto const n : shares[static_cast<std::size_t>(comm.rank())]) {
        inputs.push_back(random({n, 3, 2}).requires_grad_());
        same.push_back(inputs.back().detach().clone().requires_grad_());
        gradients.push_back(random({n, 3, 2}));
      }
      for (bool const training : {true, false}) {
        norm->train(training), twin->train(training);
        auto const expected = syncnorm::torch::forward_batches(norm, inputs);
        auto pending = syncnorm::torch::begin_forward_batches(twin, same);
        auto const outputs = pending.finish();
        CHECK(pending.ready());
        CHECK(outputs.size() == expected.size());
        // In evaluation each has a graph of its own.
        for (auto const& all : {expected, outputs})
          for (std::size_t k = 0; k < all.size() && !training; ++k) all[k].backward(gradients[k]);
        if (training) torch::autograd::backward(expected, gradients);
        if (training) torch::autograd::backward(outputs, gradients);
        for (std::size_t k = 0; k < outputs.size(); ++k) {
          CHECK(torch::equal(outputs[k], expected[k]));
          CHECK(torch::equal(same[k].grad(), inputs[k].grad()));
        }
        CHECK(torch::equal(twin->weight.grad(), norm->weight.grad()));
        CHECK(same_state(state_of(*twin), state_of(*norm)));
      }
    });
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
    auto pending =
        syncnorm::torch::begin_forward_batches(norm, comm.rank() == 1 ? std::vector<Tensor>{} : std::vector<Tensor>{x});
    text = message_of<syncnorm::invalid_argument_error>([&] { (void)pending.finish(); });
    CHECK_MESSAGE(contains(text, "rank 1: there are no micro-batches"), text);
    CHECK(same_state(before, state_of(*norm)));
  });
}

TEST_CASE("a gradient penalty over micro-batches is that of their concatenation") {
  torch::manual_seed(42);
  auto const x = random({6, 3, 2}), factors = random({6, 3, 2});
  auto const penalty_of = [](Tensor const& loss, std::vector<Tensor> const& inputs) {
    auto sum = loss;
    for (auto const& slope : torch::autograd::grad({loss}, inputs, {}, true, /*create_graph=*/true))
      sum = sum + slope.pow(2).sum();
    return sum;
  };
  auto whole = make_norm(BatchNormOptions{3});
  auto const whole_x = x.clone().requires_grad_();
  penalty_of((whole->forward(whole_x).pow(3) * factors).sum(), {whole_x}).backward();
  Tensor weight_grads[2];
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    // Rank 0 has samples 0 to 3 in three micro-batches, one of them empty, rank 1 the rest in one.
    std::vector<std::int64_t> const cuts =
        comm.rank() == 0 ? std::vector<std::int64_t>{0, 1, 1, 4} : std::vector<std::int64_t>{4, 6};
    std::vector<Tensor> inputs, parts;
    for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
      inputs.push_back(x.slice(0, cuts[k], cuts[k + 1]).clone().requires_grad_());
      parts.push_back(factors.slice(0, cuts[k], cuts[k + 1]));
    }
    auto const outputs = syncnorm::torch::forward_batches(norm, inputs);
    auto loss = torch::zeros({}, torch::kDouble);
    for (std::size_t k = 0; k < outputs.size(); ++k) loss = loss + (outputs[k].pow(3) * parts[k]).sum();
    penalty_of(loss, inputs).backward();
    for (std::size_t k = 0; k < inputs.size(); ++k)
      CHECK(error_of(inputs[k].grad(), whole_x.grad().slice(0, cuts[k], cuts[k + 1]), scale_of(whole_x.grad())) <=
            1e-12);
    weight_grads[comm.rank()] = norm->weight.grad();
  });
  CHECK(error_of(weight_grads[0] + weight_grads[1], whole->weight.grad(), 1) <= 1e-12);
}
