#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
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
using syncnorm::torch::norm_epilogue;

namespace {

/// What is done to a micro-batch besides normalizing it.
struct batch_kind {
  double slope = 1;
  bool residual = false, mask = false;
  syncnorm::masked_outputs masked = syncnorm::masked_outputs::normalized;
};

/// By turns, over the micro-batches of all ranks.
constexpr batch_kind kinds[]{
    {0.25, true, true, syncnorm::masked_outputs::zero}, {}, {0, true, true}, {0.5, false, true}};

/// All micro-batches of all ranks, one after the other, and what libtorch's own operations make of them.
struct whole_batch {
  /// Samples of each micro-batch of each rank.
  std::vector<std::vector<std::int64_t>> shares;
  torch::Dtype type;
  std::vector<std::int64_t> firsts{}; ///< of each micro-batch of each rank, in order, and their end
  Tensor x{}, dy{}, residual{}, mask{};
  /// Of x, residual, weight and bias, by dy, and by the squares of the gradients of x and residual by y³·dy.
  std::vector<Tensor> gradients{}, of_penalty{};
  Tensor y{}, running_mean{}, running_var{};

  whole_batch(std::vector<std::vector<std::int64_t>> of, torch::Dtype by) : shares{std::move(of)}, type{by} {
    std::int64_t samples = 0;
    for (auto const& of_rank : shares)
      for (auto const n : of_rank) firsts.push_back(samples), samples += n;
    firsts.push_back(samples);
    auto const rounded = [&] { return random({samples, 3, 2, 2}).to(type).to(torch::kDouble); };
    x = rounded(), dy = rounded(), residual = rounded();
    mask = torch::rand({samples, 2, 2}) < 0.7;
    auto const norm = make_norm(BatchNormOptions{3});
    auto const leaf = x.clone().requires_grad_(), added = residual.clone().requires_grad_(),
               weight = norm->weight.detach().clone().requires_grad_(),
               bias = norm->bias.detach().clone().requires_grad_();
    auto const per_sample = [&](auto const& value) {
      auto values = torch::ones({samples, 1, 1, 1}, torch::kDouble);
      for (std::size_t k = 0; k + 1 < firsts.size(); ++k)
        values.slice(0, firsts[k], firsts[k + 1]).fill_(value(kind_of(k)));
      return values;
    };
    auto const masked = per_sample([](batch_kind const& done) { return done.mask ? 1.0 : 0.0; });
    auto const counts = 1 - masked * (1 - mask.unsqueeze(1).to(torch::kDouble));
    auto const n = counts.sum();
    auto const mean = (leaf * counts).sum({0, 2, 3}, true) / n;
    auto const var = ((leaf - mean).pow(2) * counts).sum({0, 2, 3}, true) / n;
    auto const of_channels = [](Tensor const& values) { return values.view({1, 3, 1, 1}); };
    auto const v = (leaf - mean) / (var + norm->options.eps()).sqrt() * of_channels(weight) + of_channels(bias) +
                   added * per_sample([](batch_kind const& done) { return done.residual ? 1.0 : 0.0; });
    auto const zero =
        per_sample([](batch_kind const& done) { return done.masked == syncnorm::masked_outputs::zero ? 0.0 : 1.0; });
    auto const result = torch::where(v > 0, v, v * per_sample([](batch_kind const& done) { return done.slope; })) *
                        (counts + (1 - counts) * zero);
    std::vector<Tensor> const leaves{leaf, added, weight, bias};
    gradients = torch::autograd::grad({(result * dy).sum()}, leaves, {}, /*retain_graph=*/true);
    auto penalty = torch::zeros({}, torch::kDouble);
    for (auto const& slope : torch::autograd::grad({(result.pow(3) * dy).sum()}, {leaf, added}, {}, true, true))
      penalty = penalty + slope.pow(2).sum();
    of_penalty = torch::autograd::grad({penalty}, leaves);
    y = result.detach();
    running_mean = norm->running_mean * 0.9 + mean.detach().view({3}) * 0.1;
    running_var = norm->running_var * 0.9 + var.detach().view({3}) * 0.1 * n / (n - 1);
  }

