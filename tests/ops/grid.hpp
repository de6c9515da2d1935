#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/grid_case.hpp>
#include <support/oracle.hpp>
#include <support/sanitized.hpp>
#include <support/worse_of.hpp>

namespace test {

[[nodiscard]] inline long double largest_of(std::vector<long double> const& values) {
  long double largest = 0;
  for (auto const value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

/// Inputs of a case over the whole batch, dense `[N, C, S]`, and what the oracle says of them. Two training steps are
/// taken on the same batch, so that the running statistics are not only an average with their initial values.
template <class T, class P = syncnorm::accumulate_t<T>>
struct case_data {
  static constexpr double eps = 1e-3, momentum = 0.3;
  static constexpr int steps = 2;

  grid_case cell;
  syncnorm::batch_variance normalize_by;
  std::vector<T> x, dy;
  std::vector<P> gamma, beta;
  batch_norm_oracle oracle;
  std::vector<long double> y, running_mean, running_var;
  batch_norm_oracle::gradients gradients;
  long double y_scale, dx_scale; ///< over all ranks: a rank's own share may be small by chance

  explicit case_data(grid_case const& g)
      : cell{g}, normalize_by{g.channels == 3 || g.channels == 512 ? syncnorm::batch_variance::unbiased
                                                                   : syncnorm::batch_variance::biased},
        x(fill(g, 1)), dy(fill(g, 2)), gamma(per_channel(g, 3)),
        beta(per_channel(g, 4)), oracle{x,         g.samples(), g.channels,
                                        g.spatial, eps,         normalize_by == syncnorm::batch_variance::unbiased},
        y{oracle.forward(x, gamma, beta)}, running_mean(oracle.mean.size(), 0), running_var(oracle.mean.size(), 1),
        gradients{oracle.backward(x, dy, gamma)}, y_scale{largest_of(y)}, dx_scale{largest_of(gradients.dx)} {
    auto const count = static_cast<long double>(g.samples() * g.spatial);
    for (int step = 0; step < steps; ++step)
      for (std::size_t c = 0; c < oracle.mean.size(); ++c) {
        running_mean[c] = (1 - momentum) * running_mean[c] + momentum * oracle.mean[c];
        running_var[c] = (1 - momentum) * running_var[c] + momentum * oracle.var[c] * count / (count - 1);
      }
  }

  /// y of a rank's samples in evaluation, by running statistics that have been checked; of the others 0.
  [[nodiscard]] std::vector<long double> inference(int rank, std::span<P const> mean, std::span<P const> var) const {
    auto const wide = [](auto const& value) { return static_cast<long double>(value); };
    std::vector<long double> values(x.size()), scale;
    for (std::size_t c = 0; c < var.size(); ++c) scale.push_back(wide(gamma[c]) / std::sqrt(wide(var[c]) + eps));
    auto const first = cell.first_sample_of(rank);
    for_each_element(cell, first, first + cell.samples_of(rank), [&](std::size_t c, std::size_t i) {
      values[i] = (wide(x[i]) - wide(mean[c])) * scale[c] + wide(beta[c]);
    });
    return values;
  }

private:
  /// Calls f(channel, i) for every element of samples [first, last) in the order `[N, C, S]`.
  template <class F>
  static void for_each_element(grid_case const& g, std::int64_t first, std::int64_t last, F const& f) {
    auto i = static_cast<std::size_t>(first * g.channels * g.spatial);
    for (std::int64_t n = first; n < last; ++n)
      for (std::int64_t c = 0; c < g.channels; ++c)
        for (std::int64_t s = 0; s < g.spatial; ++s) f(static_cast<std::size_t>(c), i++);
  }
  static std::vector<T> fill(grid_case const& g, std::uint64_t stream) {
    std::vector<double> middle;
    for (std::int64_t c = 0; c < g.channels; ++c) middle.push_back(0.3 * std::sin(static_cast<double>(c)));
    std::vector<T> values(static_cast<std::size_t>(g.samples() * g.channels * g.spatial));
    for_each_element(g, 0, g.samples(), [&](std::size_t c, std::size_t i) {
      values[i] = syncnorm::from_double<T>(noise(stream, i) * (1 + 0.01 * static_cast<double>(c)) + middle[c]);
    });
    return values;
  }
  static std::vector<P> per_channel(grid_case const& g, std::uint64_t stream) {
    std::vector<P> values(static_cast<std::size_t>(g.channels));
    for (std::size_t c = 0; c < values.size(); ++c) values[c] = syncnorm::from_double<P>(noise(stream, c) + 1.25);
    return values;
  }
};

/// Greatest difference relative to the greatest magnitude that is expected; infinite where one is no number.
class comparison {
public:
  explicit comparison(long double scale = 0) : scale_{scale} {}

  void add(double got, long double expected) {
    worst_ = worse_of(worst_, std::abs(static_cast<long double>(got) - expected));
    scale_ = std::max(scale_, std::abs(expected));
  }
  void add(std::span<double const> got, std::vector<long double> const& expected) {
    for (std::size_t i = 0; i < got.size(); ++i) add(got[i], expected[i]);
  }
  [[nodiscard]] bool within(double tolerance) const { return worst_ <= tolerance * scale_; }
  [[nodiscard]] std::string text() const {
    return std::to_string(static_cast<double>(worst_)) + " of " + std::to_string(static_cast<double>(scale_));
  }

private:
  long double worst_ = 0, scale_;
};

/// Half of the last bit of a 16-bit type, relative to the number.
template <class T>
inline constexpr double rounding = syncnorm::format_of<T> == syncnorm::element_format::binary16   ? 0x1p-11
                                   : syncnorm::format_of<T> == syncnorm::element_format::bfloat16 ? 0x1p-8
                                                                                                  : 0;

/// The required accuracy relative to the scale of a result of type `R`, of a pass over elements of type `T`.
template <class T, class R = T>
inline constexpr double tolerance = (std::is_same_v<T, double> ? 1e-12 : 1e-5) + rounding<R>;

/// Runs one case on this rank of `comm`; returns what is wrong.
template <class T, class P, syncnorm::communicator C>
std::vector<std::string> run_case(case_data<T, P> const& data, C const& comm) {
  auto const& g = data.cell;
  int const rank = syncnorm::rank(comm);
  auto const samples = g.samples_of(rank), first = g.first_sample_of(rank);
  std::vector<std::string> failures;
  auto const expect = [&](bool holds, std::string const& what) {
    if (!holds)
      failures.push_back(g.name() + ", " + std::string{syncnorm::element_traits<T>::name} + ", rank " +
                         std::to_string(rank) + ": " + what);
  };
  auto const each = [&](auto const& f) {
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::int64_t c = 0; c < g.channels; ++c)
        for (std::int64_t s = 0; s < g.spatial; ++s)
          f(n, c, s, static_cast<std::size_t>(((first + n) * g.channels + c) * g.spatial + s));
  };
  auto const expect_tensor = [&](syncnorm::tensor_view<T> const& got, std::vector<long double> const& expected,
                                 long double scale, char const* what) {
    comparison c{scale};
    each([&](auto n, auto ch, auto s, std::size_t i) { c.add(static_cast<double>(got(n, ch, s)), expected[i]); });
    expect(c.within(tolerance<T>), std::string{what} + " off by " + c.text());
  };
  auto const expect_channels = [&](auto const& got, std::vector<long double> const& expected, char const* what,
                                   long double scale = 0, int roundings = 1) {
    comparison c{scale};
    using R = std::remove_cvref_t<decltype(got[0])>;
    expect(got.size() == expected.size(), std::string{what} + " has a wrong size");
    for (std::size_t i = 0; i < got.size(); ++i) c.add(static_cast<double>(got[i]), expected[i]);
    expect(c.within(roundings * tolerance<T, R>), std::string{what} + " off by " + c.text());
  };

  owned_tensor<T> x{g.order, samples, g.channels, g.spatial}, dy{g.order, samples, g.channels, g.spatial};
  owned_tensor<T> y{g.order, samples, g.channels, g.spatial}, dx{g.order, samples, g.channels, g.spatial};
  each([&](auto n, auto c, auto s, std::size_t i) {
    x.view(n, c, s) = data.x[i];
    dy.view(n, c, s) = data.dy[i];
  });

  syncnorm::batch_norm<T, C, syncnorm::host::serial_executor, P> layer{
      comm, g.channels, {.norm = {.eps = data.eps, .momentum = data.momentum, .normalize_by = data.normalize_by}}};
  std::ranges::copy(data.gamma, layer.gamma().begin());
  std::ranges::copy(data.beta, layer.beta().begin());
  for (int step = 0; step < data.steps; ++step) {
    layer.zero_grad();
    layer.forward(x.view, y.view);
    layer.backward(x.view, dy.view, dx.view);
  }

  expect_tensor(y.view, data.y, data.y_scale, "y");
  expect_tensor(dx.view, data.gradients.dx, data.dx_scale, "dx");
  // A mean may be near zero by chance; what it is measured by then is the deviation of the data.
  auto const deviation = 1 / *std::ranges::max_element(data.oracle.inv_std);
  expect_channels(layer.saved().mean, data.oracle.mean, "mean", deviation);
  expect_channels(layer.saved().inv_std, data.oracle.inv_std, "inv_std");
  expect_channels(layer.running_mean(), data.running_mean, "running_mean", deviation, data.steps);
  expect_channels(layer.running_var(), data.running_var, "running_var", 0, data.steps);
  expect(layer.saved().count == g.samples() * g.spatial, "a wrong count");
  expect(layer.num_batches_tracked() == data.steps, "a wrong num_batches_tracked");
  auto const local = data.oracle.parameter_gradients(data.x, data.dy, first, first + samples);
  expect_channels(layer.gamma_grad(), local.gamma, "the gradient of gamma");
  expect_channels(layer.beta_grad(), local.beta, "the gradient of beta");

  std::vector<std::byte> own;
  auto const append = [&](auto const& values) {
    auto const bytes = std::as_bytes(std::span{values});
    own.insert(own.end(), bytes.begin(), bytes.end());
  };
  append(layer.saved().mean), append(layer.saved().inv_std);
  append(layer.running_mean()), append(layer.running_var());
  std::vector<std::byte> all(own.size() * static_cast<std::size_t>(g.ranks));
  syncnorm::allgather(comm, own, std::span{all});
  for (std::size_t r = 0; r < static_cast<std::size_t>(g.ranks); ++r)
    expect(std::memcmp(all.data() + r * own.size(), own.data(), own.size()) == 0,
           "other bits of the statistics than rank " + std::to_string(r));

  layer.eval();
  layer.forward(x.view, y.view);
  expect_tensor(y.view, data.inference(rank, layer.running_mean(), layer.running_var()), data.y_scale,
                "y in evaluation");
  return failures;
}

/// All cases of the grid for `ranks` ranks, each with `run(cell)`. Small channel counts take every layout; from 128
/// channels on the layouts take turns, so that the time goes into shapes.
template <class Run>
void for_each_case(int ranks, Run const& run) {
  std::size_t turn = 0, cells = static_cast<std::size_t>(ranks / 2); // other cells for each number of ranks
  for (std::int64_t const channels : {1, 3, 128, 256, 512, 1024})
    for (std::int64_t const batch : {1, 32, 64}) {
      if (sanitized && (channels > 128 || batch > 32)) continue;
      for (auto const spread : partitions)
        for (std::size_t l = 0; l < (channels < 128 ? layouts.size() : 1); ++l, ++turn) {
          if (sanitized && cells++ % 4 > 0) continue;
          auto const order = layouts[channels < 128 ? l : turn % layouts.size()];
          std::int64_t spatial = order == layout::nc ? 1 : channels < 128 ? 19 : 3;
          grid_case cell{ranks, channels, batch, spatial, spread, order};
          // One element over all ranks cannot be trained on; bad input has its own tests.
          if (cell.samples() * cell.spatial < 2) cell.spatial = 2;
          run(cell);
        }
    }
}

} // namespace test
