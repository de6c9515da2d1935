#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/exchange.hpp>

namespace syncnorm::detail {

/// The entries of a `[C]` array that belong to a span of channels; an empty array stays empty.
template <class T>
[[nodiscard]] std::span<T> part_of(std::span<T> values, channel_span channels) {
  if (values.empty()) return values;
  return values.subspan(static_cast<std::size_t>(channels.first), static_cast<std::size_t>(channels.length));
}

template <class T>
[[nodiscard]] tensor_view<T> part_of(tensor_view<T> const& x, channel_span channels) {
  return x.channel_range(channels.first, channels.length);
}

/// The header of a pass of element type `T`, of which `wish` is asked; the caller adds what its pass alone has.
template <class T>
[[nodiscard]] packet_header make_header(std::string_view pass, std::int64_t channels, std::int64_t count,
                                        exchange_policy wish, call_check const& check) {
  packet_header own;
  set_text(own.pass, pass);
  set_text(own.element, element_name<T>());
  set_text(own.fault, check.fault());
  own.channels = channels;
  own.count = check.failed() ? 0 : count;
  own.wish = static_cast<std::int16_t>(wish);
  return own;
}

/// That of a forward pass. `affine` and `running` as `affine_parameters` and `running_statistics`, or those of complex channels.
template <class T, class Affine, class Running>
[[nodiscard]] packet_header make_forward_header(std::int64_t channels, std::int64_t count, Affine const& affine,
                                                Running const& running, batch_norm_options const& options,
                                                call_check const& check) {
  auto own = make_header<T>("batch_norm forward", channels, count, options.exchange, check);
  own.eps = options.eps + 0.0; // −0 is 0, also where bytes are compared
  own.momentum = options.momentum.value_or(-1) + 0.0;
  own.running_variance = static_cast<std::int16_t>(options.variance);
  own.normalize_by = static_cast<std::int16_t>(options.normalize_by);
  own.tracks_running_statistics = running.mean.empty() ? 0 : 1;
  own.affine = (affine.gamma.empty() ? 0 : 1) + (affine.beta.empty() ? 0 : 2);
  return own;
}

/// Has ranks agree on how many batches a cumulative average has, by a counter in memory of the host.
inline void name_batches_averaged(packet_header& own, std::int64_t const* tracked, call_check const& check) {
  bool const averages = own.momentum < 0 && own.tracks_running_statistics != 0 && !check.failed();
  if (averages) own.momentum = -1 - static_cast<double>(*tracked);
}

/// Runs `look`, which says in `check` what is wrong with a pass. So is what it throws, for want of memory.
template <class Look>
void look_into(call_check& check, Look const& look) {
  auto thrown = thrown_by(look);
  check.require(thrown.empty(), [&] { return std::move(thrown); });
}

inline void throw_fault(std::string_view pass, call_check const& check) {
  if (check.failed()) throw invalid_argument_error{std::string{pass} + ": " + check.fault()};
}

} // namespace syncnorm::detail
