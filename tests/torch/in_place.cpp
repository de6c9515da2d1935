#include <cstdint>
#include <malloc.h>
#include <memory>
#include <span>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "support.hpp"

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/batch_norm_group.hpp>
#include <syncnorm/torch/micro_batches.hpp>

using namespace test;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using syncnorm::torch::forward_batches;
using syncnorm::torch::group_forward;
using syncnorm::torch::norm_epilogue;

namespace {

/// The type of the totals that are reported, which libtorch 2 has changed.
template <class Total>
Total total_of(void (c10::MemoryReportingInfoBase::*)(void*, int64_t, Total, Total, c10::Device));
using total = decltype(total_of(&c10::MemoryReportingInfoBase::reportMemoryUsage));

/// Counts the bytes of tensors that are alive.
struct live_bytes : c10::MemoryReportingInfoBase {
  std::int64_t bytes = 0;
  void reportMemoryUsage(void*, int64_t size, total, total, c10::Device) override { bytes += size; }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
};

/// How a pass is run; apart: not in place.
enum class way { apart, at_once, begun, grouped };

Tensor forward(way how, SyncBatchNorm& norm, Tensor const& input, norm_epilogue const& with = {}) {
  if (how == way::begun) return norm->begin_forward(input, with).finish();
  if (how != way::grouped) return norm->forward_with(input, with);
  SyncBatchNorm other{BatchNormOptions{1}, norm->communicator()};
  return group_forward({{other, torch::ones({2, 1})}, {norm, input, with}}).back();
}

/// A rank whose exchanges fail after so many.
struct failing {
  thread_communicator comm;
  int* left; ///< negative: none fails

  [[nodiscard]] int rank() const { return comm.rank(); }
  [[nodiscard]] int size() const { return comm.size(); }
  [[nodiscard]] double exchange_overhead() const { return 0; } // so that there are many
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    if ((*left)-- == 0) throw syncnorm::communicator_error{"failing", "the link is lost"};
    comm.allgather(in, out);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op) const {
    comm.allreduce(in, out, op);
  }
};

} // namespace

TEST_CASE("in place, gradients are those of a module apart, and a tensor less is kept") {
  torch::manual_seed(24);
  for (auto const type : {torch::kDouble, torch::kFloat})
    for (auto const format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      auto const x = random({5, 4, 8, 8}).to(type), dy = random({5, 4, 8, 8}).to(type);
      auto const residual = random({5, 4, 8, 8}).to(type);
      auto const mask = torch::rand({5, 8, 8}) < 0.7;
      run_ranks(2, [&](thread_communicator const& comm) {
        auto const own = [&](Tensor const& of) { return rows_of(of, comm.rank()).contiguous(format).detach().clone(); };
        for (bool const unrecoverable : {false, true})
          for (bool const evaluates : {false, true}) {
            std::vector<Tensor> apart;
            std::int64_t kept_apart = 0;
            for (auto const how : {way::apart, way::at_once, way::begun, way::grouped}) {
              bool const in_place = how != way::apart;
              auto norm = make_norm(BatchNormOptions{4}.eps(1e-2), comm, type);
              norm->weight.detach()[1] = unrecoverable ? 0 : 0.75;
              norm->set_in_place(in_place);
              norm->train(!evaluates);
              auto const leaf = own(x).requires_grad_(), added = own(residual).requires_grad_();
              norm_epilogue const with{.activation = syncnorm::activation::leaky_relu(0.25),
                                       .residual = added,
                                       .mask = rows_of(mask, comm.rank())};
              auto const counter = std::make_shared<live_bytes>();
              std::int64_t kept = 0;
              std::vector<Tensor> results;
              {
                c10::DebugInfoGuard const counts{c10::DebugInfoKind::PROFILER_STATE, counter};
                auto const input = leaf * 2; // which does not need its result
                auto const* const memory = input.data_ptr();
                auto const y = forward(how, norm, input, with);
                CHECK((y.data_ptr() == memory) == in_place);
                CHECK(y.is_same(input) == in_place);
                kept = counter->bytes;
                (y * 0.5).backward(own(dy), /*retain_graph=*/true);
                leaf.mutable_grad() = added.mutable_grad() = norm->weight.mutable_grad() = Tensor{};
                // As by optimizers that tell autograd nothing of it.
                norm->weight.data().add_(0.5);
                norm->bias.data().sub_(0.25);
                (y * 0.5).backward(own(dy));
                results = {y.detach().clone(), leaf.grad(), added.grad(), norm->weight.grad(), norm->bias.grad()};
              }
              if (!in_place) {
                apart = results;
                kept_apart = kept;
                continue;
              }
              INFO("unrecoverable ", unrecoverable, ", evaluates ", evaluates, ", rank ", comm.rank());
              CAPTURE(static_cast<int>(how));
              // Of recovered values: the last bit of y, times what `recoverable_ratio` allows; 3 here.
              auto const tolerance = type == torch::kDouble ? 1e-12 : 1e-5;
              for (std::size_t i = 0; i < apart.size(); ++i) CHECK(error_of(results[i], apart[i], 1) <= tolerance);
              // Elements of a channel that is kept are in no tensor, and too many to count as none.
              auto const tensor = rows_of(x, comm.rank()).numel() * x.element_size();
              CHECK(kept_apart - kept >= tensor - 256);
            }
          }
      });
    }
}

