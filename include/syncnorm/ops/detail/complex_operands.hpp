#pragma once

#include <algorithm>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/complex_components.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_pass_operands.hpp>
#include <syncnorm/ops/detail/exchange.hpp>
#include <syncnorm/ops/detail/packet.hpp>
#include <syncnorm/ops/detail/parts.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>
#include <syncnorm/ops/detail/run_pass.hpp>

namespace syncnorm::detail {

/// The complex channels of a span of components, which begins and ends with one.
[[nodiscard]] constexpr channel_span complex_channels_of(channel_span components) {
  return {components.first / 2, components.length / 2};
}
static_assert(head_channels % 2 == 0);

/// Their components.
[[nodiscard]] constexpr channel_span components_of(channel_span numbers) {
  return {2 * numbers.first, 2 * numbers.length};
}

/// Gives both components of each number the sum of the two.
inline void pair_up(std::span<double> values) {
  for (std::size_t i = 0; i + 1 < values.size(); i += 2) values[i] = values[i + 1] = values[i] + values[i + 1];
}

/// Says in `check` what is wrong with the parameters of a pass.
template <complex_component T>
void check_complex_affine(call_check& check, complex_affine_parameters<T> const& of, std::int64_t channels) {
  check.channel_values(of.gamma, "gamma", channels);
  check.channel_values(of.gamma_imag, "the imaginary part of gamma", channels);
  check.channel_values(of.beta, "beta", channels);
}

/// Gamma of channel c.
template <complex_component T>
[[nodiscard]] std::complex<double> complex_gamma_of(complex_affine_parameters<T> const& of, std::size_t c) {
  return {of.gamma.empty() ? 1.0 : static_cast<double>(of.gamma[c]),
          of.gamma_imag.empty() ? 0.0 : static_cast<double>(of.gamma_imag[c])};
}

/// Number c of `[C, 2]`, real and imaginary parts.
[[nodiscard]] inline std::complex<double> number_at(std::span<double const> components, std::size_t c) {
  return {components[2 * c], components[2 * c + 1]};
}

/// Affine parameters of complex channels, whose gamma is real, as those of their components.
template <complex_component T>
class affine_of_components {
public:
  /// None where the operands are not valid.
  affine_of_components(call_check const& check, complex_affine_parameters<T> const& of) : beta_{of.beta} {
    if (check.failed()) return;
    gamma_.reserve(2 * of.gamma.size());
    for (T const value : of.gamma) gamma_.insert(gamma_.end(), 2, static_cast<double>(value));
  }

  /// Of the components from `first` on.
  [[nodiscard]] host::affine_values from(std::int64_t first) const {
    host::affine_values values;
    values.gamma = host::channel_values{std::span<double const>{gamma_}, 1};
    values.beta = host::channel_values{components_of(beta_), 0};
    return values.from(first);
  }

private:
  kept_vector<double> gamma_;
  std::span<std::complex<T> const> beta_;
};

/// Whether of all of them the components of a position follow each other in memory.
template <class Views>
[[nodiscard]] bool all_follow(Views const& views) {
  return std::ranges::all_of(views, [](auto const& view) { return host::components_follow(view); });
}

/// Whether rows are so short that a channel by itself has little to read at once.
template <complex_component T>
[[nodiscard]] bool has_short_rows(complex_batches<T> x) {
  constexpr std::int64_t longest = 128;
  return std::ranges::all_of(x, [](auto const& each) { return each.spatial <= longest; });
}

/// Whether a pass takes the primitives of `host/complex_numbers.hpp`: where gamma is complex, or rows are short and the components of a
/// position do not `follow`.
template <complex_component T>
[[nodiscard]] bool goes_by_numbers(complex_affine_parameters<T> const& affine, complex_batches<T> x, bool follow) {
  return has_complex_gamma(affine) || (!follow && has_short_rows<T>(x));
}

/// Calls f(executor, range) for ranges which are all these complex channels, possibly at the same time: for one of all where that can be
/// taken at `once`, else for each channel.
template <class F>
void for_each_range(host::executor_ref exec, channel_span channels, bool once, F const& f) {
  if (once) return f(exec, channels);
  if (channels.length >= 4 * exec.concurrency())
    return exec.for_each(channels.length, [&](std::int64_t c) {
      f(host::executor_ref{host::serial_executor{}}, channel_span{channels.first + c, 1});
    });
  for (std::int64_t c = 0; c < channels.length; ++c) f(exec, channel_span{channels.first + c, 1});
}

/// Says in `check` what is wrong with the masks of K micro-batches: none, or one for each of `x`.
template <complex_component T>
void check_masks(call_check& check, std::span<batch_norm_mask const> masks, complex_batches<T> x) {
  auto const batches = x.size();
  check.require(masks.empty() || masks.size() == batches, [&] {
    return check.text("there are ", masks.size(), " masks, expected ", batches, " as micro-batches of x");
  });
  for (std::size_t k = 0; k < masks.size() && !check.failed(); ++k)
    check.mask(masks[k].mask, batch_name{"the mask", k, batches}, x[k]);
}

/// The masks of the K micro-batches of a pass, checked and ready.
template <complex_component T>
class complex_masks {
public:
  /// As `check_masks`.
  complex_masks(call_check& check, std::span<batch_norm_mask const> masks, complex_batches<T> x) : given_{masks} {
    check_masks<T>(check, masks, x);
    if (check.failed()) return;
    prepared_.reserve(masks.size());
    for (std::size_t k = 0; k < masks.size(); ++k)
      prepared_.emplace_back(batch_norm_epilogue<T>{.mask = masks[k].mask, .masked = masks[k].masked},
                             host::components_of(x[k]));
  }

  [[nodiscard]] host::prepared_epilogue<T> const& operator[](std::size_t k) const {
    return prepared_.empty() ? none_ : prepared_[k];
  }

  /// As it was given.
  [[nodiscard]] batch_norm_mask given(std::size_t k) const { return given_.empty() ? batch_norm_mask{} : given_[k]; }

private:
  std::span<batch_norm_mask const> given_;
  host::prepared_epilogue<T> none_;
  kept_vector<host::prepared_epilogue<T>> prepared_;
};

/// The parts in which a rank would exchange; `choose_parts` of whole numbers.
template <communicator C, complex_component T>
[[nodiscard]] part_choice choose_complex_parts(host::executor_ref exec, C const& comm, complex_batches<T> x,
                                               int tensors, bool failed) {
  auto choice = choose_parts<C, std::complex<T>>(exec, comm, x, tensors, failed);
  constexpr auto all = std::numeric_limits<std::int64_t>::max();
  choice.channels = choice.channels > all / 2 ? all : 2 * choice.channels;
  return choice;
}

} // namespace syncnorm::detail
