#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>

#include "cuda/layer_cases.hpp"

namespace layer_cases {

enum class dx_over : std::uint8_t { neither, y, dy };

/// Two steps in place, enqueued or replayed, against the oracle; of dx over y or dy, which take x or dy away, one. Channels are in
/// turn one that is recovered, one of a small gamma, one of a large beta, and again one that is recovered. Every rank calls it.
template <class Layer, class T = float, class C>
void check_in_place(C const& comm, layer_case const& of, bool captured, dx_over where, bool eval = false,
                    double accuracy = 1e-5) {
  int const rank = syncnorm::rank(comm), size = syncnorm::size(comm), steps = where == dx_over::neither ? 2 : 1;
  std::int64_t first = 0, all = 0;
  for (int r = 0; r < size; ++r) {
    if (r < rank) first += of.samples[static_cast<std::size_t>(r)];
    all += of.samples[static_cast<std::size_t>(r)];
  }
  auto const own = of.samples[static_cast<std::size_t>(rank)], c = of.channels, s = of.spatial;
  INFO("in place, rank ", rank, " of ", size, ", C ", c, ", layout ", static_cast<int>(of.order), ", slope ", of.slope,
       ", dx over ", static_cast<int>(where), std::string{captured ? ", captured" : ""});
  auto const batch = [&](std::uint64_t stream, double center) {
    std::vector<long double> values(static_cast<std::size_t>(all * c * s));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = syncnorm::as_double(syncnorm::from_double<T>(center + test::noise(stream, i)));
    return values;
  };
  test::epilogue_oracle oracle{all, c, s, batch(1, eval ? 0 : 1), {}, {}, {}, {}};
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < c; ++i) {
    oracle.gamma.push_back(i % 4 == 1 ? 0x1p-10L : i % 4 == 3 ? -1.5L : 0.75L);
    oracle.beta.push_back(i % 4 == 2 ? 50 : 0.5L);
    kept += of.slope <= 0 || of.exponential || i % 4 == 1 || i % 4 == 2 ? 1 : 0;
  }
  if (of.residual) oracle.residual = batch(2, 0);
  oracle.slope = of.slope, oracle.exponential = of.exponential;
  oracle.eps = 1e-5L;
  oracle.forward();
  if (eval) {
    oracle.mean.assign(oracle.mean.size(), 0);
    oracle.inv_std.assign(oracle.mean.size(), 1 / std::sqrt(1 + oracle.eps));
    oracle.constant_statistics();
  }
  auto dy_all = batch(4, 0.25);
  oracle.for_each_near_kink(1e-4L, [&](std::size_t i) { dy_all[i] = 0; });
  auto const gradients = oracle.backward(dy_all, first, first + own);

  device_tensor<T> x{of.order, own, c, s}, dy{of.order, own, c, s}, dx{of.order, own, c, s},
      residual{of.order, own, c, s}, dresidual{of.order, own, c, s};
  x.put(oracle.x, first), dy.put(dy_all, first);
  if (of.residual) residual.put(oracle.residual, first);
  syncnorm::batch_norm_epilogue<T> epilogue{of.activation()};
  if (of.residual) epilogue.residual = residual.view;

  Layer layer{comm, c};
  put(layer.gamma(), oracle.gamma), put(layer.beta(), oracle.beta);
  if (eval) layer.eval();
  auto const into = where == dx_over::y ? x.view : where == dx_over::dy ? dy.view : dx.view;
  std::vector<long double> y;
  test::stream const on;
  auto const step = [&](cudaStream_t stream) {
    layer.forward_in_place(x.view, epilogue, stream);
    if (!captured) on.wait(), y = x.get();
    layer.backward_in_place(x.view, dy.view, into, epilogue, of.residual ? dresidual.view : syncnorm::tensor_view<T>{},
                            {}, stream);
  };
  if (captured) {
    layer.prepare(on);
    layer.reserve_in_place(x.view, epilogue.activation, 0, on);
    CHECK(layer.kept().room() == kept);
  }
  test::run_on(on, captured, step, steps);
  layer.synchronize(on);

  auto const part = [&](std::vector<long double> const& values) {
    auto const from = values.begin() + first * c * s;
    return std::vector<long double>(from, from + own * c * s);
  };
  if (!captured) CHECK(error_of(y, part(oracle.y)) < accuracy);
  auto& written = where == dx_over::y ? x : where == dx_over::dy ? dy : dx;
  CHECK(error_of(written.get(), part(gradients.dx)) < accuracy);
  if (of.residual) CHECK(error_of(dresidual.get(), part(gradients.dresidual)) < accuracy);
  if (where != dx_over::y) CHECK(error_of(x.get(), part(oracle.x)) < accuracy);
  auto gamma = gradients.gamma;
  for (auto& value : gamma) value *= steps;
  CHECK(error_of(get(layer.gamma_grad()), gamma) < accuracy);
  if (own * s > 0) CHECK(get(std::span{layer.kept().memory().state, 1}) == std::vector<std::int64_t>{kept});
}