  [[nodiscard]] static batch_kind const& kind_of(std::size_t k) { return kinds[k % std::size(kinds)]; }
  /// The first of a rank's micro-batches, of all.
  [[nodiscard]] std::size_t first_of(int rank) const {
    std::size_t first = 0;
    for (int r = 0; r < rank; ++r) first += shares[static_cast<std::size_t>(r)].size();
    return first;
  }
  [[nodiscard]] Tensor cut(Tensor const& whole, std::size_t k) const {
    return whole.slice(0, firsts[k], firsts[k + 1]);
  }
};

/// The micro-batches of one rank.
struct own_batches {
  std::vector<Tensor> leaves, residuals, factors; ///< residuals: undefined where there is none
  std::vector<norm_epilogue> epilogues;

  own_batches(whole_batch const& of, int rank) {
    auto const first = of.first_of(rank), count = of.shares[static_cast<std::size_t>(rank)].size();
    for (auto k = first; k < first + count; ++k) {
      auto const own = [&](Tensor const& whole) {
        auto const part = of.cut(whole, k).to(of.type);
        return (k == first + 1 ? part.contiguous(torch::MemoryFormat::ChannelsLast) : part).clone();
      };
      auto const& done = whole_batch::kind_of(k);
      leaves.push_back(own(of.x).requires_grad_());
      residuals.push_back(done.residual ? own(of.residual).requires_grad_() : Tensor{});
      factors.push_back(own(of.dy));
      epilogues.push_back({syncnorm::activation::leaky_relu(done.slope), residuals.back(),
                           done.mask ? of.cut(of.mask, k).clone() : Tensor{}, done.masked});
    }
  }
  /// Results of an operation that does not need them.
  [[nodiscard]] std::vector<Tensor> inputs() const {
    std::vector<Tensor> all;
    for (auto const& leaf : leaves) all.push_back(leaf * 1);
    return all;
  }
};

} // namespace

TEST_CASE("micro-batches, each with an epilogue of its own, apart and in place, are their concatenation") {
  torch::manual_seed(45);
  enum class timing { at_once, begun };
  for (auto const& shares : std::vector<std::vector<std::vector<std::int64_t>>>{
           {{5}}, {{2, 3, 1}}, {{2, 1}, {3}}, {{0}, {1, 2}, {0, 4, 2}}, {{0, 0}, {1, 4, 0}}})
    for (auto const type : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
      whole_batch const whole{shares, type};
      bool const is_wide = type == torch::kFloat || type == torch::kDouble;
      run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
        for (auto const how : {timing::at_once, timing::begun})
          for (bool const in_place : {false, true}) {
            INFO("type ", static_cast<int>(type), ", in place ", in_place, ", rank ", comm.rank(), " of ", comm.size());
            auto norm = make_norm(BatchNormOptions{3}, comm, is_wide ? type : torch::kFloat);
            norm->set_in_place(in_place);
            own_batches const own{whole, comm.rank()};
            auto const inputs = own.inputs();
            auto const outputs = how == timing::begun
                                     ? syncnorm::torch::begin_forward_batches(norm, inputs, own.epilogues).finish()
                                     : syncnorm::torch::forward_batches(norm, inputs, own.epilogues);
            REQUIRE(outputs.size() == inputs.size());
            std::vector<Tensor> values;
            for (std::size_t k = 0; k < inputs.size(); ++k) {
              CHECK(outputs[k].is_same(inputs[k]) == in_place);
              values.push_back(outputs[k].detach().clone());
            }
            torch::autograd::backward(outputs, own.factors, /*retain_graph=*/true);
            for (auto const& leaf : own.leaves) leaf.mutable_grad() = Tensor{};
            for (auto const& residual : own.residuals)
              if (residual.defined()) residual.mutable_grad() = Tensor{};
            norm->zero_grad();
            torch::autograd::backward(outputs, own.factors); // of what was recovered again

            // Of recovered values: the last bit of y, times what `recoverable_ratio` allows.
            auto const unit = type == torch::kHalf ? 0x1p-10 : type == torch::kBFloat16 ? 0x1p-7 : 0.0;
            auto const tolerance =
                tolerance_of(is_wide ? type : torch::kFloat) * (in_place ? 4 : 1) + unit * (in_place ? 8 : 1);
            auto const first = whole.first_of(comm.rank());
            for (std::size_t k = 0; k < inputs.size(); ++k) {
              auto const check = [&](Tensor const& got, Tensor const& expected) {
                CHECK(error_of(got, whole.cut(expected, first + k), scale_of(expected)) <= tolerance);
              };
              check(values[k], whole.y);
              check(own.leaves[k].grad(), whole.gradients[0]);
              if (own.residuals[k].defined()) check(own.residuals[k].grad(), whole.gradients[1]);
            }
            auto const scale = static_cast<double>(whole.x.size(0) * 4); // what sums are of
            CHECK(error_of(sum_of_ranks(comm, norm->weight.grad()), whole.gradients[2], scale) <= tolerance);
            CHECK(error_of(sum_of_ranks(comm, norm->bias.grad()), whole.gradients[3], scale) <= tolerance);
            CHECK(error_of(norm->running_mean, whole.running_mean, 1) <= tolerance);
            CHECK(error_of(norm->running_var, whole.running_var, 1) <= tolerance);
            CHECK(norm->num_batches_tracked.item<double>() == 1);
          }
      });
    }
}

