#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include <ops/quick_communicator.hpp>
#include <support/failing_executor.hpp>
#include <support/message_of.hpp>
#include <support/throws.hpp>

// Large layers, whose passes are exchanged in parts after the first of each direction.
namespace {

using namespace std::chrono_literals;

/// A quick one that can only block.
struct quick_blocking_communicator {
  syncnorm::thread_communicator comm;

  [[nodiscard]] int rank() const { return comm.rank(); }
  [[nodiscard]] int size() const { return comm.size(); }
  [[nodiscard]] static double exchange_overhead() { return 0; }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    comm.allgather(in, out);
  }
};

/// A quick one that delivers `good` times, and zeros from then on.
struct forgetful_communicator : quick_blocking_communicator {
  int* good;

  forgetful_communicator(syncnorm::thread_communicator const& of, int& times)
      : quick_blocking_communicator{of}, good{&times} {}
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    quick_blocking_communicator::allgather(in, out);
    if (--*good < 0) std::ranges::fill(out, T{});
  }
};

struct large_tensor {
  std::vector<float> values = std::vector<float>(2 * 40 * 4096);

  explicit large_tensor(std::size_t period = 7) {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % period);
  }
  [[nodiscard]] syncnorm::tensor_view<float> view() { return syncnorm::nchw(values.data(), 2, 40, 4096); }
  [[nodiscard]] syncnorm::tensor_view<float const> read() const { return syncnorm::nchw(values.data(), 2, 40, 4096); }
};

} // namespace

TEST_CASE("gradients of gamma are the same in parts where dx is not wanted") {
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    large_tensor const x, dy{5};
    large_tensor y;
    syncnorm::batch_norm<float, test::quick_communicator> layer{test::quick_communicator{comm, 0.0}, 40};
    for (int i = 0; i < 2; ++i) {
      layer.forward(x.read(), y.view());
      layer.zero_grad();
      layer.backward(x.read(), dy.read(), y.view());
    }
    std::vector<float> const gradient(layer.gamma_grad().begin(), layer.gamma_grad().end());
    layer.zero_grad();
    layer.backward(x.read(), dy.read(), {});
    CHECK(std::ranges::equal(gradient, layer.gamma_grad()));
  });
}

TEST_CASE("what a rank throws between the parts of a pass ends it on every rank over a communicator that blocks, too") {
  // With an epilogue the sums of a part use the executor on every processor; without, some sum it as they map the one before.
  syncnorm::batch_norm_epilogue<float> const relu{syncnorm::activation::relu()};
  int everywhere = 0;
  for (int failing = 1; failing < 60; ++failing) {
    std::array<std::string, 2> texts{};
    syncnorm::run_ranks(
        2,
        [&](syncnorm::thread_communicator const& comm) {
          int uses = 1000;
          syncnorm::batch_norm<float, quick_blocking_communicator, test::failing_executor> layer{
              quick_blocking_communicator{comm}, 40, {}, {&uses, failing}};
          large_tensor const x;
          large_tensor y;
          auto const backward = [&] { layer.backward(x.read(), x.read(), y.view(), relu, {}); };
          layer.forward(x.read(), y.view(), relu);
          for (int i = 0; i < 2; ++i) backward();
          uses = comm.rank() == 1 ? 0 : 1000;
          texts[static_cast<std::size_t>(comm.rank())] = test_support::thrown(backward);
          uses = 1000;
          layer.forward(x.read(), y.view(), relu); // the ranks are in step
        },
        5s);
    if (texts[1].empty()) break;
    everywhere += texts[0].find("failed in the midst") != std::string::npos ? 1 : 0;
  }
  CHECK(everywhere > 0);
}

TEST_CASE("a communicator that breaks its contract later gives no wrong statistics, either") {
  std::string const said = "did not leave what rank";
  syncnorm::run_ranks(
      2,
      [&](syncnorm::thread_communicator const& comm) {
        std::vector<float> x(2 * 200 * 5), y(x.size());
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7);
        auto const view = [](std::vector<float>& of) { return syncnorm::nchw(of.data(), 2, 200, 5); };
        int good = 100;
        forgetful_communicator const over{comm, good};
        syncnorm::batch_norm<float, forgetful_communicator> layer{over, 200};
        layer.forward(view(x), view(y));
        good = 0;
        test::check_throws<syncnorm::communicator_error>([&] { layer.begin_forward(view(x), view(y)).finish(); },
                                                         {said});
        for (int const times : {0, 1}) { // the head, and the rest
          good = times;
          syncnorm::batch_norm<float, forgetful_communicator> fresh{over, 200};
          test::check_throws<syncnorm::communicator_error>([&] { fresh.forward(view(x), view(y)); }, {said});
          good = times;
          syncnorm::power_norm<float, forgetful_communicator> power{over, 200};
          auto const step = [&] {
            power.forward(view(x), view(y));
            power.synchronize();
          };
          test::check_throws<syncnorm::communicator_error>(step, {said});
        }
        // The parts after the first.
        large_tensor const large;
        large_tensor out;
        syncnorm::batch_norm<float, forgetful_communicator> cut{over, 40};
        good = 100;
        cut.forward(large.read(), out.view());
        good = 1;
        test::check_throws<syncnorm::communicator_error>([&] { cut.forward(large.read(), out.view()); }, {said});
      },
      2000ms);
}