TEST_CASE("in place, a graph goes with its outputs, also over views") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    norm->set_in_place();
    auto const leaf = random({4, 3, 2, 2}).requires_grad_();
    for (int const kind : {0, 1, 2, 3, 4, 5})
      for (bool const evaluates : {false, true})
        for (int const backward_passes : {0, 1, 2}) {
          norm->train(!evaluates);
          auto const step = [&] {
            auto const base = leaf * 1;
            auto const x = base.view({4, 3, 4});
            Tensor y;
            if (kind == 0) y = norm->forward(x);
            if (kind == 1) y = norm->begin_forward(x).finish();
            if (kind == 2) y = group_forward({{norm, x}}).front();
            if (kind == 3) y = forward_batches(norm, {x}).front();
            if (kind == 4) y = forward_batches(norm, {x.slice(0, 0, 2), x.slice(0, 2)}).back();
            if (kind == 5) y = group_forward({{norm, x.slice(0, 0, 2)}, {norm, x.slice(0, 2)}}).back();
            if (backward_passes > 0) y.sum().backward({}, /*retain_graph=*/backward_passes == 2);
          };
          step(); // which makes gradients, to be added to
          auto const counter = std::make_shared<live_bytes>();
          {
            c10::DebugInfoGuard const counts{c10::DebugInfoKind::PROFILER_STATE, counter};
            step();
          }
          CAPTURE(kind);
          CAPTURE(evaluates);
          CAPTURE(backward_passes);
          CHECK(counter->bytes == 0);
        }
  });
}

