#pragma once

#include <algorithm>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>

#include <ops/complex_case.hpp>
#include <ops/grid.hpp>
#include <ops/grid_case.hpp>
#include <support/noise.hpp>

namespace test {

/// A double backward pass over complex numbers: L = Σ Re(conj(u)·dx) + Σ Re(conj(a)·dgamma + conj(b)·dbeta), a and b of each rank, of the
/// gradients that the oracle gives, whose derivatives are taken by differences.
template <class T>
struct complex_second_order_case {
  complex_case of;
  bool has_u = true, has_a = true, has_b = true, constant = false;
  std::vector<wide_complex> x{}, dy{}, u{}, a{}, b{}, gamma{}, beta{}; // a and b `[ranks, C]`
  std::vector<std::uint8_t> counts{};

  void fill() {
    auto const values = [&](std::uint64_t stream, std::int64_t size, double middle, bool real = false) {
      std::vector<wide_complex> made(static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < made.size(); ++i)
        made[i] = {static_cast<T>(middle + noise(stream, i)), real ? T{0} : static_cast<T>(2 * noise(stream + 1, i))};
      return made;
    };
    auto const size = samples() * of.channels * of.spatial, ranks = std::ssize(of.shares);
    x = values(1, size, 0.5), dy = values(3, size, 0.25), u = values(5, size, -0.25);
    a = values(7, ranks * of.channels, 0.5, !is_complex()), b = values(9, ranks * of.channels, 0);
    gamma = values(11, of.channels, 1.5, !is_complex()), beta = values(13, of.channels, 0);
    counts.assign(static_cast<std::size_t>(samples() * of.spatial), 1);
    for (std::size_t i = 0; of.masked && i < counts.size(); ++i) counts[i] = i % 4 != 1 && i % 7 != 2 ? 1 : 0;
  }

  [[nodiscard]] bool is_complex() const { return of.gamma == syncnorm::gamma_numbers::complex; }
  [[nodiscard]] std::int64_t samples_of(std::size_t rank) const {
    return std::accumulate(of.shares[rank].begin(), of.shares[rank].end(), std::int64_t{0});
  }
  [[nodiscard]] std::int64_t first_of(std::size_t rank) const {
    std::int64_t sum = 0;
    for (std::size_t r = 0; r < rank; ++r) sum += samples_of(r);
    return sum;
  }
  [[nodiscard]] std::int64_t samples() const { return first_of(of.shares.size()); }

  /// Of the part that `rank` computes, or with −1 all.
  [[nodiscard]] long double loss(int rank) const {
    bool const unbiased = of.norm.normalize_by == syncnorm::batch_variance::unbiased;
    complex_oracle oracle{
        samples(),   of.channels,           of.spatial, counts, of.masked == syncnorm::masked_outputs::zero,
        of.norm.eps, unbiased ? 1.0L : 0.0L};
    oracle.learn(x);
    if (constant) {
      std::ranges::fill(oracle.mean, wide_complex{});
      std::ranges::fill(oracle.inv_std, 1 / std::sqrt(1 + static_cast<long double>(of.norm.eps)));
    }
    long double sum = 0;
    auto const per_sample = static_cast<std::size_t>(of.channels * of.spatial);
    for (std::size_t r = 0; r < of.shares.size(); ++r) {
      if (rank >= 0 && static_cast<int>(r) != rank) continue;
      auto const first = first_of(r), last = first + samples_of(r);
      auto const gradients = oracle.backward(x, dy, gamma, first, last, constant);
      auto const product = [](wide_complex p, wide_complex q) { return (std::conj(p) * q).real(); };
      for (auto i = per_sample * static_cast<std::size_t>(first); i < per_sample * static_cast<std::size_t>(last); ++i)
        if (has_u) sum += product(u[i], gradients.dx[i]);
      for (std::size_t c = 0; c < gamma.size(); ++c) {
        auto const i = r * gamma.size() + c;
        if (has_a) sum += product(a[i], gradients.gamma[c]);
        if (has_b) sum += product(b[i], gradients.beta[c]);
      }
    }
    return sum;
  }

