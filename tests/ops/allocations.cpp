#include <array>
#include <barrier>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/syncnorm.hpp>

#include "support/allocations.hpp"

namespace {

using syncnorm::thread_communicator;

struct extents {
  std::int64_t samples, channels, spatial;
};

/// Tensors of a step, and a mask that leaves out every fifth position.
struct step_tensors {
  extents of;
  std::vector<float> x, y, dy, dx, more;
  std::vector<std::uint8_t> mask;

  explicit step_tensors(extents const& shape) : of{shape} {
    x.resize(static_cast<std::size_t>(of.samples * of.channels * of.spatial));
    for (auto* const other : {&y, &dy, &dx, &more}) other->resize(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(i % 97);
      dy[i] = static_cast<float>(i % 89);
    }
    mask.assign(static_cast<std::size_t>(of.samples * of.spatial), 1);
    for (std::size_t i = 0; i < mask.size(); i += 5) mask[i] = 0;
  }
  [[nodiscard]] syncnorm::tensor_view<float> view(std::vector<float>& values) const {
    return syncnorm::nchw(values.data(), of.samples, of.channels, of.spatial);
  }
  [[nodiscard]] syncnorm::mask_view counts() const { return syncnorm::mask_of(mask.data(), of.samples, of.spatial); }
};

/// Has the group make as many places for operations in flight as ranks that run ahead of one another could ever need, with
/// room for any message of a test.
void fill_group(thread_communicator const& comm, std::barrier<>& all_ranks) {
  constexpr std::size_t message = 100'000, operations = 16;
  std::vector<std::byte> const own(message);
  std::vector<std::byte> all(message * static_cast<std::size_t>(comm.size()));
  for (int burst = 0; burst < 2; ++burst) { // of which the second takes the place after the last of the first
    {
      std::vector<syncnorm::any_work> works;
      syncnorm::any_communicator const any{comm};
      for (std::size_t i = 0; i < operations; ++i) works.push_back(any.allgather_async(std::span{own}, std::span{all}));
      for (auto& work : works) work.wait();
    }
    all_ranks.arrive_and_wait(); // until the places are free again
  }
}

/// Allocations of all ranks in four steps after the first; `make(comm, tensors)` gives a step.
template <class Make>
int allocations_after_first_step(int ranks, extents const& of, Make const& make, bool filled = true,
                                 int first_steps = 1) {
  static_cast<void>(test::take_allocations());
  std::barrier<> all_ranks{ranks};
  syncnorm::run_ranks(ranks, [&](thread_communicator const& comm) {
    step_tensors tensors{of};
    if (filled) fill_group(comm, all_ranks);
    auto step = make(comm, tensors);
    for (int i = 0; i < first_steps; ++i) step();
    test::count_allocations(true);
    for (int i = 0; i < 4; ++i) step();
    test::count_allocations(false);
  });
  return test::take_allocations();
}

using layer_type = syncnorm::batch_norm<float, thread_communicator>;

/// A forward and a backward pass.
int of_passes(int ranks, extents const& of, bool masked = false,
              syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  return allocations_after_first_step(
      ranks, of,
      [&](thread_communicator const& comm, step_tensors& t) {
        syncnorm::batch_norm_epilogue<float> epilogue;
        if (masked)
          epilogue = {.activation = syncnorm::activation::relu(), .residual = t.view(t.dy), .mask = t.counts()};
        return [&t, epilogue, layer = layer_type{comm, of.channels, {.norm = {.exchange = policy}}}]() mutable {
          layer.forward(t.view(t.x), t.view(t.y), epilogue);
          layer.backward(t.view(t.x), t.view(t.dy), t.view(t.dx), epilogue,
                         epilogue.has_residual() ? t.view(t.more) : syncnorm::tensor_view<float>{});
        };
      },
      /*filled=*/masked);
}

/// And a double backward pass.
int of_double_backward(int ranks, extents const& of, bool masked,
                       syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  return allocations_after_first_step(ranks, of, [&](thread_communicator const& comm, step_tensors& t) {
    syncnorm::batch_norm_epilogue<float> epilogue;
    if (masked) epilogue = {.activation = syncnorm::activation::leaky_relu(0.5), .mask = t.counts()};
    return [&t, epilogue, a = std::vector<float>(static_cast<std::size_t>(of.channels), 1),
            layer = layer_type{comm, of.channels, {.norm = {.exchange = policy}}}]() mutable {
      layer.forward(t.view(t.x), t.view(t.y), epilogue);
      layer.backward(t.view(t.x), t.view(t.dy), t.view(t.dx), epilogue, {});
      layer.double_backward({.dx = t.view(t.dy), .gamma_gradient = a}, t.view(t.x), t.view(t.dy), t.view(t.y),
                            t.view(t.more), epilogue);
      // The gradient to x alone, so that what was activated has no place of its own.
      layer.double_backward({.dx = t.view(t.dy)}, t.view(t.x), t.view(t.dy), {}, t.view(t.more), epilogue);
    };
  });
}

/// In place, over two micro-batches, without epilogues and with them, and both.
int of_other_modes(int ranks, extents const& of) {
  return allocations_after_first_step(ranks, of, [&](thread_communicator const& comm, step_tensors& t) {
    return [&t, of, in_place = layer_type{comm, of.channels}, batches = layer_type{comm, of.channels}]() mutable {
      in_place.gamma()[0] = 0; // of which x has to be kept
      t.y = t.x;
      in_place.forward_in_place(t.view(t.y));
      in_place.backward_in_place(t.view(t.y), t.view(t.dy), t.view(t.dx));
      auto const halves = [&](auto const& view) {
        return std::array{view.sample_range(0, 1), view.sample_range(1, of.samples - 1)};
      };
      auto const read = [&](syncnorm::tensor_view<float const> const& view) { return halves(view); };
      auto const x = read(t.view(t.x)), dy = read(t.view(t.dy));
      auto const y = halves(t.view(t.y)), dx = halves(t.view(t.dx));
      batches.forward(x, y);
      batches.backward(x, dy, dx);
      auto const whole = t.counts();
      auto const mask = [&](std::int64_t first, std::int64_t length) {
        return syncnorm::mask_of(whole.data + first * whole.stride_n, length, whole.spatial);
      };
      auto const relu = syncnorm::activation::relu();
      std::array<syncnorm::batch_norm_epilogue<float>, 2> const epilogues{
          {{.activation = relu, .mask = mask(0, 1)}, {.activation = relu, .mask = mask(1, of.samples - 1)}}};
      batches.forward(x, y, epilogues);
      batches.backward(x, dy, dx, epilogues);
      t.y = t.x;
      in_place.forward_in_place(y, epilogues);
      in_place.backward_in_place(y, dy, dx, epilogues);
    };
  });
}

syncnorm::batch_norm_epilogue<float> masked_relu(step_tensors const& t, bool masked) {
  syncnorm::batch_norm_epilogue<float> epilogue;
  if (masked) epilogue = {.activation = syncnorm::activation::relu(), .mask = t.counts()};
  return epilogue;
}

/// Passes in two phases, of which two are pending at a time.
int of_two_phases(int ranks, extents const& of, bool masked,
                  syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  return allocations_after_first_step(ranks, of, [&](thread_communicator const& comm, step_tensors& t) {
    syncnorm::batch_norm_layer_options const options{.norm = {.exchange = policy}};
    return [&t, epilogue = masked_relu(t, masked), a = layer_type{comm, of.channels, options},
            b = layer_type{comm, of.channels, options}]() mutable {
      auto first = a.begin_forward(t.view(t.x), t.view(t.y), epilogue);
      auto second = b.begin_forward(t.view(t.dy), t.view(t.more), epilogue);
      second.finish();
      first.finish();
      first = a.begin_backward(t.view(t.x), t.view(t.dy), t.view(t.dx), epilogue);
      second = b.begin_backward(t.view(t.dy), t.view(t.x), t.view(t.more), epilogue);
      first.finish();
      second.finish();
    };
  });
}

/// Groups of three layers, one of them by constant statistics.
int of_groups(int ranks, extents const& of, bool masked,
              syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  return allocations_after_first_step(ranks, of, [&](thread_communicator const& comm, step_tensors& t) {
    syncnorm::batch_norm_layer_options const options{.norm = {.exchange = policy}};
    auto frozen = layer_type{comm, of.channels, options};
    frozen.freeze_statistics();
    return [&t, epilogue = masked_relu(t, masked), group = syncnorm::batch_norm_group{comm},
            a = layer_type{comm, of.channels, options}, b = layer_type{comm, of.channels, options},
            frozen = std::move(frozen), out = std::vector<float>(t.x.size())]() mutable {
      group.run(syncnorm::passes(a.plan_forward(t.view(t.x), t.view(t.y), epilogue),
                                 b.plan_forward(t.view(t.dy), t.view(t.more), epilogue),
                                 frozen.plan_forward(t.view(t.x), t.view(out), epilogue)));
      group.run(syncnorm::passes(a.plan_backward(t.view(t.x), t.view(t.dy), t.view(t.dx), epilogue),
                                 b.plan_backward(t.view(t.dy), t.view(t.x), t.view(t.more), epilogue),
                                 frozen.plan_backward(t.view(t.x), t.view(t.dy), t.view(out), epilogue)));
    };
  });
}

int of_power_norm(int ranks, extents const& of, syncnorm::power_norm_options const& options) {
  return allocations_after_first_step(
      ranks, of,
      [&](thread_communicator const& comm, step_tensors& t) {
        return [&t, layer = syncnorm::power_norm<float, thread_communicator>{
                        comm, of.channels, {.norm = options}}]() mutable {
          layer.forward(t.view(t.x), t.view(t.y), t.counts());
          layer.backward(t.view(t.x), t.view(t.dy), t.view(t.dx));
        };
      },
      /*filled=*/true, ranks == 1 ? 1 : 3); // of which two see passes that are still in flight
}

/// Of batches with channels outermost, of which a pass takes copies of the views.
int of_channels_outermost(int ranks, extents const& of, bool masked) {
  return allocations_after_first_step(ranks, of, [&](thread_communicator const& comm, step_tensors& t) {
    return [&t, of, masked, layer = layer_type{comm, of.channels}]() mutable {
      auto const view = [&](std::vector<float>& values) -> syncnorm::tensor_view<float> {
        return {values.data(), of.samples, of.channels, of.spatial, of.spatial, of.samples * of.spatial, 1};
      };
      auto const epilogue = masked_relu(t, masked);
      layer.forward(view(t.x), view(t.y), epilogue);
      layer.backward(view(t.x), view(t.dy), view(t.dx), epilogue, {});
    };
  });
}

/// Of complex numbers, at once and in two phases.
int of_complex_numbers(int ranks, extents const& of, bool masked) {
  return allocations_after_first_step(ranks, of, [&](thread_communicator const& comm, step_tensors& t) {
    using number = std::complex<float>;
    using complex_type = syncnorm::complex_batch_norm<float, thread_communicator>;
    syncnorm::batch_norm_mask const mask{masked ? t.counts() : syncnorm::mask_view{}};
    return
        [of, mask, x = std::vector<number>(t.x.begin(), t.x.end()), y = std::vector<number>(t.x.size()),
         a =
             complex_type{
                 comm, of.channels, {}, {}, masked ? syncnorm::gamma_numbers::real : syncnorm::gamma_numbers::complex},
         b = complex_type{comm, of.channels}]() mutable {
          auto const view = [&](auto& values) {
            return syncnorm::nchw(values.data(), of.samples, of.channels, of.spatial);
          };
          a.forward(view(x), view(y), mask);
          a.backward(view(x), view(x), view(y), mask);
          b.begin_forward(view(x), view(y), mask).finish();
          b.begin_backward(view(x), view(x), view(y), mask).finish();
          syncnorm::tensor_view<number const> const second = view(x);
          a.double_backward({.dx = {&second, 1}, .gamma_gradient = b.gamma()}, view(x), view(x), {}, view(y), mask);
        };
  });
}

} // namespace