TEST_CASE("a gradient penalty over micro-batches with epilogues is that of their concatenation, and in place refused") {
  torch::manual_seed(46);
  whole_batch const whole{{{1, 0, 3}, {2, 2}}, torch::kDouble};
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    own_batches const own{whole, comm.rank()};
    auto const penalty_of = [&](std::vector<Tensor> const& inputs) {
      auto const outputs = syncnorm::torch::forward_batches(norm, inputs, own.epilogues);
      auto loss = torch::zeros({}, torch::kDouble), penalty = loss;
      for (std::size_t k = 0; k < outputs.size(); ++k) loss = loss + (outputs[k].pow(3) * own.factors[k]).sum();
      auto edges = own.leaves;
      for (auto const& residual : own.residuals)
        if (residual.defined()) edges.push_back(residual);
      for (auto const& slope : torch::autograd::grad({loss}, edges, {}, true, /*create_graph=*/true))
        penalty = penalty + slope.pow(2).sum();
      return penalty;
    };
    penalty_of(own.leaves).backward();
    auto const first = whole.first_of(comm.rank());
    for (std::size_t k = 0; k < own.leaves.size(); ++k) {
      auto const check = [&](Tensor const& got, Tensor const& expected) {
        CHECK(error_of(got, whole.cut(expected, first + k), scale_of(expected)) <= 1e-12);
      };
      check(own.leaves[k].grad(), whole.of_penalty[0]);
      if (own.residuals[k].defined()) check(own.residuals[k].grad(), whole.of_penalty[1]);
    }
    CHECK(error_of(sum_of_ranks(comm, norm->weight.grad()), whole.of_penalty[2]) <= 1e-12);
    CHECK(error_of(sum_of_ranks(comm, norm->bias.grad()), whole.of_penalty[3]) <= 1e-12);

    norm->set_in_place();
    auto const penalty = penalty_of(own.inputs());
    auto const text = message_of<syncnorm::error>([&] { penalty.backward(); });
    CHECK_MESSAGE(contains(text, "a pass in place (double backward) cannot be differentiated"), text);
  });
}

