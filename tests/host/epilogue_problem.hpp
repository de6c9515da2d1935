#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/host/channel_values.hpp>

#include <host/tensors.hpp>
#include <support/epilogue_oracle.hpp>

namespace test {

enum class counted { all, none, padded, most, few };

/// A mask `[N, S]`, of which `all` says that there is none.
inline std::vector<std::uint8_t> make_mask(counted kind, std::int64_t n, std::int64_t s) {
  std::vector<std::uint8_t> mask;
  std::mt19937 random{7};
  for (std::int64_t i = 0; kind != counted::all && i < n; ++i)
    for (std::int64_t j = 0; j < s; ++j) {
      bool const counts = kind == counted::padded ? j < s - (i * 5) % (s + 1)
                          : kind == counted::most ? random() % 8 != 0
                          : kind == counted::few  ? random() % 8 == 0
                                                  : false;
      mask.push_back(static_cast<std::uint8_t>(counts ? 1 + random() % 255 : 0)); // any byte but 0
    }
  return mask;
}

struct choice {
  double slope;
  bool residual;
  counted mask;
  bool zeroes, exponential = false;
};

/// Between them: all that an epilogue can be asked for, each with the others.
inline constexpr choice choices[] = {
    {0, false, counted::all, false},      {0.125, true, counted::all, false},
    {-0.5, false, counted::padded, true}, {1, true, counted::most, true},
    {0, true, counted::padded, false},    {1, false, counted::padded, false},
    {1, false, counted::padded, true},    {1, false, counted::few, true},
    {2, false, counted::few, false},      {0.125, true, counted::none, false},
    {0, true, counted::none, true},       {1, true, counted::all, false},
    {1, true, counted::all, false, true}, {0.75, false, counted::most, true, true},
};

inline std::string name_of(choice const& c) {
  return (c.exponential ? "ELU " : "slope ") + std::to_string(c.slope) + (c.residual ? ", residual" : "") + ", mask " +
         std::to_string(static_cast<int>(c.mask)) + (c.zeroes ? ", zeroes" : "");
}

template <class T>
std::vector<long double> wide(std::vector<T> const& values) {
  std::vector<long double> all;
  for (auto const& value : values)
    all.push_back(static_cast<long double>(static_cast<syncnorm::accumulate_t<T>>(value)));
  return all;
}

template <class T>
struct epilogue_problem {
  using A = syncnorm::accumulate_t<T>;
  std::int64_t n, c, s;
  choice chosen;
  std::vector<T> x, dy, residual;
  std::vector<A> gamma, beta;
  std::vector<std::uint8_t> mask;
  epilogue_oracle oracle;
  epilogue_oracle::gradients gradients;
  std::vector<double> mean, inv_std, sum_dy, sum_dy_xmu;

  epilogue_problem(extents const& e, choice const& chose)
      : n{e.n}, c{e.c}, s{e.s}, chosen{chose}, mask{make_mask(chose.mask, n, s)} {
    for (std::int64_t i = 0; i < c; ++i) {
      auto const channel = static_cast<double>(i % 50);
      gamma.push_back(static_cast<A>(channel < 25 ? 0.75 + channel / 100 : -0.5));
      beta.push_back(static_cast<A>(0.25 - channel / 50));
    }
    x = deviates<T>(n, c, s, 1);
    dy = deviates<T>(n, c, s, 2, 0.1);
    if (chose.residual) residual = deviates<T>(n, c, s, 3, 0.2);
    oracle = {n, c, s, wide(x), wide(gamma), wide(beta), wide(residual), mask, chose.zeroes, chose.slope};
    oracle.exponential = chose.exponential;
    oracle.forward();
    // Which side of the kink of an activation a value very near to it is on, rounding may tell: no gradient goes there.
    oracle.for_each_near_kink(1e-5L, [&](std::size_t i) { dy[i] = static_cast<T>(A{0}); });
    gradients = oracle.backward(wide(dy), 0, n);
    for (std::size_t i = 0; i < oracle.mean.size(); ++i) {
      mean.push_back(static_cast<double>(oracle.mean[i]));
      inv_std.push_back(static_cast<double>(oracle.inv_std[i]));
      sum_dy.push_back(static_cast<double>(gradients.sum_dy[i]));
      sum_dy_xmu.push_back(static_cast<double>(gradients.sum_dy_xmu[i]));
    }
  }

  /// With the mask's rows every `step` bytes apart.
  [[nodiscard]] syncnorm::batch_norm_epilogue<T> epilogue(syncnorm::tensor_view<T const> const& of_residual) const {
    return {{chosen.slope, chosen.exponential},
            chosen.residual ? of_residual : syncnorm::tensor_view<T const>{},
            mask.empty() ? syncnorm::mask_view{} : syncnorm::mask_of(mask.data(), n, s),
            chosen.zeroes ? syncnorm::masked_outputs::zero : syncnorm::masked_outputs::normalized};
  }
  [[nodiscard]] syncnorm::affine_parameters<A> params() const { return {gamma, beta}; }
  /// The greatest number that a gradient is made of.
  [[nodiscard]] long double gradient_scale() const {
    long double scale = 1e-3L;
    for (auto const value : gradients.dx) scale = std::max(scale, std::abs(value));
    for (auto const value : gradients.dresidual) scale = std::max(scale, std::abs(value));
    return scale;
  }
};

/// Greatest difference relative to `scale`; infinite where a value is no number.
template <class T>
double difference(std::vector<T> const& got, std::vector<long double> const& expected, long double scale) {
  long double worst = got.size() == expected.size() ? 0 : std::numeric_limits<long double>::infinity();
  auto const values = wide(got);
  for (std::size_t i = 0; i < got.size(); ++i) {
    auto const off = std::abs(values[i] - expected[i]);
    worst = std::isnan(off) ? std::numeric_limits<long double>::infinity() : std::max(worst, off);
  }
  return static_cast<double>(worst / scale);
}

/// Of the shapes those that differ in kernels; the choices take turns over all of them.
template <class T, class F>
void for_each_problem(F const& f) {
  std::size_t turn = 0;
  for (auto const& shape : shapes) {
    for (int k = 0; k < (sanitized ? 1 : 3); ++k) {
      auto const& chose = choices[5 * turn++ % std::size(choices)];
      CAPTURE(name_of(shape));
      CAPTURE(name_of(chose));
      f(epilogue_problem<T>{shape, chose});
    }
  }
}

} // namespace test