TEST_CASE("a step after the first allocates nothing") {
  CHECK(of_passes(1, {4, 24, 49}) == 0);
  CHECK(of_passes(2, {4, 24, 49}) == 0);
  CHECK(of_passes(2, {4, 200, 9}) == 0);
  CHECK(of_passes(3, {64, 16, 1}) == 0);
  CHECK(of_passes(1, {8, 96, 1568}) == 0);
  CHECK(of_passes(1, {8, 96, 1568}, true) == 0);
  // Exchanged in parts.
  CHECK(of_passes(2, {8, 96, 1568}) == 0);
  CHECK(of_passes(2, {4, 200, 9}, false, syncnorm::exchange_policy::reduce) == 0);
}

TEST_CASE("a step with an epilogue and a mask allocates nothing after the first") {
  CHECK(of_passes(1, {4, 24, 49}, true) == 0);
  CHECK(of_passes(2, {4, 200, 9}, true) == 0);
  CHECK(of_passes(2, {8, 96, 1568}, true) == 0);
  CHECK(of_passes(3, {64, 16, 1}, true) == 0);
}

TEST_CASE("neither in place nor over micro-batches does a step allocate after the first") {
  CHECK(of_other_modes(1, {4, 24, 49}) == 0);
  CHECK(of_other_modes(2, {4, 200, 9}) == 0);
}