TEST_CASE("in place, over views of one tensor, that tensor and gradients are those of passes apart") {
  torch::manual_seed(26);
  auto const x = random({8, 4, 3}), factors = random({8, 4, 3});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const own = [&](Tensor const& of) { return of.slice(0, 4 * comm.rank(), 4 * comm.rank() + 4).clone(); };
    auto const forward_both = [](int kind, SyncBatchNorm first, SyncBatchNorm const& second, Tensor const& a,
                                 Tensor const& b, norm_epilogue const& of_b) -> std::vector<Tensor> {
      if (kind == 0) return forward_batches(first, {a, b}, {{}, of_b});
      if (kind == 1) return syncnorm::torch::begin_forward_batches(first, {a, b}, {{}, of_b}).finish();
      if (kind == 2) return group_forward({{first, a}, {second, b, of_b}});
      auto const other = torch::ones({3, 4, 2}, torch::kDouble).slice(0, 1);
      return syncnorm::torch::group_forward_batches({{second, {other}}, {first, {a, b}, {{}, of_b}}})[1];
    };
    for (bool const needs_input : {true, false})
      for (bool const evaluates : {false, true})
        for (int const kind : {0, 1, 2, 3}) {
          std::vector<Tensor> results[2];
          for (int const in_place : {0, 1}) {
            auto first = make_norm(BatchNormOptions{4}, comm), second = make_norm(BatchNormOptions{4}, comm);
            for (auto const& norm : {first, second}) {
              norm.ptr()->train(!evaluates);
              norm.ptr()->set_in_place(in_place == 1);
              norm->weight.detach()[2] = 0; // from which nothing is recovered
              // Without those of the input, rank 1 needs no gradient.
              for (auto& parameter : norm.ptr()->parameters())
                parameter.set_requires_grad(needs_input || comm.rank() == 0);
            }
            auto const leaf = own(x).set_requires_grad(needs_input),
                       added = own(factors).set_requires_grad(needs_input);
            auto const base = leaf * 1; // of which the first sample stays
            auto const a = base.slice(0, 1, 2), b = base.slice(0, 2);
            norm_epilogue const of_b{.activation = syncnorm::activation::leaky_relu(0.5),
                                     .residual = added.slice(0, 2)};
            auto const y = forward_both(kind, first, second, a, b, of_b);
            if (in_place == 1) CHECK((y[0].is_same(a) && y[1].is_same(b)));
            auto const whole = in_place == 1 ? base : torch::cat({base.slice(0, 0, 1), y[0], y[1]});
            results[in_place].push_back(whole.detach().clone());
            CHECK(whole.requires_grad() == (needs_input || comm.rank() == 0 || !evaluates));
            if (!whole.requires_grad()) continue;
            (whole * own(factors)).sum().backward();
            for (auto const& tensor : {leaf, added, first->weight, first->bias, second->weight})
              if (tensor.grad().defined()) results[in_place].push_back(tensor.grad());
          }
          CAPTURE(needs_input);
          CAPTURE(evaluates);
          CAPTURE(kind);
          REQUIRE(results[0].size() == results[1].size());
          for (std::size_t i = 0; i < results[0].size(); ++i) CHECK(error_of(results[1][i], results[0][i], 1) <= 1e-12);
        }
  });
}

TEST_CASE("what a pass keeps goes with its graph, or its backward pass") {
  auto const mask = torch::ones({64, 128}, torch::kBool); // of its own size, by which it is known
  auto norm = make_norm(BatchNormOptions{128});
  norm->weight.detach().zero_(); // so that no channel can be recovered
  auto const leaf = random({64, 128, 128}).requires_grad_();
  auto const tensor = leaf.numel() * leaf.element_size();
  auto const step = [&](bool retain) {
    auto const y = norm->forward_with(leaf * 1, {.mask = mask});
    y.sum().backward({}, retain);
    return y;
  };
  norm->set_in_place();
  step(false); // which makes gradients, to be added to
  auto const allocated = [] {
    auto const all = mallinfo2();
    return static_cast<std::int64_t>(all.uordblks + all.hblkhd);
  };
  {
    auto pending = norm->begin_forward(leaf * 1, {.mask = mask}); // which is done with when it is finished
    std::weak_ptr<torch::autograd::Node> const node = [&] {
      auto const y = pending.finish();
      y.sum().backward();
      return y.grad_fn();
    }();
    CHECK(node.expired());
  }
  for (bool const retain : {false, true}) {
    auto const counter = std::make_shared<live_bytes>();
    c10::DebugInfoGuard const counts{c10::DebugInfoKind::PROFILER_STATE, counter};
    auto const before = allocated();
    auto const y = step(retain);
    CAPTURE(retain);
    CHECK((counter->bytes >= tensor + mask.numel()) == retain);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) // which keep allocations themselves
    CHECK((allocated() - before >= 2 * tensor) == retain);
#endif
  }
}