  /// ∂L/∂(real part) + i·∂L/∂(imaginary part) by central differences of order 4.
  [[nodiscard]] wide_complex slope_of(wide_complex& value, int rank = -1) const {
    auto const kept = value;
    constexpr long double h = 1e-3L;
    auto const along = [&](wide_complex direction) {
      auto const at = [&](long double steps) {
        value = kept + steps * h * direction;
        return loss(rank);
      };
      long double const difference = 8 * (at(1) - at(-1)) - (at(2) - at(-2));
      value = kept;
      return difference / (12 * h);
    };
    return {along({1, 0}), along({0, 1})};
  }
};

/// The double backward pass of this rank, by the layer of `make()`, against differences; returns what is wrong.
template <class T, syncnorm::communicator C, class Make>
std::vector<std::string> check_complex_double_backward(complex_second_order_case<T> problem, C const& comm,
                                                       Make const& make) {
  using number = std::complex<T>;
  auto const rank = static_cast<std::size_t>(syncnorm::rank(comm));
  auto const& of = problem.of;
  problem.fill();
  auto const first = problem.first_of(rank);
  complex_operands<T> own{of, rank, first, problem.x, problem.dy, problem.counts},
      more{of, rank, first, problem.u, problem.dy, problem.counts};
  auto layer = make();
  for (std::size_t c = 0; c < problem.gamma.size(); ++c) {
    layer.gamma()[c] = static_cast<T>(problem.gamma[c].real()), layer.beta()[c] = number{problem.beta[c]};
    if (problem.is_complex()) layer.gamma_imag()[c] = static_cast<T>(problem.gamma[c].imag());
  }
  std::vector<T> a, a_imag;
  std::vector<number> b;
  for (std::size_t i = rank * problem.gamma.size(); i < (rank + 1) * problem.gamma.size(); ++i) {
    if (problem.has_a) a.push_back(static_cast<T>(problem.a[i].real()));
    if (problem.has_a && problem.is_complex()) a_imag.push_back(static_cast<T>(problem.a[i].imag()));
    if (problem.has_b) b.push_back(number{problem.b[i]});
  }

  if (problem.constant) layer.eval();
  layer.forward(own.read_x, own.y, own.masks);
  layer.backward(own.read_x, own.read_dy, own.dx, own.masks);
  layer.zero_grad();
  syncnorm::complex_second_order<T> second{.gamma_gradient = a, .beta_gradient = b, .gamma_imag_gradient = a_imag};
  if (problem.has_u) second.dx = more.read_x;
  // Twice, as gradients add up.
  for (int step = 0; step < 2; ++step)
    layer.double_backward(second, own.read_x, own.read_dy, more.dx, more.y, own.masks);

  std::vector<std::string> failures;
  // Differences of order h⁴ in double; what a sum of a few numbers and coefficients in `T` loses.
  constexpr double close = std::is_same_v<T, double> ? 1e-9 : 2 * tolerance<T>;
  auto const expect = [&](comparison const& all, char const* what) {
    if (!all.within(close))
      failures.push_back(of.name() + ", rank " + std::to_string(rank) + ": " + what + " off by " + all.text());
  };
  auto const add = [](comparison& to, number got, wide_complex expected) {
    to.add(static_cast<double>(got.real()), expected.real());
    to.add(static_cast<double>(got.imag()), expected.imag());
  };
  comparison to_dy{1}, to_x{1}, to_gamma{1};
  auto sample = first;
  for (std::size_t k = 0; k < more.dx.size(); ++k)
    for (std::int64_t n = 0; n < more.dx[k].samples; ++n, ++sample)
      for (std::int64_t c = 0; c < of.channels; ++c)
        for (std::int64_t s = 0; s < of.spatial; ++s) {
          auto const i = static_cast<std::size_t>((sample * of.channels + c) * of.spatial + s);
          add(to_dy, more.dx[k](n, c, s), problem.slope_of(problem.dy[i]));
          add(to_x, more.y[k](n, c, s), problem.slope_of(problem.x[i]));
        }
  // Of what this rank computes, since each has a gamma of its own.
  for (std::size_t c = 0; c < problem.gamma.size(); ++c) {
    auto const expected = 2.0L * problem.slope_of(problem.gamma[c], static_cast<int>(rank));
    to_gamma.add(static_cast<double>(layer.gamma_grad()[c]), expected.real());
    if (problem.is_complex()) to_gamma.add(static_cast<double>(layer.gamma_imag_grad()[c]), expected.imag());
  }
  expect(to_dy, "to dy");
  expect(to_x, "to x");
  expect(to_gamma, "to gamma");
  return failures;
}

/// Cases of every kind: f(case).
template <class T, class F>
void for_each_complex_second_order(F const& f) {
  std::size_t turn = 0;
  for (std::vector<std::vector<std::int64_t>> const& shares :
       {std::vector<std::vector<std::int64_t>>{{3}}, {{2}, {3}}, {{1, 2}}, {{0}, {2, 1}, {}, {1}}})
    for (auto const order : layouts) {
      complex_second_order_case<T> problem{.of{shares, 2, order == layout::nc ? 1 : 3, order}};
      for (auto& of_rank : problem.of.shares)
        for (auto& n : of_rank) n *= order == layout::nc ? 3 : 1;
      problem.of.take_turn(turn);
      problem.of.gamma = turn % 2 == 0 ? syncnorm::gamma_numbers::complex : syncnorm::gamma_numbers::real;
      problem.has_u = turn % 9 != 3;
      problem.has_a = turn % 5 != 4;
      problem.has_b = turn % 4 != 1;
      problem.constant = turn % 8 == 6;
      f(problem);
      ++turn;
    }
}

} // namespace test
