#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/convert.hpp>

#include <support/page_flags.hpp>

using namespace test;
using syncnorm::invalid_argument_error;
using syncnorm::mismatch_error;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;

namespace {

/// torch::nn::BatchNorm2d with the state of `norm`, in a copy of its own.
torch::nn::BatchNorm2d local_twin(SyncBatchNorm const& norm) {
  torch::nn::BatchNorm2d twin{norm->options};
  twin->to(torch::kDouble);
  torch::NoGradGuard const no_recording;
  auto const copy = [](Tensor& to, Tensor const& from) {
    if (to.defined() && from.defined()) to.copy_(from);
  };
  copy(twin->weight, norm->weight);
  copy(twin->bias, norm->bias);
  copy(twin->running_mean, norm->running_mean);
  copy(twin->running_var, norm->running_var);
  copy(twin->num_batches_tracked, norm->num_batches_tracked);
  twin->train(norm->is_training());
  return twin;
}

} // namespace

TEST_CASE("large outputs and gradients of a module are asked for in huge pages") {
  for (bool const large : {true, false}) {
    CAPTURE(large);
    auto const asks = [&](Tensor const& tensor) {
      auto const* const middle = static_cast<char const*>(tensor.data_ptr()) + tensor.nbytes() / 2;
      return test_support::asks_for_huge_pages(middle).value_or(large);
    };
    auto const x = torch::rand({large ? 9 : 2, 1, 1024, 1024}).requires_grad_();
    auto const residual = torch::zeros_like(x).requires_grad_();
    SyncBatchNorm norm{BatchNormOptions{1}};
    auto const y = norm->forward_with(x, {.residual = residual});
    auto const gradients = torch::autograd::grad({y}, {x, residual}, {torch::ones_like(x)});
    CHECK(asks(y) == large);
    for (auto const& gradient : gradients) CHECK(asks(gradient) == large);
    CHECK(std::abs(y.mean().item<double>()) <= 1e-5);
    CHECK(scale_of(gradients[0]) <= 1e-4); // what is the same everywhere changes nothing
    CHECK((gradients[1] == 1).all().item<bool>());
  }
}

TEST_CASE("options, modes and their gradients are those of torch::nn::BatchNorm2d") {
  torch::manual_seed(11);
  auto const x = random({5, 3, 2, 2}), dy = random({5, 3, 2, 2});
  for (bool const affine : {true, false})
    for (bool const tracks : {true, false})
      for (bool const training : {true, false})
        for (auto const momentum : {c10::optional<double>{0.2}, c10::optional<double>{0.0}, c10::optional<double>{}}) {
          auto const options =
              BatchNormOptions{3}.affine(affine).track_running_stats(tracks).momentum(momentum).eps(1e-2);
          // In evaluation every rank is by itself, and so is the reference.
          auto const part = [&](Tensor const& whole, int rank) { return training ? whole : rows_of(whole, rank); };
          run_ranks(2, [&](thread_communicator const& comm) {
            INFO("affine ", affine, ", tracks ", tracks, ", training ", training, ", momentum ", momentum.value_or(-1),
                 ", rank ", comm.rank());
            auto norm = make_norm(options, comm);
            norm->train(training);
            auto twin = local_twin(norm);
            for (int step = 0; step < 3; ++step) {
              auto const own = rows_of(x + step, comm.rank()).clone().requires_grad_();
              auto const whole = part(x + step, comm.rank()).clone().requires_grad_();
              auto const y = norm->forward(own), expected = twin->forward(whole);
              norm->zero_grad();
              twin->zero_grad();
              y.backward(rows_of(dy, comm.rank()));
              expected.backward(part(dy, comm.rank()));
              auto const mine = [&](Tensor const& of_whole) {
                return training ? rows_of(of_whole, comm.rank()) : of_whole;
              };
              CHECK(error_of(y, mine(expected), 1) <= 1e-12);
              CHECK(error_of(own.grad(), mine(whole.grad()), 1) <= 1e-12);
              if (affine && !training) {
                CHECK(error_of(norm->weight.grad(), twin->weight.grad(), 1) <= 1e-12);
                CHECK(error_of(norm->bias.grad(), twin->bias.grad(), 1) <= 1e-12);
              }
            }
            CHECK(norm->running_mean.defined() == tracks);
            if (!tracks) return;
            CHECK(error_of(norm->running_mean, twin->running_mean, 1) <= 1e-12);
            CHECK(error_of(norm->running_var, twin->running_var, 1) <= 1e-12);
            CHECK(torch::equal(norm->num_batches_tracked, twin->num_batches_tracked));
          });
        }
}