TEST_CASE("in place: what autograd forbids is an error on every rank, and changes nothing") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    norm->set_in_place();
    auto const before = state_of(*norm);
    auto const values = random({4, 3, 2});
    auto const leaf = values.clone().requires_grad_();
    for (auto const how : {way::at_once, way::begun, way::grouped}) {
      auto const thrown = [&](Tensor const& input, norm_epilogue const& with = {}) {
        auto const of = input.grad_fn();
        auto const elements = input.detach().clone();
        auto const text = message_of<syncnorm::invalid_argument_error>([&] { forward(how, norm, input, with); });
        CHECK((input.grad_fn() == of && torch::equal(input, elements)));
        return text;
      };
      auto text = thrown(comm.rank() == 1 ? leaf : leaf * 1);
      CHECK_MESSAGE(contains(text, "rank 1: a leaf Variable that requires grad"), text);
      auto const part = (leaf * 1).unbind(0)[0].unsqueeze(0);
      text = thrown(comm.rank() == 1 ? part : leaf * 1);
      CHECK_MESSAGE(
          (contains(text, "rank 1") && contains(text, "is the output of a function that returns multiple views")),
          text);
      auto const both = leaf * 1;
      text = thrown(both, {.residual = comm.rank() == 0 ? both : leaf});
      CHECK_MESSAGE(contains(text, "rank 0: the residual is in the memory of the input"), text);
      text = thrown(both, {.residual = comm.rank() == 0 ? both.as_strided({4, 3, 2}, {1, 8, 4}) : leaf});
      CHECK_MESSAGE(contains(text, "rank 0: the residual is in the memory of the input"), text);
      auto const wide = random({4, 4, 2});
      auto const of_wide = wide.slice(1, 1);
      // Neighbours in one tensor, and on one rank with elements in common.
      text = thrown(of_wide, {.residual = comm.rank() == 0 ? wide.slice(1, 0, 3) : leaf});
      CHECK_MESSAGE(contains(text, "rank 0: the residual is in the memory of the input"), text);
      text = thrown(comm.rank() == 0 ? values.unsqueeze(3).expand({4, 3, 2, 2}) : values.unsqueeze(3) * 1);
      CHECK_MESSAGE(contains(text, "rank 0: the strides of the input allow no pass in place"), text);
    }
    CHECK(same_state(before, state_of(*norm)));

    // An operation before that needs its result; this is libtorch's own error, on each rank.
    auto const exponential = leaf.exp();
    auto const y = norm->forward(exponential);
    auto text = message_of<c10::Error>([&] { y.sum().backward(); });
    CHECK_MESSAGE(contains(text, "modified by an inplace operation"), text);
    // One after it that writes to y, on one rank.
    auto const written = norm->forward(leaf * 1);
    if (comm.rank() == 1) written.mul_(2);
    text = message_of<syncnorm::invalid_argument_error>([&] { written.sum().backward(); });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);

    auto const dx = torch::autograd::grad({norm->forward(leaf * 1).square().sum()}, {leaf}, {}, true, true)[0];
    text = message_of<syncnorm::error>([&] { dx.sum().backward(); });
    CHECK_MESSAGE(contains(text, "a pass in place (double backward) cannot be differentiated"), text);
    // Of x alone, by a constant.
    norm->weight.set_requires_grad(false);
    norm->bias.set_requires_grad(false);
    for (bool const view : {false, true}) {
      auto const x = leaf * 1;
      auto const slope = torch::autograd::grad({norm->forward(view ? x.view({4, 3, 1, 2}) : x).sum()}, {leaf}, {},
                                               /*retain_graph=*/true, /*create_graph=*/true)[0];
      text = message_of<syncnorm::error>([&] { torch::autograd::grad({slope.sum()}, {leaf}, {}, {}, false, true); });
      CHECK_MESSAGE(contains(text, "a pass in place (double backward) cannot be differentiated"), text);
    }
    // Without gradients, over whatever it is given.
    torch::NoGradGuard const no_recording;
    auto const input = leaf.detach().clone();
    CHECK(norm->forward(input).is_same(input));
  });
}