/// Identity, leaky ReLU over a residual, and ReLU and ELU, whose channels are all kept; C as of layers, and of no pack's length.
inline std::vector<layer_case> in_place_cases() {
  using test::layout;
  layer_case elu{{3, 1, 2}, 5, 9, layout::nhwc, false, true, 1};
  elu.exponential = true;
  return {elu,
          {{3, 2, 4}, 6, 20},
          {{2, 0, 3}, 9, 7, layout::nhwc, false, true, 0.25},
          {{9, 1, 8}, 4, 9, layout::nchw, false, true, 0.25}, // rows that are columns
          {{1, 2, 1}, 5, 33, layout::strided, false, false, -0.5},
          {{2, 1, 2}, 4, 9, layout::tbc, false, true, 0}};
}

/// One rank's micro-batches of `samples`, C = 5, S = 7, with tensors for a pass in place and one apart. By turns one that is activated,
/// one of which nothing is recovered, and one without a residual.
struct batches_in_place {
  struct one {
    device_tensor<float> x, over, y, dy, dx, into, residual, dresidual, other;
    std::vector<std::uint8_t> counts;
    test::device_buffer<std::uint8_t> mask;
  };
  static constexpr std::int64_t channels = 5, spatial = 7;

  std::vector<std::unique_ptr<one>> all;
  std::vector<syncnorm::batch_norm_epilogue<float>> epilogues;

  batches_in_place(int rank, std::vector<std::int64_t> const& samples, test::layout order) {
    for (std::size_t k = 0; k < samples.size(); ++k) {
      auto const n = samples[k];
      auto const noise = [&](std::size_t what, double center) {
        std::vector<long double> values(static_cast<std::size_t>(n * channels * spatial));
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] =
              static_cast<float>(center + test::noise(100 * static_cast<std::uint64_t>(rank) + 10 * k + what, i));
        return values;
      };
      auto const tensor = [&] { return device_tensor<float>{order, n, channels, spatial}; };
      std::vector<std::uint8_t> counts(static_cast<std::size_t>(n * spatial));
      for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = k % 3 == 1 || test::noise(7 + k, i) > -0.5 ? 1 : 0;
      // NOLINTNEXTLINE(modernize-make-unique): an aggregate of what cannot be moved
      all.push_back(std::unique_ptr<one>(new one{tensor(), tensor(), tensor(), tensor(), tensor(), tensor(), tensor(),
                                                 tensor(), tensor(), counts, test::device_buffer{counts}}));
      auto& made = *all.back();
      auto const x = noise(0, 1);
      made.x.put(x, 0), made.over.put(x, 0), made.dy.put(noise(1, 0.25), 0), made.residual.put(noise(2, 0), 0);
      auto& epilogue = epilogues.emplace_back();
      epilogue.activation.negative_slope = k % 3 == 0 ? 0.25 : k % 3 == 1 ? 0 : 1;
      if (k % 3 != 2) epilogue.residual = made.residual.view;
      if (k % 3 != 1) epilogue.mask = syncnorm::mask_of(made.mask.data(), n, spatial);
      if (k % 3 == 2) epilogue.masked = syncnorm::masked_outputs::zero;
    }
  }

  /// The views of one tensor of each, as `V`.
  template <class V = float>
  [[nodiscard]] std::vector<syncnorm::tensor_view<V>> views(device_tensor<float> one::*of) const {
    std::vector<syncnorm::tensor_view<V>> each;
    for (auto const& batch : all) each.push_back(((*batch).*of).view);
    return each;
  }
  /// Gradients of residuals, where there are any.
  [[nodiscard]] std::vector<syncnorm::tensor_view<float>> residuals(device_tensor<float> one::*of) const {
    auto each = views(of);
    for (std::size_t k = 2; k < each.size(); k += 3) each[k] = {};
    return each;
  }

  /// Gamma and beta by which of channels 1 and 2 nothing is recovered.
  template <class Layer>
  static void set_parameters(Layer& layer) {
    put(layer.gamma(), {0.75, 0x1p-10L, 0.75, -1.5, 0.75}), put(layer.beta(), {0.5, 0.5, 50, 0.5, 0.5});
  }
  /// How many channels are kept of micro-batch k.
  [[nodiscard]] std::int64_t kept_of(std::size_t k) const {
    return epilogues[k].activation.negative_slope > 0 ? 2 : channels;
  }

  /// Whether what the pass in place left is what the one apart has, `into` being where its gradients went.
  void check(bool x_is_back, device_tensor<float> one::*into, double accuracy) const {
    for (std::size_t k = 0; k < all.size(); ++k) {
      INFO("micro-batch ", k);
      auto& batch = *all[k];
      CHECK(error_of((batch.*into).get(), batch.dx.get()) < accuracy);
      if (k % 3 != 2) CHECK(error_of(batch.other.get(), batch.dresidual.get()) < accuracy);
      if (!x_is_back) continue;
      auto found = batch.over.get(), x = batch.x.get();
      for (std::size_t i = 0; i < x.size() && k % 3 == 2; ++i) // of what was made 0, anything finite
        if (auto const s = i % spatial, n = i / (channels * spatial); batch.counts[n * spatial + s] == 0) {
          CHECK(std::isfinite(static_cast<double>(found[i])));
          found[i] = x[i];
        }
      CHECK(error_of(found, x) < accuracy);
    }
  }
};