TEST_CASE("running statistics are left alone where their tracking is turned off later") {
  torch::manual_seed(22);
  auto const x = random({5, 3, 2, 2});
  for (bool const training : {true, false})
    for (auto const momentum : {c10::optional<double>{0.2}, c10::optional<double>{}})
      run_ranks(2, [&](thread_communicator const& comm) {
        auto norm = make_norm(BatchNormOptions{3}.momentum(momentum), comm);
        norm->options.track_running_stats(false);
        norm->train(training);
        auto twin = local_twin(norm); // which lacks them
        auto const before = state_of(*norm);
        auto const own = rows_of(x, comm.rank()), all = training ? x : own;
        auto const y = norm->forward(own), expected = twin->forward(all);
        CHECK(error_of(y, training ? rows_of(expected, comm.rank()) : expected, 1) <= 1e-12);
        CHECK(same_state(before, state_of(*norm)));
        norm->options.track_running_stats(true);
        norm->train();
        norm->forward(own);
        CHECK(norm->num_batches_tracked.item<std::int64_t>() == 1);
      });
  // A BatchNorm2d of which the same is done goes by the batch, too.
  torch::nn::BatchNorm2d whole{3};
  whole->to(torch::kDouble);
  whole->options.track_running_stats(false);
  whole->eval();
  auto const converted = syncnorm::torch::convert_sync_batchnorm(whole.ptr(), syncnorm::self_communicator{});
  CHECK(error_of(converted->as<SyncBatchNorm>()->forward(x), whole->forward(x)) <= 1e-12);
}

TEST_CASE("a module of its own rank alone is local") {
  auto norm = make_norm(BatchNormOptions{2});
  auto twin = local_twin(norm);
  auto const x = random({4, 2, 3, 3});
  CHECK(syncnorm::size(norm->communicator()) == 1);
  CHECK(error_of(norm->forward(x), twin->forward(x)) <= 1e-12);
  CHECK(error_of(norm->running_var, twin->running_var) <= 1e-12);
}