TEST_CASE("neither in two phases nor in groups does a step allocate after the first") {
  using syncnorm::exchange_policy;
  for (bool const masked : {false, true})
    for (auto const policy : {exchange_policy::gather, exchange_policy::reduce}) {
      CHECK(of_two_phases(1, {4, 24, 49}, masked, policy) == 0);
      CHECK(of_two_phases(3, {4, 200, 9}, masked, policy) == 0);
      CHECK(of_groups(1, {4, 24, 49}, masked, policy) == 0);
      CHECK(of_groups(3, {4, 200, 9}, masked, policy) == 0);
    }
}

TEST_CASE("what one thread begins and another finishes leaves them no more memory with every step") {
  extents const of{4, 3, 200};
  step_tensors t{of};
  std::vector<std::uint8_t> every_other(t.mask.size() * 2, 1); // which has to be copied
  every_other[0] = 0;
  syncnorm::batch_norm_epilogue<float> const epilogue{
      .mask = {every_other.data(), of.samples, of.spatial, 2 * of.spatial, 2}};
  syncnorm::batch_norm<float> layer{syncnorm::self_communicator{}, of.channels};
  std::optional<syncnorm::pending_passes> pending;
  constexpr int steps = 200;
  std::barrier both{2};
  std::jthread const finisher{[&] {
    for (int i = 0; i < steps; ++i) {
      both.arrive_and_wait();
      pending->finish();
      pending.reset();
      both.arrive_and_wait();
    }
    both.arrive_and_wait();
  }};
  int live_before = 0;
  for (int i = 0; i < steps; ++i) {
    pending.emplace(layer.begin_forward(t.view(t.x), t.view(t.y), epilogue));
    both.arrive_and_wait();
    both.arrive_and_wait();
    if (i == steps / 2) live_before = test::live_allocations();
  }
  int const live_after = test::live_allocations();
  both.arrive_and_wait();
  CHECK(live_after == live_before);
}

