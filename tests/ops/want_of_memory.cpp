#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/syncnorm.hpp>

#include "support/allocations.hpp"

// What becomes of a pass, and of those after it, where an allocation of one rank fails.
namespace {

using syncnorm::thread_communicator;

/// A batch [n, 3, s] of one rank, whose elements are about `center`.
struct small_batch {
  std::int64_t n, s;
  std::vector<float> x, y, dy, dx;
  std::vector<std::uint8_t> mask;

  small_batch(std::int64_t samples, std::int64_t spatial, float center) : n{samples}, s{spatial} {
    x.resize(static_cast<std::size_t>(n * 3 * s));
    y.resize(x.size()), dx.resize(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = center + std::sin(static_cast<float>(i));
      dy.push_back(std::cos(static_cast<float>(i)));
    }
    for (std::int64_t i = 0; i < n * s; ++i) mask.push_back(i % 3 != 0);
  }
  [[nodiscard]] syncnorm::tensor_view<float> view(std::vector<float>& of) const {
    return syncnorm::nchw(of.data(), n, 3, s);
  }
  [[nodiscard]] syncnorm::batch_norm_epilogue<float> masked() const {
    return {.mask = syncnorm::mask_of(mask.data(), n, s)};
  }
};

/// Calls f with this allocation failing; whether that has thrown.
template <class F>
bool fails(int allocation, F const& f) {
  bool thrown = false;
  test::fail_allocation(allocation);
  try {
    f();
  } catch (std::exception const&) { // of the library, too, which says what was thrown
    thrown = true;
  }
  test::fail_allocation(-1);
  return thrown;
}

} // namespace

TEST_CASE("a forward pass that lacked memory leaves nothing for a backward pass") {
  auto const check = [](auto const& forward) {
    int failures = 0;
    for (bool failed = true; failed; failures += failed ? 1 : 0) {
      syncnorm::batch_norm<float> layer{{}, 3};
      small_batch first{4, 5, 1}, second{4, 5, 10}; // of as many elements
      layer.forward(first.view(first.x), first.view(first.y));
      failed = fails(failures, [&] { forward(layer, second); });
      CAPTURE(failures);
      auto const backward = [&] {
        layer.backward(second.view(second.x), second.view(second.dy), second.view(second.dx), second.masked(), {});
      };
      if (failed) CHECK_THROWS_AS(backward(), syncnorm::invalid_argument_error);
    }
    CHECK(failures > 0);
  };
  // Threads of their own, which have no memory from passes before.
  auto const apart = [&](auto const& forward) { std::thread{[&] { check(forward); }}.join(); };
  apart([](auto& layer, auto& of) { layer.forward(of.view(of.x), of.view(of.y), of.masked()); });
  apart([](auto& layer, auto& of) {
    layer.eval();
    layer.forward(of.view(of.x), of.view(of.y));
  });
  apart([](auto& layer, auto& of) { layer.begin_forward(of.view(of.x), of.view(of.y), of.masked()).finish(); });
  apart([](auto& layer, auto& of) { layer.forward_in_place(of.view(of.x), of.masked()); });
}

TEST_CASE("a forward pass of a group that lacked memory leaves nothing for a backward pass") {
  std::thread{[] {
    int failures = 0;
    for (bool failed = true; failed; failures += failed ? 1 : 0) {
      syncnorm::batch_norm<float> layer{{}, 3};
      syncnorm::batch_norm_group group{syncnorm::self_communicator{}};
      small_batch first{4, 5, 1}, second{4, 5, 10}; // of as many elements
      layer.forward(first.view(first.x), first.view(first.y));
      auto planned = syncnorm::passes(layer.plan_forward(second.view(second.x), second.view(second.y)));
      failed = fails(failures, [&] { group.run(std::move(planned)); });
      CAPTURE(failures);
      auto const backward = [&] {
        layer.backward(second.view(second.x), second.view(second.dy), second.view(second.dx));
      };
      if (failed) CHECK_THROWS_AS(backward(), syncnorm::invalid_argument_error);
    }
    CHECK(failures > 0);
  }}.join();
}

TEST_CASE("a pass in two phases, or of a group, may end on a thread that lacks memory") {
  for (bool const dropped : {true, false}) {
    syncnorm::batch_norm<float> layer{{}, 3};
    small_batch of{4, 5, 1};
    auto pending = layer.begin_forward(of.view(of.x), of.view(of.y), of.masked());
    std::thread{[&] {
      bool const lacked = fails(0, [&] {
        auto own = std::move(pending);
        if (!dropped) own.finish();
      });
      CHECK(layer.num_batches_tracked() == (dropped || lacked ? 0 : 1));
    }}.join();
  }
}