TEST_CASE("frozen statistics, a running standard deviation, and one affine parameter alone") {
  torch::manual_seed(21);
  auto const x = random({5, 3, 2, 2});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    auto twin = local_twin(norm);
    norm->freeze_statistics();
    twin->eval();
    auto const before = state_of(*norm);
    if (comm.rank() == 0) { // not collective
      auto const own = x.clone().requires_grad_(), other = x.clone().requires_grad_();
      auto const y = norm->forward(own), expected = twin->forward(other);
      CHECK(error_of(y, expected) <= 1e-12);
      y.pow(2).sum().backward();
      expected.pow(2).sum().backward();
      CHECK(error_of(own.grad(), other.grad()) <= 1e-12);
      CHECK(error_of(norm->weight.grad(), twin->weight.grad()) <= 1e-12);
      CHECK(same_state(before, state_of(*norm)));
    }
    CHECK(std::dynamic_pointer_cast<SyncBatchNormImpl>(norm->clone())->has_frozen_statistics());

    norm->freeze_statistics(false);
    norm->set_running_variance(syncnorm::running_variance::standard_deviation);
    norm->forward(rows_of(x, comm.rank()));
    auto const flat = x.transpose(0, 1).reshape({3, -1});
    auto const deviation = (flat.var(1, /*unbiased=*/false) + 1e-5).sqrt();
    CHECK(error_of(norm->running_var, 0.9 * before[3] + 0.1 * deviation) <= 1e-12);
    norm->eval();
    auto const channel = [](Tensor const& t) { return t.view({1, 3, 1, 1}); };
    auto const expected =
        (x - channel(norm->running_mean)) / channel(norm->running_var) * channel(norm->weight) + channel(norm->bias);
    CHECK(error_of(norm->forward(x), expected) <= 1e-12);
  });

  auto const alone = [&](syncnorm::affine_parts parts) {
    SyncBatchNorm norm{BatchNormOptions{3}, syncnorm::any_communicator{}, 2, parts};
    norm->to(torch::kDouble);
    auto const own = x.clone().requires_grad_();
    auto const y = norm->forward(own);
    CHECK(error_of(y, torch::batch_norm(x, norm->weight, norm->bias, {}, {}, true, 0.1, 1e-5, false)) <= 1e-12);
    y.pow(3).sum().backward();
    CHECK(norm->parameters().size() == 1);
    CHECK(norm->parameters()[0].grad().defined());
    return norm;
  };
  CHECK_FALSE(alone(syncnorm::affine_parts::gamma)->bias.defined());
  CHECK_FALSE(alone(syncnorm::affine_parts::beta)->weight.defined());
}

TEST_CASE("inference mode, and evaluation by several threads at once") {
  auto norm = make_norm(BatchNormOptions{2});
  auto const x = random({4, 2, 3, 3});
  {
    auto twin = local_twin(norm);
    c10::InferenceMode const inference;
    auto const y = norm->forward(x);
    CHECK(y.is_inference());
    CHECK(error_of(y, twin->forward(x)) <= 1e-12);
    norm->eval();
    twin->eval();
    CHECK(error_of(norm->forward(y), twin->forward(y)) <= 1e-12);
  }
  auto const input = x.clone().requires_grad_();
  auto const expected = torch::autograd::grad({norm->forward(input).pow(2).sum()}, {input})[0];
  std::vector<Tensor> got(4);
  {
    std::vector<std::jthread> threads;
    for (auto& gradient : got)
      threads.emplace_back([&] {
        auto const own = x.clone().requires_grad_();
        for (int i = 0; i < 20; ++i) gradient = torch::autograd::grad({norm->forward(own).pow(2).sum()}, {own})[0];
      });
  }
  for (auto const& gradient : got) CHECK(torch::equal(gradient, expected));
}

TEST_CASE("empty batches everywhere change nothing") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    auto const before = state_of(*norm);
    auto const x = torch::empty({0, 3, 4}, torch::kDouble).requires_grad_();
    auto const y = norm->forward(x);
    CHECK((y.sizes() == x.sizes()));
    y.sum().backward();
    CHECK((x.grad().sizes() == x.sizes()));
    CHECK(torch::equal(norm->weight.grad(), torch::zeros({3}, torch::kDouble)));
    CHECK(same_state(before, state_of(*norm)));
  });
}

TEST_CASE("every rank holds the same bits of the running statistics") {
  torch::manual_seed(12);
  auto const x = torch::randn({40, 130, 3}) * 3 + 100;
  std::vector<std::vector<Tensor>> states(4);
  run_ranks(4, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{130}, comm, torch::kFloat);
    for (int step = 0; step < 3; ++step) {
      auto const first = comm.rank() * (comm.rank() + 1) * 3;
      norm->forward(x.slice(0, first, std::min<std::int64_t>(40, first + 6 * (comm.rank() + 1))));
    }
    states[static_cast<std::size_t>(comm.rank())] = state_of(*norm);
  });
  for (auto const& state : states) CHECK(same_state(state, states[0]));
}

