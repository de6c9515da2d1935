#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include <syncnorm/core/combination.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/linear_op.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host {

namespace detail {

/// Tensors of a combination, of which a default view is none, nor is one whose scale is 0 in every channel.
template <class T, std::size_t Most>
struct combined_tensors {
  std::array<tensor_view<T const>, Most> tensors;
  std::array<double combination::*, Most> scales{};
  std::size_t count = 0;

  void add(std::span<combination const> channels, tensor_view<T const> const& tensor, double combination::*scale) {
    auto const is_zero = [&](combination const& of) { return of.*scale == 0; };
    if (tensor.data == nullptr || std::ranges::all_of(channels, is_zero)) return;
    tensors[count] = tensor;
    scales[count++] = scale;
  }

  /// Calls f(`count`) with that as a constant.
  template <class F>
  void with_count(F const& f) const {
    [&]<std::size_t... N>(std::index_sequence<N...>) {
      ((count == N ? f(std::integral_constant<std::size_t, N>{}) : void()), ...);
    }
    (std::make_index_sequence<Most + 1>{});
  }
};

/// The last of `Inputs` tensors is centred, the others are not.
template <class A, std::size_t Inputs>
struct combine_terms {
  static constexpr std::size_t coefficients = Inputs + 2;

  std::span<combination const> channels;
  std::array<double combination::*, Inputs> scales;
  bool centres; ///< the last is x

  std::array<A, coefficients> operator()(std::int64_t channel) const {
    auto const& k = channels[static_cast<std::size_t>(channel)];
    // The shift makes up for what rounding the mean loses.
    A const center = static_cast<A>(centres ? k.mean : 0.0);
    double const lost = centres ? (k.mean - static_cast<double>(center)) * k.scale_x : 0.0;
    std::array<A, coefficients> values;
    for (std::size_t j = 0; j < Inputs; ++j) values[j] = static_cast<A>(k.*scales[j]);
    values[Inputs] = center;
    values[Inputs + 1] = static_cast<A>(k.shift - lost);
    return values;
  }
};

} // namespace detail

/// out = a·scale_a + b·scale_b + (x − mean)·scale_x + shift, by the `combination` of each channel. A default view is no
/// term, nor is a tensor whose scale is 0 in every channel: it is not read, whatever numbers, or none, it holds.
///
/// Shapes: a, b, x and out `[N, C, S]`, channels `[C]`. Local. out may be any of the inputs. `how`: see `normalize`.
template <class T>
requires element<T>
void combine(executor_ref exec, std::type_identity_t<tensor_view<T const>> a,
             std::type_identity_t<tensor_view<T const>> b, std::type_identity_t<tensor_view<T const>> x,
             tensor_view<T> out, std::span<combination const> channels, stores how = stores::automatic) {
  detail::combined_tensors<T, 3> in;
  in.add(channels, a, &combination::scale_a);
  in.add(channels, b, &combination::scale_b);
  auto const others = in.count;
  in.add(channels, x, &combination::scale_x);
  in.with_count([&]<std::size_t Inputs>(std::integral_constant<std::size_t, Inputs>) {
    if constexpr (Inputs == 0) {
      exec.for_each(out.samples, [&](std::int64_t n) {
        for (std::int64_t s = 0; s < out.spatial; ++s)
          for (std::int64_t c = 0; c < out.channels; ++c)
            out(n, c, s) = from_double<T>(channels[static_cast<std::size_t>(c)].shift);
      });
    } else {
      detail::combine_terms<accumulate_t<T>, Inputs> terms{channels, {}, Inputs > others};
      std::array<tensor_view<T const>, Inputs> used;
      std::copy_n(in.tensors.begin(), Inputs, used.begin());
      std::copy_n(in.scales.begin(), Inputs, terms.scales.begin());
      detail::map_elements<T>(exec, detail::linear_op<Inputs>{}, terms, used, {out}, nullptr, how);
    }
  });
}

/// The same where positions count, and out = b·scale_b elsewhere. `counted`: null where all count. out is not b.
template <class T>
requires element<T>
void combine_counted(executor_ref exec, std::type_identity_t<tensor_view<T const>> a,
                     std::type_identity_t<tensor_view<T const>> b, std::type_identity_t<tensor_view<T const>> x,
                     tensor_view<T> out, std::span<combination const> channels, detail::prepared_mask const* counted,
                     stores how = stores::automatic) {
  combine(exec, a, b, x, out, channels, how);
  if (counted == nullptr) return;
  exec.for_each(out.samples, [&](std::int64_t n) {
    std::uint8_t const* const mask = counted->row(n);
    for (std::int64_t s = 0; s < out.spatial; ++s)
      for (std::int64_t c = 0; mask[s] == 0 && c < out.channels; ++c) {
        double const scale = channels[static_cast<std::size_t>(c)].scale_b;
        out(n, c, s) = from_double<T>(scale == 0 ? 0.0 : as_double(b(n, c, s)) * scale);
      }
  });
}

} // namespace syncnorm::host