/// Two steps over micro-batches in place, enqueued or replayed, against passes apart; of dx over y, one. Every rank calls it.
template <class Layer, class C>
void check_micro_batches_in_place(C const& comm, std::vector<std::vector<std::int64_t>> const& shares,
                                  test::layout order, bool captured, bool over_y, bool eval = false,
                                  syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  using one = batches_in_place::one;
  int const steps = over_y ? 1 : 2;
  auto const& share = shares[static_cast<std::size_t>(syncnorm::rank(comm))];
  batches_in_place const of{syncnorm::rank(comm), share, order};
  INFO("rank ", syncnorm::rank(comm), " of ", shares.size(), " with ", share.size(), " micro-batches in place, layout ",
       static_cast<int>(order), std::string{captured ? ", captured" : ""});
  syncnorm::batch_norm_layer_options const options{.norm = {.exchange = policy}};
  Layer layer{comm, of.channels, options}, apart{comm, of.channels, options};
  for (auto* const each : {&layer, &apart}) {
    of.set_parameters(*each);
    if (eval) each->eval();
  }
  auto const x = of.views<float const>(&one::x), dy = of.views<float const>(&one::dy);
  auto const over = of.views(&one::over), y = of.views(&one::y), dx = of.views(&one::dx);
  auto const into = over_y ? over : of.views(&one::into);
  auto const dresidual = of.residuals(&one::dresidual), other = of.residuals(&one::other);
  test::stream const on;
  apart.prepare(on), layer.prepare(on);
  for (int i = 0; i < steps; ++i) {
    apart.forward(x, y, of.epilogues, on);
    apart.backward(x, dy, dx, of.epilogues, dresidual, {}, on);
  }
  apart.synchronize(on);

  if (captured) layer.reserve_in_place(over, of.epilogues, 0, on);
  int step = 0;
  test::run_on(
      on, captured,
      [&](cudaStream_t stream) {
        layer.forward_in_place(over, of.epilogues, stream);
        if (!captured && step++ == 0) {
          on.wait();
          for (auto const& batch : of.all) CHECK(batch->over.get() == batch->y.get());
        }
        layer.backward_in_place(over, dy, into, of.epilogues, other, {}, stream);
      },
      steps);
  layer.synchronize(on);

  of.check(!over_y, over_y ? &one::over : &one::into, 1e-5);
  for (std::size_t k = 0; k < share.size(); ++k) {
    if (share[k] == 0) continue;
    CHECK(get(std::span{layer.kept(k).memory().state, 1}) == std::vector<std::int64_t>{of.kept_of(k)});
    if (captured) CHECK(layer.kept(k).room() == of.kept_of(k));
  }
  CHECK(error_of(get(layer.gamma_grad()), get(apart.gamma_grad())) < 1e-5);
  CHECK(error_of(get(layer.beta_grad()), get(apart.beta_grad())) < 1e-5);
  CHECK(error_of(get(layer.running_mean()), get(apart.running_mean())) < 1e-5);
  CHECK(error_of(get(layer.running_var()), get(apart.running_var())) < 1e-5);
  CHECK(get(std::span{layer.num_batches_tracked(), 1}) == get(std::span{apart.num_batches_tracked(), 1}));
}

} // namespace layer_cases