TEST_CASE("only what needs a gradient gets one, and every rank joins") {
  torch::manual_seed(15);
  auto const x = random({5, 3, 4}), dy = random({5, 3, 4});
  // Which of input, weight and bias need a gradient, on rank 0 and on rank 1.
  struct needs {
    bool x, weight, bias;
  };
  std::vector<std::pair<needs, needs>> const cases{
      {{true, false, false}, {true, false, false}},  {{false, true, true}, {false, true, true}},
      {{true, true, false}, {true, false, true}},    {{false, false, true}, {true, true, true}},
      {{false, false, false}, {true, true, true}},   {{true, false, false}, {false, false, false}},
      {{false, false, false}, {false, false, false}}};
  auto whole = x.clone().requires_grad_();
  auto reference = make_norm(BatchNormOptions{3});
  reference->forward(whole).backward(dy);
  for (bool const is_double : {false, true})
    for (auto const& [first, second] : cases)
      run_ranks(2, [&, on_first = first, on_second = second](thread_communicator const& comm) {
        auto const type = is_double ? torch::kDouble : torch::kFloat;
        auto const tolerance = tolerance_of(type);
        auto const need = comm.rank() == 0 ? on_first : on_second;
        auto const rank_needs = [](needs const& n) { return n.x || n.weight || n.bias; };
        bool const recorded = rank_needs(on_first) || rank_needs(on_second);
        auto norm = make_norm(BatchNormOptions{3}, comm, type);
        norm->weight.set_requires_grad(need.weight);
        norm->bias.set_requires_grad(need.bias);
        auto const own = rows_of(x, comm.rank()).to(type).clone().set_requires_grad(need.x);
        auto const y = norm->forward(own);
        CHECK(y.requires_grad() == recorded);
        if (!recorded) return;
        y.backward(rows_of(dy, comm.rank()).to(type));
        CHECK(own.grad().defined() == need.x);
        CHECK(norm->weight.grad().defined() == need.weight);
        CHECK(norm->bias.grad().defined() == need.bias);
        if (need.x) CHECK(error_of(own.grad(), rows_of(whole.grad(), comm.rank()), 1) <= tolerance);
        auto const terms = rows_of(dy, comm.rank()).sum(at::IntArrayRef{0, 2});
        if (need.bias) CHECK(error_of(norm->bias.grad(), terms, 1) <= tolerance);
      });
}

TEST_CASE("the rank that records no gradients is found before it is waited for") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{2}, comm);
    auto const before = state_of(*norm);
    auto const x = random({2, 2});
    at::AutoGradMode const recording{comm.rank() == 0};
    auto const text = message_of<mismatch_error>([&] { norm->forward(x); });
    CHECK_MESSAGE(contains(text, "rank 0 needs one, rank 1 records no gradients"), text);
    CHECK(same_state(before, state_of(*norm)));
  });
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{2}, comm);
    torch::NoGradGuard const no_recording;
    CHECK_FALSE(norm->forward(random({2, 2})).requires_grad());
  });
}

TEST_CASE("graphs: kept, freed, of several passes, of inputs that changed") {
  torch::manual_seed(16);
  auto const x = random({5, 3, 4}), dy = random({5, 3, 4});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    auto const g = rows_of(dy, comm.rank());
    auto own = rows_of(x, comm.rank()).clone().requires_grad_();

    auto const y = norm->forward(own);
    y.backward(g, /*retain_graph=*/true);
    auto const once = own.grad().clone();
    y.backward(g);
    CHECK(torch::equal(own.grad(), 2 * once));
    auto text = message_of<invalid_argument_error>([&] { y.backward(g); });
    CHECK_MESSAGE(contains(text, "a second time"), text);

    // Two passes of one module, differentiated together.
    own.mutable_grad() = Tensor{};
    (norm->forward(own) + norm->forward(own)).backward(g);
    CHECK(error_of(own.grad(), 2 * once) <= 1e-12);

    // On one rank the input is written to after the pass: all ranks hear of it, and can go on.
    auto const base = own.detach().clone();
    auto changed = base + 0;
    auto const z = norm->forward(changed);
    norm->zero_grad(/*set_to_none=*/false); // as libtorch 2 does not by default
    if (comm.rank() == 1) changed.add_(1);
    text = message_of<invalid_argument_error>([&] { z.backward(g); });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);
    CHECK(scale_of(norm->weight.grad()) == 0);
    own.mutable_grad() = Tensor{};
    norm->forward(own).backward(g);
    CHECK(error_of(own.grad(), once) <= 1e-12);

    // A graph outlives its module and its communicator's use elsewhere.
    auto last = norm->forward(own);
    norm->set_communicator(syncnorm::self_communicator{});
    norm = SyncBatchNorm{nullptr};
    own.mutable_grad() = Tensor{};
    last.backward(g);
    CHECK(error_of(own.grad(), once) <= 1e-12);
  });
}