TEST_CASE(
    "micro-batches with epilogues and in place: a fault of one rank is an error on every rank, nothing is written") {
  enum class timing { at_once, begun };
  run_ranks(3, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    norm->set_in_place();
    auto const before = state_of(*norm);
    auto const leaf = random({2, 3, 4}).requires_grad_();
    bool const here = comm.rank() == 1;
    for (auto const how : {timing::at_once, timing::begun}) {
      auto const refused = [&](std::string const& what, std::vector<Tensor> const& inputs,
                               std::vector<norm_epilogue> const& epilogues = {}) {
        std::vector<Tensor> values;
        std::vector<std::shared_ptr<torch::autograd::Node>> functions;
        for (auto const& input : inputs) values.push_back(input.detach().clone()), functions.push_back(input.grad_fn());
        auto const text = message_of<syncnorm::invalid_argument_error>([&] {
          how == timing::begun ? (void)syncnorm::torch::begin_forward_batches(norm, inputs, epilogues).finish()
                               : (void)syncnorm::torch::forward_batches(norm, inputs, epilogues);
        });
        CHECK_MESSAGE(contains(text, ("rank 1: " + what).c_str()), text);
        for (std::size_t k = 0; k < inputs.size(); ++k)
          CHECK((torch::equal(inputs[k], values[k]) && inputs[k].grad_fn() == functions[k]));
        CHECK(same_state(before, state_of(*norm)));
      };
      auto const x = leaf * 1, u = leaf * 2;
      std::vector<norm_epilogue> const none(2);
      refused("there are 1 epilogues, expected 2 as micro-batches", {x, u}, std::vector<norm_epilogue>(here ? 1 : 2));
      refused("there are 2 epilogues, expected 1 as micro-batches", {x}, std::vector<norm_epilogue>(here ? 2 : 1));
      refused("there are no micro-batches", here ? std::vector<Tensor>{} : std::vector<Tensor>{x});
      refused("a pass in place writes to memory that another micro-batch reads", {x, here ? x : u});
      auto with = none;
      with[0].residual = here ? u : leaf;
      refused("a pass in place writes to memory that another micro-batch reads", {x, u}, with);
      with[0].residual = here ? x : leaf;
      refused("the residual is in the memory of the input", {x, u}, with);
      with[0].residual = here ? leaf.slice(0, 0, 1) : leaf;
      refused("micro-batch 0: the residual is [1, 3, 4], expected [2, 3, 4] as the input", {x, u}, with);
      with = none;
      with[1].mask = torch::ones({2, here ? 3 : 4}, torch::kBool);
      refused("micro-batch 1: the mask is [2, 3], expected [2, 4] as the input without its channels", {x, u}, with);
      with[1].mask = Tensor{};
      with[1].activation = syncnorm::activation::leaky_relu(here ? std::numeric_limits<double>::infinity() : 1);
      refused("the negative slope of the activation is inf", {x, u}, with);
      refused("a leaf Variable that requires grad", {x, here ? leaf : u});
      refused("Output 0 of UnbindBackward0 is a view and is being modified inplace",
              {x, here ? u.unsqueeze(0).unbind()[0] : u});
      refused("the strides of the input allow no pass in place", {x, here ? u.unsqueeze(3).expand({2, 3, 4, 2}) : u});
      refused("micro-batch 1: the input is of Float", {x, here ? (leaf * 1).to(torch::kFloat) : u});
    }
    // In the backward pass.
    auto const y = syncnorm::torch::forward_batches(norm, {leaf * 1, leaf * 2}, std::vector<norm_epilogue>(2));
    if (here) y[1].mul_(2);
    auto const text = message_of<syncnorm::invalid_argument_error>([&] { (y[0].sum() + y[1].sum()).backward(); });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);
  });
}

