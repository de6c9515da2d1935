#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/combine.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>

namespace syncnorm {

/// The gradients of a loss with respect to what a backward pass gave: dx `[N, C, S]`, and this rank's gradients of gamma
/// and beta `[C]`. A default view and empty spans stand for 0.
template <class T, class P>
struct batch_norm_second_order {
  tensor_view<T const> dx{};
  std::span<P const> gamma_gradient{}, beta_gradient{};
};

namespace detail {

/// One channel's sums of a double backward pass: g is dy, u the gradient with respect to dx, X = x − mean, and a the
/// gradient with respect to a rank's gradient of gamma.
struct double_backward_sums {
  enum row : std::size_t { g, g_xmu, u, u_xmu, u_g, a_g, a_g_xmu, rows };
  std::array<std::vector<double>, rows> of;

  [[nodiscard]] double at(row which, std::size_t c) const { return of[which][c]; }
};

template <class T>
[[nodiscard]] bool given(tensor_view<T> const& view) {
  return view.data != nullptr || view.samples != 0 || view.channels != 0 || view.spatial != 0;
}

} // namespace detail

/// The gradients of `batch_norm_backward`'s results with respect to what it read: double backward, as a gradient penalty
/// needs. With g = dy, r = inv_std, x̂ = (x − mean)·r, n the count of all ranks, u = second.dx, and a, b the gradients with
/// respect to this rank's gradients of gamma and beta, all of a channel,
///
///     Sg = Σ g,  Sgx = Σ g·x̂,  Su = Σ u,  Sux = Σ u·x̂,  Sug = Σ u·g,  Ag = Σ a·g,  Agx = Σ a·g·x̂    over all ranks
///     to dy:     γr·(u − Su/n − x̂·Sux/n) + a·x̂ + b
///     to x:     −γr²/n·(Sgx·u + Sux·g) + a·r·g + γr²/n²·(Su·Sgx + Sg·Sux) − r·Ag/n
///               − x̂·r/n·(Agx + γr·(Sug − Su·Sg/n − 3·Sux·Sgx/n))
///     to gamma:  r·Σ u·(g − Sg/n − x̂·Sgx/n)    over this rank, added to `gamma_gradient`
///
/// They follow from dx = γr·(g − Sg/n − x̂·Sgx/n) by ∂r/∂x_k = −r²·x̂_k/n and ∂x̂_i/∂x_k = r·(δ_ik − 1/n − x̂_i·x̂_k/n). By
/// constant statistics: γr·u + a·x̂ + b to dy, a·r·g to x, and r·Σ u·g to gamma.
///
/// dy, x, to_dy and to_x `[N, C, S]`; to_dy and to_x are neither each other nor an input, and a default one is not needed.
/// The forward pass was of one batch, without epilogue or mask. Collective, one exchange, on every rank of the backward pass and with the same options. On an error, which every rank
/// throws, `gamma_gradient` is unchanged. Throws invalid_argument_error, mismatch_error, communicator_error.
template <class T, class P = accumulate_t<T>, host::executor E, communicator C>
void batch_norm_double_backward(E const& exec, C const& comm, batch_norm_second_order<T, P> const& second,
                                std::type_identity_t<tensor_view<T const>> dy,
                                std::type_identity_t<tensor_view<T const>> x, std::span<P const> gamma,
                                batch_norm_saved const& saved, tensor_view<T> to_dy, tensor_view<T> to_x,
                                std::span<P> gamma_gradient, batch_norm_backward_options const& options,
                                batch_norm_workspace& workspace, batch_norm_caller const& caller = {}) {
  static constexpr std::string_view pass = "batch_norm 2nd backward";
  using sums_type = detail::double_backward_sums;
  auto& packets = workspace.double_packets;
  std::int64_t const channels = packets.channels().front();
  auto const length = static_cast<std::size_t>(channels > 0 ? channels : 0);
  bool const has_u = detail::given(second.dx);

  detail::call_check check;
  check.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
  check.require(saved.mean.size() == length && saved.inv_std.size() == length, [&] {
    return check.text("the saved statistics have ", saved.mean.size(), " channels, expected ", channels,
                      "; was there a forward pass?");
  });
  check.tensor(x, "x", channels);
  check.same_extents(dy, "dy", x);
  if (has_u) check.same_extents(second.dx, "the gradient with respect to dx", x);
  if (detail::given(to_dy)) check.output(to_dy, "the gradient to dy", x);
  if (detail::given(to_x)) check.output(to_x, "the gradient to x", x);
  check.channel_values(gamma, "gamma", channels);
  check.channel_values(second.gamma_gradient, "the gradient with respect to that of gamma", channels);
  check.channel_values(second.beta_gradient, "the gradient with respect to that of beta", channels);
  check.channel_values(gamma_gradient, "the gradient of gamma", channels);

  auto const at = [](std::span<P const> values, std::size_t c, double otherwise) {
    return values.empty() ? otherwise : as_double(values[c]);
  };
  sums_type own, all;
  for (auto& row : own.of) row.assign(length, 0.0);
  auto const local = [&] {
    std::vector<double> const zero(length, 0.0);
    host::backward_reduce(exec, dy, x, saved.mean, own.of[sums_type::g], own.of[sums_type::g_xmu]);
    if (has_u) {
      host::backward_reduce(exec, second.dx, dy, zero, own.of[sums_type::u], own.of[sums_type::u_g]);
      host::backward_reduce(exec, second.dx, x, saved.mean, own.of[sums_type::u], own.of[sums_type::u_xmu]);
    }
    for (std::size_t c = 0; c < length; ++c) {
      double const a = at(second.gamma_gradient, c, 0);
      own.of[sums_type::a_g][c] = a * own.at(sums_type::g, c);
      own.of[sums_type::a_g_xmu][c] = a * own.at(sums_type::g_xmu, c);
    }
  };

  if (size(comm) == 1 || saved.scope != statistics_scope::all_ranks || !options.exchange) {
    detail::throw_fault(pass, check);
    local();
    all = own;
  } else {
    if (workspace.exchange.agreed()) packets.agree();
    packets.prepare(size(comm));
    packets.header(0) = detail::make_header<T>(pass, channels, x.count(), check);
    if (!check.failed()) local();
    for (std::size_t v = 0; v < sums_type::rows; ++v) std::ranges::copy(own.of[v], packets.own(0, v).begin());
    auto const rule = detail::merge_rule::sums;
    auto const policy = detail::resolve(saved.exchange, comm, rule, channels, sums_type::rows);
    auto const work = packets.start(comm, rule, policy, false);
    packets.finish();
    std::array<std::span<double>, sums_type::rows> totals;
    for (std::size_t v = 0; v < sums_type::rows; ++v) {
      all.of[v].assign(length, 0.0);
      totals[v] = all.of[v];
    }
    packets.total(0, totals);
  }

  double const per_count = saved.count > 0 ? 1.0 / static_cast<double>(saved.count) : 0; // 0: constant statistics
  std::vector<host::combination> for_dy(length), for_x(length);
  for (std::size_t c = 0; c < length; ++c) {
    double const r = saved.inv_std[c], mean = saved.mean[c], scale = at(gamma, c, 1) * r, rn = r * per_count;
    double const a = at(second.gamma_gradient, c, 0), b = at(second.beta_gradient, c, 0);
    double const sg = all.at(sums_type::g, c), sgx = r * all.at(sums_type::g_xmu, c), su = all.at(sums_type::u, c);
    double const sux = r * all.at(sums_type::u_xmu, c), sug = all.at(sums_type::u_g, c);
    double const ag = all.at(sums_type::a_g, c), agx = r * all.at(sums_type::a_g_xmu, c);
    double const spread = sug - (su * sg + 3 * sux * sgx) * per_count;
    for_dy[c] = {scale, 0, mean, r * (a - scale * sux * per_count), b - scale * su * per_count};
    for_x[c] = {-scale * rn * sgx, a * r - scale * rn * sux, mean, -r * rn * (agx + scale * spread),
                scale * rn * per_count * (su * sgx + sg * sux) - rn * ag};
    if (gamma_gradient.empty()) continue;
    double const term =
        own.at(sums_type::u_g, c) - (own.at(sums_type::u, c) * sg + r * own.at(sums_type::u_xmu, c) * sgx) * per_count;
    gamma_gradient[c] = from_double<P>(as_double(gamma_gradient[c]) + r * term);
  }
  auto const u = has_u ? second.dx : dy; // which is then multiplied by 0
  if (!has_u)
    for (std::size_t c = 0; c < length; ++c) for_dy[c].scale_a = for_x[c].scale_a = 0;
  if (detail::given(to_dy)) host::combine(exec, u, dy, x, to_dy, std::span<host::combination const>{for_dy});
  if (detail::given(to_x)) host::combine(exec, u, dy, x, to_x, std::span<host::combination const>{for_x});
}

/// The same with a workspace of its own.
template <class T, class P = accumulate_t<T>, host::executor E, communicator C>
void batch_norm_double_backward(E const& exec, C const& comm, batch_norm_second_order<T, P> const& second,
                                std::type_identity_t<tensor_view<T const>> dy,
                                std::type_identity_t<tensor_view<T const>> x,
                                std::type_identity_t<std::span<P const>> gamma, batch_norm_saved const& saved,
                                tensor_view<T> to_dy, tensor_view<T> to_x,
                                std::type_identity_t<std::span<P>> gamma_gradient = {},
                                batch_norm_backward_options const& options = {}) {
  batch_norm_workspace workspace{static_cast<std::int64_t>(saved.mean.size()), true};
  batch_norm_double_backward<T, P>(exec, comm, second, dy, x, gamma, saved, to_dy, to_x, gamma_gradient, options,
                                   workspace);
}

} // namespace syncnorm