TEST_CASE("gradient accumulation: the backward exchange on the last step alone") {
  torch::manual_seed(17);
  auto const x = random({5, 3, 4}), dy = random({5, 3, 4});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto inner = make_norm(BatchNormOptions{3}, comm);
    torch::nn::Sequential model{inner};
    auto reference = make_norm(BatchNormOptions{3});
    auto own = rows_of(x, comm.rank()).clone().requires_grad_();
    auto whole = x.clone().requires_grad_();

    // Without the exchange the statistics are still those of all ranks, but the other ranks' gradients count as zero.
    syncnorm::torch::set_backward_exchange(*model, false);
    CHECK_FALSE(inner->backward_exchange());
    auto only_own = torch::zeros_like(dy);
    rows_of(only_own, comm.rank()).copy_(rows_of(dy, comm.rank()));
    auto const y = model->forward(own);
    if (comm.rank() == 0) y.backward(rows_of(dy, 0)); // not collective: rank 1 comes later
    syncnorm::barrier(comm);
    if (comm.rank() == 1) y.backward(rows_of(dy, 1));
    reference->forward(whole).backward(only_own);
    CHECK(error_of(own.grad(), rows_of(whole.grad(), comm.rank())) <= 1e-12);
    CHECK(error_of(inner->weight.grad(), reference->weight.grad()) <= 1e-12);

    // It reaches passes that were recorded before the module got another communicator.
    syncnorm::torch::set_backward_exchange(*model, true);
    auto const earlier = model->forward(own);
    auto another = comm;
    inner->set_communicator(another);
    syncnorm::torch::set_backward_exchange(*model, false);
    if (comm.rank() == 0) (void)torch::autograd::grad({earlier.sum()}, {own});
    reference->forward(whole); // whose running statistics follow
    syncnorm::barrier(comm);

    syncnorm::torch::set_backward_exchange(*model, true);
    model->forward(own).backward(rows_of(dy, comm.rank()));
    reference->forward(whole).backward(dy);
    CHECK(error_of(own.grad(), rows_of(whole.grad(), comm.rank())) <= 1e-12);
    CHECK(error_of(inner->bias.grad(), 2 * rows_of(dy, comm.rank()).sum(at::IntArrayRef{0, 2})) <= 1e-12);
  });
}

TEST_CASE("inputs and gradients that are marked as zeros are zeros") {
  auto const x = random({4, 3, 2, 2});
  auto const marked = torch::_efficientzerotensor(x.sizes(), x.options());
  REQUIRE(marked._is_zerotensor());
  auto const zeros = torch::zeros_like(x);
  for (auto const format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast})
    run_ranks(2, [&](thread_communicator const& comm) {
      auto const run = [&](Tensor const& zero) {
        auto norm = make_norm(BatchNormOptions{3}, comm);
        auto const own = x.contiguous(format).detach().requires_grad_();
        norm->forward(own).backward(comm.rank() == 0 ? zero : x);
        auto const y = norm->forward(comm.rank() == 0 ? zero : x);
        y.backward(x);
        return std::vector{own.grad(), y.detach(), norm->weight.grad(), norm->running_var};
      };
      auto const got = run(marked), expected = run(zeros);
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(torch::equal(got[i], expected[i]));
    });
}