TEST_CASE("micro-batches in evaluation, each by itself, with epilogues and in place") {
  torch::manual_seed(47);
  for (bool const tracks : {true, false}) {
    auto norm = make_norm(BatchNormOptions{3}.track_running_stats(tracks)),
         twin = make_norm(BatchNormOptions{3}.track_running_stats(tracks));
    norm->eval(), twin->eval();
    auto const leaf = random({2, 3, 4}).requires_grad_(), same = leaf.detach().clone().requires_grad_();
    auto const added = random({2, 3, 4});
    std::vector<norm_epilogue> const with{
        {syncnorm::activation::relu(), added}, {}, {syncnorm::activation::leaky_relu(0.5)}};
    auto const inputs = [](Tensor const& of) { return std::vector<Tensor>{of * 1, (of * 2).slice(0, 1), of * 3}; };
    auto const expected_of = inputs(same);
    std::vector<Tensor> expected;
    for (std::size_t k = 0; k < 3; ++k) expected.push_back(twin->forward_with(expected_of[k], with[k]));
    norm->set_in_place();
    auto const given = inputs(leaf);
    auto const got = syncnorm::torch::forward_batches(norm, given, with);
    for (std::size_t k = 0; k < 3; ++k) {
      CHECK((got[k].is_same(given[k]) && torch::equal(got[k], expected[k])));
      got[k].pow(2).sum().backward();
      expected[k].pow(2).sum().backward();
    }
    CHECK(error_of(leaf.grad(), same.grad(), 1) <= 1e-12);
    CHECK(error_of(norm->weight.grad(), twin->weight.grad(), 10) <= 1e-12);

    // What is wrong with one comes before another one is written to.
    auto const first = leaf * 1;
    auto const value = first.detach().clone();
    auto const refused = [&](std::vector<Tensor> const& of, std::vector<norm_epilogue> const& epilogues = {}) {
      auto text = message_of<syncnorm::invalid_argument_error>(
          [&] { (void)syncnorm::torch::forward_batches(norm, of, epilogues); });
      CHECK(torch::equal(first, value));
      return text;
    };
    auto text = refused({first, leaf});
    CHECK_MESSAGE(contains(text, "a leaf Variable that requires grad"), text);
    text = refused({first, random({2, 4})});
    CHECK_MESSAGE(contains(text, "x has 4 channels"), text);
    text = refused({first, first});
    CHECK_MESSAGE(contains(text, "writes to memory that another micro-batch reads"), text);
    text = refused({first}, with);
    CHECK_MESSAGE(contains(text, "there are 3 epilogues, expected 1"), text);

    // Parts of one tensor that have no element in common are as good as any.
    torch::NoGradGuard const no_grad;
    auto const whole = random({2, 6, 4}), apart = whole.clone();
    auto const halves = [](Tensor const& of) { return std::vector<Tensor>{of.slice(1, 0, 3), of.slice(1, 3)}; };
    CHECK(syncnorm::torch::forward_batches(norm, halves(whole)).size() == 2);
    for (auto const& half : halves(apart)) half.copy_(twin->forward(half));
    CHECK(torch::equal(whole, apart));
    text = message_of<syncnorm::invalid_argument_error>([&] {
      syncnorm::torch::forward_batches(norm, {whole.slice(1, 0, 3), whole.slice(1, 2, 5)});
    });
    CHECK_MESSAGE(contains(text, "writes to memory that another micro-batch reads"), text);
    CHECK(torch::equal(whole, apart));
  }
}

TEST_CASE("micro-batches in place: a rank that needs no gradient joins the backward pass of those that do") {
  run_ranks(2, [](thread_communicator const& comm) {
    torch::manual_seed(48);
    auto const all = random({6, 3, 2}), dy = random({6, 3, 2});
    bool const needs = comm.rank() == 0;
    std::vector<Tensor> gradients;
    for (bool const in_place : {false, true}) {
      auto norm = make_norm(BatchNormOptions{3}, comm);
      norm->set_in_place(in_place);
      norm->weight.set_requires_grad(false);
      norm->bias.set_requires_grad(false);
      auto const leaf = all.clone().set_requires_grad(needs);
      std::vector<Tensor> inputs, factors;
      for (std::int64_t k = 0; k < (needs ? 2 : 1); ++k) {
        inputs.push_back(leaf.slice(0, k, k + 2) * 1);
        factors.push_back(dy.slice(0, k, k + 2));
      }
      auto const y = syncnorm::torch::forward_batches(norm, inputs);
      for (auto const& each : y) CHECK(each.requires_grad());
      torch::autograd::backward(y, factors);
      gradients.push_back(needs ? leaf.grad() : torch::zeros({1}));
    }
    CHECK(error_of(gradients[1], gradients[0], 1) <= 1e-12);
    // Where nothing is recorded, whatever it is given.
    torch::NoGradGuard const no_recording;
    auto norm = make_norm(BatchNormOptions{3}, comm), twin = make_norm(BatchNormOptions{3}, comm);
    norm->set_in_place();
    auto const whole = all.clone();
    auto const expected = syncnorm::torch::forward_batches(twin, {all.slice(0, 0, 2), all.slice(0, 2)});
    auto const y = syncnorm::torch::forward_batches(norm, {whole.slice(0, 0, 2), whole.slice(0, 2)});
    CHECK(torch::equal(whole, torch::cat({expected[0], expected[1]})));
    CHECK(torch::equal(y[1], expected[1]));
    CHECK(same_state(state_of(*norm), state_of(*twin)));
  });
}