TEST_CASE(
    "a pass of an agreed layer that lacks memory on one rank is an error on every rank, and the next one is right") {
  int failures = 0;
  for (bool failed = true; failed && failures < 30;) {
    failed = false;
    syncnorm::run_ranks(
        2,
        [&](thread_communicator const& comm) {
          bool const here = comm.rank() == 1;
          syncnorm::batch_norm<float, thread_communicator> layer{comm, 3};
          small_batch first{4, 5, 1}, second{6, 7, 10};
          layer.forward(first.view(first.x), first.view(first.y));
          auto const masked = second.masked();
          bool const threw =
              fails(here ? failures : -1, [&] { layer.forward(second.view(second.x), second.view(second.y), masked); });
          if (here) failed = threw;
          layer.forward(second.view(second.x), second.view(second.y), masked);
          CHECK(layer.num_batches_tracked() == (threw ? 2 : 3));
          CHECK(std::abs(layer.saved().mean[0] - 10) < 0.1);
        },
        std::chrono::seconds{10});
    failures += failed ? 1 : 0;
  }
  CHECK(failures > 0);
}

TEST_CASE("passes in two phases that lacked memory on one rank have no other pass's statistics") {
  for (int failures = 0; failures < 60; ++failures) {
    CAPTURE(failures);
    syncnorm::run_ranks(
        2,
        [&](thread_communicator const& comm) {
          using layer_of_three = syncnorm::batch_norm<float, thread_communicator>;
          std::array layers{layer_of_three{comm, 3}, layer_of_three{comm, 3}};
          std::array batches{small_batch{4, 5, 10}, small_batch{4, 5, 1000}};
          std::array<std::optional<syncnorm::pending_passes>, 2> pending;
          bool const lacked = fails(comm.rank() == 1 ? failures : -1, [&] {
            for (std::size_t i = 0; i < 2; ++i)
              pending[i].emplace(layers[i].begin_forward(batches[i].view(batches[i].x), batches[i].view(batches[i].y)));
          });
          if (lacked) comm.abort(); // lest the other one waits for it
          for (std::size_t i = 0; i < 2; ++i) {
            try {
              if (pending[i]) pending[i]->finish();
              if (pending[i]) CHECK(std::abs(layers[i].saved().mean[0] - batches[i].x[0]) < 2);
            } catch (std::exception const&) {
            }
          }
        },
        std::chrono::seconds{10});
  }
}

TEST_CASE("a pass whose rank had no memory, and tries again, is the pass that it should be, or an error") {
  for (bool const two_phases : {false, true})
    for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce}) {
      CAPTURE(two_phases);
      // The y of rank 0, whose allocation of this number fails; empty where that was too late to try again.
      auto const y_of = [&](int failing, bool& failed) {
        std::vector<float> result;
        syncnorm::run_ranks(
            2,
            [&](thread_communicator const& comm) {
              std::vector<float> x(4 * 200 * 3), y(x.size());
              for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 97);
              auto const view = [](std::vector<float>& of) { return syncnorm::nchw(of.data(), 4, 200, 3); };
              syncnorm::batch_norm<float, thread_communicator> layer{comm, 200, {.norm = {.exchange = policy}}};
              auto const forward = [&] {
                if (two_phases)
                  layer.begin_forward(view(x), view(y)).finish();
                else
                  layer.forward(view(x), view(y));
              };
              try {
                try {
                  if (comm.rank() == 0) test::fail_allocation(failing);
                  forward();
                  test::fail_allocation(-1);
                } catch (std::bad_alloc const&) {
                  failed = true;
                  forward();
                } catch (syncnorm::invalid_argument_error const&) { // which every rank hears of
                  if (comm.rank() == 0) failed = true;
                  forward();
                }
                if (comm.rank() == 0) result = y;
              } catch (syncnorm::error const&) { // the ranks are out of step
              }
              comm.abort(); // for a rank that comes again when the other one is through
            },
            std::chrono::seconds{10});
        return result;
      };
      bool failed = false;
      auto const expected = y_of(-1, failed);
      CHECK(!failed);
      int failures = 0, completed = 0;
      do {
        failed = false;
        auto const y = y_of(failures, failed);
        CAPTURE(failures);
        CHECK((y.empty() || y == expected));
        if (failed) {
          ++failures;
          completed += y.empty() ? 0 : 1;
        }
      } while (failed);
      CHECK(failures > 5);
      CHECK(completed > 5);
    }
}
