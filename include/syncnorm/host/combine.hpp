#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

/// One channel of out = a·scale_a + b·scale_b + (x − mean)·scale_x + shift.
struct combination {
  double scale_a = 0, scale_b = 0, mean = 0, scale_x = 0, shift = 0;
};

namespace detail {

template <class A>
struct combine_op {
  static constexpr std::size_t inputs = 3, coefficients = 5;

  std::span<combination const> channels;

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const& k = channels[static_cast<std::size_t>(channel)];
    // The shift makes up for what rounding the mean loses.
    A const center = static_cast<A>(k.mean);
    double const shift = k.shift - (k.mean - static_cast<double>(center)) * k.scale_x;
    return {static_cast<A>(k.scale_a), static_cast<A>(k.scale_b), center, static_cast<A>(k.scale_x),
            static_cast<A>(shift)};
  }

  template <class V>
  static V apply(std::array<V, inputs> const& in, std::array<V, coefficients> const& k) {
    return in[0] * k[0] + (in[1] * k[1] + ((in[2] - k[2]) * k[3] + k[4]));
  }
};

} // namespace detail

/// out = a·scale_a + b·scale_b + (x − mean)·scale_x + shift, by the `combination` of each channel.
///
/// Shapes: a, b, x and out `[N, C, S]`, channels `[C]`. Local. out may be any of the inputs.
template <class T, executor E>
requires element<T>
void combine(E const& exec, std::type_identity_t<tensor_view<T const>> a, std::type_identity_t<tensor_view<T const>> b,
             std::type_identity_t<tensor_view<T const>> x, tensor_view<T> out, std::span<combination const> channels) {
  detail::combine_op<accumulate_t<T>> const op{channels};
  detail::map_channels<T>(exec, op, {a, b, x}, out, stores::automatic);
}

/// The same where positions count, and out = b·scale_b elsewhere. `counted`: null where all count. out is not b.
template <class T, executor E>
requires element<T>
void combine_counted(E const& exec, std::type_identity_t<tensor_view<T const>> a,
                     std::type_identity_t<tensor_view<T const>> b, std::type_identity_t<tensor_view<T const>> x,
                     tensor_view<T> out, std::span<combination const> channels, detail::prepared_mask const* counted) {
  combine(exec, a, b, x, out, channels);
  if (counted == nullptr) return;
  exec.for_each(out.samples, [&](std::int64_t n) {
    std::uint8_t const* const mask = counted->row(n);
    for (std::int64_t s = 0; s < out.spatial; ++s)
      for (std::int64_t c = 0; mask[s] == 0 && c < out.channels; ++c)
        out(n, c, s) = from_double<T>(as_double(b(n, c, s)) * channels[static_cast<std::size_t>(c)].scale_b);
  });
}

} // namespace syncnorm::host