TEST_CASE("in place, a pass that is dropped or refused leaves its input as it was") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm), other = make_norm(BatchNormOptions{3}, comm);
    norm->set_in_place();
    auto const values = random({4, 3, 2});
    auto const leaf = values.clone().requires_grad_();
    auto const x = leaf * 1;
    auto const of = x.grad_fn();
    { auto const dropped = norm->begin_forward(x); }
    CHECK((x.grad_fn() == of && torch::equal(x, values)));
    // Written to between begin and finish, on one rank, which alone throws.
    auto begun = norm->begin_forward(x);
    if (comm.rank() == 1) x.add_(1);
    if (comm.rank() == 1) {
      auto const text = message_of<syncnorm::invalid_argument_error>([&] { (void)begun.finish(); });
      CHECK_MESSAGE(contains(text, "the input was written to before the pass was finished"), text);
    } else {
      CHECK(begun.finish().is_same(x));
    }
    auto const added = random({4, 3, 2});
    auto with_residual = norm->begin_forward(leaf * 1, {.residual = added});
    added.add_(1);
    auto const late = message_of<syncnorm::invalid_argument_error>([&] { (void)with_residual.finish(); });
    CHECK_MESSAGE(contains(late, "the residual was written to before the pass was finished"), late);

    // Neighbours in one tensor have nothing in common.
    auto const wide = random({4, 6, 2});
    auto const first = wide.slice(1, 0, 3), second = wide.slice(1, 3);
    auto const expected = other->forward_with(first.clone(), {.residual = second.clone()});
    CHECK(torch::allclose(norm->forward_with(first, {.residual = second}), expected));
    {
      torch::NoGradGuard const nothing_recorded;
      auto const rows = random({8, 3, 2});
      group_forward({{norm, rows.slice(0, 0, 4)}, {other, rows.slice(0, 4)}});
    }

    auto const refused = [&](std::vector<syncnorm::torch::group_member> const& members) {
      return message_of<syncnorm::invalid_argument_error>([&] { group_forward(members); });
    };
    auto const y = leaf * 1;
    for (auto const& members : {std::vector<syncnorm::torch::group_member>{{norm, y}, {other, y}},
                                {{other, leaf, {.residual = y}}, {norm, y}},
                                {{norm, y}, {norm, y}}}) {
      auto const text = refused(members);
      CHECK_MESSAGE(contains(text, "writes to memory that another pass of the group reads"), text);
      CHECK(torch::equal(y, values));
    }
  });
}

TEST_CASE("in place, what a pass that fails has written to is known to autograd") {
  run_ranks(2, [](thread_communicator const& comm) {
    int left = -1;
    auto norm = make_norm(BatchNormOptions{64}, failing{comm, &left});
    norm->set_in_place();
    auto const leaf = random({8, 64, 32, 32}).requires_grad_();
    for (int i = 0; i < 2; ++i) norm->forward(leaf * 1); // by which ranks agree on several exchanges
    for (int const arrive : {0, 1}) {
      left = arrive;
      auto const x = leaf.exp(); // which needs its result
      auto const values = x.detach().clone();
      auto text = message_of<syncnorm::communicator_error>([&] { norm->forward(x); });
      CHECK_MESSAGE(contains(text, "the link is lost"), text);
      CHECK(torch::equal(x, values) == (arrive == 0));
      text = message_of<c10::Error>([&] { x.sum().backward(); });
      CHECK_MESSAGE(contains(text, arrive == 0 ? "nothing was thrown" : "modified by an inplace operation"), text);
    }
  });
}

TEST_CASE("in place, a rank that needs no gradient takes part in the backward pass of those that do") {
  for (auto const how : {way::at_once, way::begun, way::grouped})
    run_ranks(2, [how](thread_communicator const& comm) {
      torch::manual_seed(25);
      auto const all = random({4, 3, 2}), dy = random({4, 3, 2});
      auto const part = [&](Tensor const& of) { return of.slice(0, 2 * comm.rank(), 2 * comm.rank() + 2).clone(); };
      bool const needs = comm.rank() == 0;
      Tensor gradients[2];
      for (int const in_place : {0, 1}) {
        auto norm = make_norm(BatchNormOptions{3}, comm);
        norm->set_in_place(in_place == 1);
        norm->weight.set_requires_grad(false);
        norm->bias.set_requires_grad(false);
        auto const leaf = part(all).set_requires_grad(needs);
        auto const x = needs ? leaf * 1 : leaf;
        auto const y = forward(in_place == 1 ? how : way::apart, norm, x);
        CHECK(y.is_same(x) == (in_place == 1));
        CHECK(y.requires_grad());
        y.backward(part(dy));
        gradients[in_place] = needs ? leaf.grad() : torch::zeros({1});
      }
      CHECK(error_of(gradients[1], gradients[0], 1) <= 1e-12);
    });
}
