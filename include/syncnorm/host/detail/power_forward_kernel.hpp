#pragma once

#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/power_kernel.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/simd.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// One reading of x: the sums of u² over positions that are not masked and over those that are, and y = u·scale + shift;
/// see run_power. `Scaled`: u is x with its groups of channels scaled, else x. `Sums`, `Map`: what of it is wanted.
template <class T, bool Scaled, bool Sums, bool Map>
class power_forward_kernel {
  using A = accumulate_t<T>;

public:
  /// `scale`, `shift`: `[C]`, or null.
  power_forward_kernel(tensor_view<T const> const& x, tensor_view<T> const& y, mask_view const& mask,
                       channel_groups const& scaling, A const* scale, A const* shift)
      : x_{x}, y_{y}, mask_{mask}, scaling_{scaling}, scale_{scale}, shift_{shift}, parts_{x},
        layout_{Map ? common_layout(x, y) : common_layout(x)} {}

  [[nodiscard]] groups const& parts() const { return parts_; }
  [[nodiscard]] std::int64_t chunk() const { return power_chunk(x_, layout_, scaling_); }

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* counted,
                                    double* masked) const {
    if (layout_ == layout::channels)
      positions(first, length, group, counted, masked);
    else
      rows(first, length, group, counted, masked);
  }

private:
  /// Contiguous channels, one position at a time.
  void positions(std::int64_t first, std::int64_t length, std::int64_t group, double* counted, double* masked) const {
    auto const x = x_.channel_range(first, length);
    auto const y = Map ? y_.channel_range(first, length) : tensor_view<T>{};
    auto const how = power_stores::of_channels(y, Scaled ? scaling_.width : 0, y_, x.data == y.data);
    bool const finds_pages = processor::here().finds_pages_ahead();
    std::int64_t const ahead = elements_to_fetch(x, 1);
    position_sums<A> sums{Sums ? length : 0, counted, masked};
    parts_.for_each_piece(group, [&](groups::piece const& at) {
      for (std::int64_t s = at.begin; s < at.begin + at.length; ++s) {
        if (finds_pages) {
          find_position(x, &x(at.sample, 0, s), ahead);
          if (how.streams) find_position(y, &y(at.sample, 0, s), 0);
        }
        position(&x(at.sample, 0, s), Map ? &y(at.sample, 0, s) : nullptr, first, length, ahead, how,
                 is_masked(mask_, at.sample, s) ? sums.second() : sums.first());
        sums.next();
      }
    });
    sums.finish();
  }

  void position(T const* x, T* y, std::int64_t first, std::int64_t length, std::int64_t ahead, power_stores const& how,
                A* sums) const {
    constexpr int lanes = native_lanes<A>;
    std::int64_t const width = Scaled ? scaling_.width : length;
    for (std::int64_t begin = 0; begin < length; begin += width) {
      A root = 1;
      if constexpr (Scaled) {
        root = scaling_.template inverse_root<A>(sum_of_width<A>(width, [&]<int L>(std::int64_t i, auto& squares) {
          fetch<L>(x, begin + i + ahead);
          auto const v = load<L>(x + begin + i);
          squares.template add<L>(v * v);
        }));
      }
      auto const each = [&]<int L>(std::int64_t i, [[maybe_unused]] bool streams) {
        std::int64_t const c = begin + i;
        if constexpr (!Scaled) fetch<L>(x, c + ahead);
        auto u = load<L>(x + c);
        if constexpr (Scaled) u *= splat<A, L>(root);
        if constexpr (Map) put<L>(y + c, u * load<L>(scale_ + first + c) + load<L>(shift_ + first + c), streams);
        if constexpr (Sums) store<L>(sums + c, load<L>(sums + c) + u * u);
      };
      for_each_lanes_of<lanes>(Map ? y + begin : nullptr, width, how, each);
    }
  }

  /// Contiguous rows, or any strides: a run of one channel at a time.
  void rows(std::int64_t first, std::int64_t length, std::int64_t group, double* counted, double* masked) const {
    constexpr int lanes = native_lanes<A>;
    run_buffer<A> root, keep, x_copy, y_copy;
    auto const how = power_stores::of_rows(y_, x_.data == y_.data);
    std::int64_t const width = Scaled ? scaling_.width : 1;
    parts_.for_each_run(group, longest_power_run, [&](groups::piece const& at) {
      bool any_masked = false;
      for (std::int64_t i = 0; mask_.data != nullptr && i < at.length; ++i) {
        bool const hidden = is_masked(mask_, at.sample, at.begin + i);
        any_masked = any_masked || hidden;
        keep[static_cast<std::size_t>(i)] = hidden ? A{0} : A{1};
      }
      for (std::int64_t begin = first; begin < first + length; begin += width) {
        if constexpr (Scaled) find_roots(x_, scaling_, at, begin, root.data(), x_copy.data());
        for (std::int64_t c = begin; c < begin + width; ++c) {
          A const* const x = fetch_run(x_, c, at, x_copy.data());
          A* const y = Map ? place_run(y_, c, at, y_copy.data(), how) : nullptr;
          lane_sum<A, lanes> of_counted, of_masked;
          for_each_lanes<lanes>(at.length, [&]<int L>(std::int64_t i) {
            auto u = load<L>(x + i);
            if constexpr (Scaled) u *= load<L>(root.data() + i);
            if constexpr (Map)
              put<L>(y + i, u * splat<A, L>(scale_[c]) + splat<A, L>(shift_[c]), how.streams && y != y_copy.data());
            if constexpr (Sums) {
              if (!any_masked) return of_counted.template add<L>(u * u);
              auto const k = load<L>(keep.data() + i);
              of_counted.template add<L>(kept<A, L>(k, u * u));
              of_masked.template add<L>(kept<A, L>(A{1} - k, u * u));
            }
          });
          if constexpr (Map) finish_run(y_, c, at, y, y_copy.data(), how);
          if constexpr (Sums) {
            counted[c - first] += static_cast<double>(of_counted.total());
            if (any_masked) masked[c - first] += static_cast<double>(of_masked.total());
          }
        }
      }
    });
  }

  tensor_view<T const> x_;
  tensor_view<T> y_;
  mask_view mask_;
  channel_groups scaling_;
  A const *scale_, *shift_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
