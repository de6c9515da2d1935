#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>

#include <ops/grid_case.hpp>
#include <support/message_of.hpp>

namespace test {

/// A layer and the tensors of a step of its own; rank r has r + 2 samples, the last rank none where there are three.
template <class T, syncnorm::communicator C>
struct layer_data {
  static constexpr std::int64_t spatial = 3;

  syncnorm::batch_norm<T, C> layer;
  std::int64_t samples, channels;
  std::vector<T> inputs, outputs, output_gradients, gradients;

  layer_data(C const& comm, std::int64_t channels_, syncnorm::exchange_policy policy, double momentum = 0.1)
      : layer{comm, channels_, {.norm = {.momentum = momentum, .exchange = policy}}},
        samples{syncnorm::rank(comm) == 2 ? 0 : syncnorm::rank(comm) + 2}, channels{channels_} {
    inputs.resize(static_cast<std::size_t>(samples * channels * spatial) + 1);
    auto const stream = static_cast<std::uint64_t>(syncnorm::rank(comm));
    for (std::size_t i = 0; i < inputs.size(); ++i) inputs[i] = static_cast<T>(noise(stream, i));
    output_gradients = inputs;
    std::ranges::reverse(output_gradients);
    outputs.resize(inputs.size());
    gradients.resize(inputs.size());
  }

  syncnorm::tensor_view<T> x() { return view(inputs); }
  syncnorm::tensor_view<T> y() { return view(outputs); }
  syncnorm::tensor_view<T> dy() { return view(output_gradients); }
  syncnorm::tensor_view<T> dx() { return view(gradients); }

  void step() {
    layer.forward(x(), y());
    layer.backward(x(), dy(), dx());
  }
  /// All that a failed pass must leave as it was.
  [[nodiscard]] std::vector<T> state() {
    std::vector<T> all{static_cast<T>(layer.num_batches_tracked())};
    for (auto const values : {layer.running_mean(), layer.running_var(), layer.gamma_grad(), layer.beta_grad()})
      all.insert(all.end(), values.begin(), values.end());
    return all;
  }
  /// And what a pass computes.
  [[nodiscard]] std::vector<T> results() {
    auto all = state();
    all.insert(all.end(), outputs.begin(), outputs.end());
    all.insert(all.end(), gradients.begin(), gradients.end());
    return all;
  }

private:
  syncnorm::tensor_view<T> view(std::vector<T>& values) {
    return syncnorm::nchw(values.data(), samples, channels, spatial);
  }
};

/// A pass in two phases gives the bits of the one in one. Returns what is wrong.
template <syncnorm::communicator C>
std::vector<std::string> check_two_phases(C const& comm, syncnorm::exchange_policy policy) {
  std::vector<std::string> failures;
  for (std::int64_t const channels : {1, 5, 112, 113, 200}) {
    layer_data<float, C> whole{comm, channels, policy}, split{comm, channels, policy};
    for (int step = 0; step < 3; ++step) {
      whole.step();
      auto forward = split.layer.begin_forward(split.x(), split.y());
      if (step == 1) forward = syncnorm::pending_passes{std::move(forward)}; // it may be moved
      forward.finish();
      auto backward = split.layer.begin_backward(split.x(), split.dy(), split.dx());
      while (step == 2 && !backward.ready()) {
      }
      backward.finish();
      if (split.results() != whole.results())
        failures.push_back("two phases differ from one, C " + std::to_string(channels) + ", step " +
                           std::to_string(step));
    }
  }
  return failures;
}

/// Layers in one collective give the bits of the layers by themselves.
template <syncnorm::communicator C>
std::vector<std::string> check_groups(C const& comm, syncnorm::exchange_policy policy) {
  std::vector<std::string> failures;
  layer_data<float, C> a{comm, 5, policy}, a_alone{comm, 5, policy}, b{comm, 170, policy}, b_alone{comm, 170, policy};
  layer_data<double, C> c{comm, 1, policy}, c_alone{comm, 1, policy};
  syncnorm::batch_norm_group<C> group{comm};
  for (int step = 0; step < 3; ++step) {
    a_alone.step(), b_alone.step(), c_alone.step();
    group.run(syncnorm::passes(a.layer.plan_forward(a.x(), a.y()), b.layer.plan_forward(b.x(), b.y()),
                               c.layer.plan_forward(c.x(), c.y())));
    auto first = group.begin(
        syncnorm::passes(b.layer.plan_backward(b.x(), b.dy(), b.dx()), a.layer.plan_backward(a.x(), a.dy(), a.dx())));
    auto second = group.begin(syncnorm::passes(c.layer.plan_backward(c.x(), c.dy(), c.dx())));
    second.finish();
    first.finish();
    if (a.results() != a_alone.results() || b.results() != b_alone.results() || c.results() != c_alone.results())
      failures.push_back("a group differs from its layers alone in step " + std::to_string(step));
  }
  return failures;
}

/// Each rank finishes two pending passes in another order; then one rank abandons a pass, by itself or by an exception.
template <syncnorm::communicator C>
std::vector<std::string> check_abandoned(C const& comm, std::int64_t channels, syncnorm::exchange_policy policy) {
  std::vector<std::string> failures;
  auto const expect = [&](bool holds, char const* what) {
    if (!holds) failures.push_back(std::string{what} + " on rank " + std::to_string(syncnorm::rank(comm)));
  };
  layer_data<float, C> a{comm, channels, policy}, b{comm, channels + 1, policy}, expected_a{comm, channels, policy};
  layer_data<float, C> expected_b{comm, channels + 1, policy};
  expected_a.step(), expected_b.step();

  auto of_a = a.layer.begin_forward(a.x(), a.y());
  auto of_b = b.layer.begin_forward(b.x(), b.y());
  bool const odd = syncnorm::rank(comm) % 2 == 1;
  (odd ? of_b : of_a).finish();
  (odd ? of_a : of_b).finish();
  auto back_b = b.layer.begin_backward(b.x(), b.dy(), b.dx());
  a.layer.backward(a.x(), a.dy(), a.dx()); // while another is pending
  back_b.finish();
  expect(a.results() == expected_a.results() && b.results() == expected_b.results(), "other results out of order");

  for (bool const by_exception : {false, true}) {
    auto const before = b.state();
    try {
      auto pending = b.layer.begin_forward(b.x(), b.y());
      auto other = a.layer.begin_forward(a.x(), a.y());
      if (odd && by_exception) throw std::runtime_error{"something else"};
      if (!odd) pending.finish();
      if (!odd) other.finish();
    } catch (std::runtime_error const&) {
    }
    expect(odd ? b.state() == before : b.state() != before, "a wrong state after a pass was abandoned");
    // Those who have not dropped it hear that a backward pass cannot follow.
    auto const thrown =
        test_support::message_of<syncnorm::invalid_argument_error>([&] { b.layer.backward(b.x(), b.dy(), b.dx()); });
    expect(test_support::contains(thrown, "rank 1: the saved statistics have 0 channels"),
           "a backward pass of what another rank has dropped");
    b.step();
    a.step(); // the ranks are still in step
  }
  return failures;
}

} // namespace test