TEST_CASE("double backward allocates nothing after the first step") {
  for (bool const masked : {false, true}) {
    CHECK(of_double_backward(1, {4, 24, 49}, masked) == 0);
    CHECK(of_double_backward(1, {8, 96, 1568}, masked) == 0); // in blocks
    CHECK(of_double_backward(2, {4, 200, 9}, masked) == 0);
    CHECK(of_double_backward(3, {4, 200, 9}, masked, syncnorm::exchange_policy::reduce) == 0);
  }
}

TEST_CASE("power norm allocates nothing after the first steps, in the warm-up and after it") {
  for (auto const recursion : {syncnorm::power_norm_recursion::reference, syncnorm::power_norm_recursion::corrected})
    for (std::int64_t const warmup : {0, 100})
      for (std::int64_t const groups : {0, 8}) {
        syncnorm::power_norm_options const options{.warmup_iters = warmup, .groups = groups, .recursion = recursion};
        CHECK(of_power_norm(1, {16, 64, 9}, options) == 0);
        CHECK(of_power_norm(1, {16, 200, 9}, options) == 0);
        CHECK(of_power_norm(2, {16, 200, 9}, options) == 0);
        CHECK(of_power_norm(2, {1024, 1024, 1}, options) == 0);
      }
}

TEST_CASE("a step of a batch with channels outermost after the first allocates nothing") {
  for (bool const masked : {false, true}) {
    CHECK(of_channels_outermost(1, {4, 24, 49}, masked) == 0);
    CHECK(of_channels_outermost(2, {4, 200, 9}, masked) == 0);
  }
}

TEST_CASE("a step of complex numbers after the first allocates nothing") {
  for (bool const masked : {false, true}) {
    CHECK(of_complex_numbers(1, {4, 24, 49}, masked) == 0);
    CHECK(of_complex_numbers(2, {4, 200, 9}, masked) == 0);
    CHECK(of_complex_numbers(2, {8, 96, 784}, masked) == 0); // in parts
  }
}

TEST_CASE("allocations are counted") {
  static_cast<void>(test::take_allocations());
  test::count_allocations(true);
  std::vector<double> const values(100);
  test::count_allocations(false);
  CHECK(values.size() == 100);
  CHECK(test::take_allocations() == 1);
}
