#pragma once

#include <algorithm>
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

/// One reading of dy and x: the sums of dy and of dy·u, and dx from du = dy·dy_scale + u·u_scale; see run_power. `Scaled`:
/// u is x with its groups of channels scaled, and dx = r·(du − u·mean of du·u in the group), else u is x and dx is du.
/// `Sums`, `Map`: what of it is wanted. Masked positions do not enter the sums, and their dx is 0.
template <class T, bool Scaled, bool Sums, bool Map>
class power_backward_kernel {
  using A = accumulate_t<T>;

public:
  /// `dy_scale`, `u_scale`: `[C]`, or null.
  power_backward_kernel(tensor_view<T const> const& dy, tensor_view<T const> const& x, tensor_view<T> const& dx,
                        mask_view const& mask, channel_groups const& scaling, A const* dy_scale, A const* u_scale)
      : dy_{dy}, x_{x}, dx_{dx}, mask_{mask}, scaling_{scaling}, dy_scale_{dy_scale}, u_scale_{u_scale}, parts_{x},
        layout_{Map ? common_layout(dy, x, dx) : common_layout(dy, x)} {}

  [[nodiscard]] groups const& parts() const { return parts_; }
  [[nodiscard]] std::int64_t chunk() const { return power_chunk(x_, layout_, scaling_); }

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy,
                                    double* sum_dy_u) const {
    if (layout_ == layout::channels)
      positions(first, length, group, sum_dy, sum_dy_u);
    else
      rows(first, length, group, sum_dy, sum_dy_u);
  }

private:
  [[nodiscard]] bool is_in_place() const { return dx_.data == dy_.data || dx_.data == x_.data; }

  /// Contiguous channels, one position at a time.
  void positions(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy, double* sum_dy_u) const {
    auto const dy = dy_.channel_range(first, length), x = x_.channel_range(first, length);
    auto const dx = Map ? dx_.channel_range(first, length) : tensor_view<T>{};
    auto const how = power_stores::of_channels(dx, Scaled ? scaling_.width : 0, dx_, is_in_place());
    bool const finds_pages = processor::here().finds_pages_ahead();
    std::int64_t const ahead = elements_to_fetch(x, 2);
    position_sums<A> sums{Sums ? length : 0, sum_dy, sum_dy_u};
    parts_.for_each_piece(group, [&](groups::piece const& at) {
      for (std::int64_t s = at.begin; s < at.begin + at.length; ++s) {
        T* const to = Map ? &dx(at.sample, 0, s) : nullptr;
        if (finds_pages) {
          find_position(x, &x(at.sample, 0, s), ahead);
          find_position(dy, &dy(at.sample, 0, s), ahead);
          if (how.streams) find_position(dx, to, 0);
        }
        if (!is_masked(mask_, at.sample, s))
          position(&dy(at.sample, 0, s), &x(at.sample, 0, s), to, first, length, ahead, how, sums);
        else if constexpr (Map)
          std::fill_n(to, length, from_accumulate<T>(A{0}));
      }
    });
    sums.finish();
  }

  void position(T const* dy, T const* x, T* dx, std::int64_t first, std::int64_t length, std::int64_t ahead,
                power_stores const& how, position_sums<A>& sums) const {
    constexpr int lanes = native_lanes<A>;
    A *const of_dy = sums.first(), *const of_dy_u = sums.second();
    std::int64_t const width = Scaled ? scaling_.width : length;
    for (std::int64_t begin = 0; begin < length; begin += width) {
      auto const gradient = [&]<int L>(std::int64_t c, vector_t<A, L> const& g, vector_t<A, L> const& u) {
        return g * load<L>(dy_scale_ + first + c) + u * load<L>(u_scale_ + first + c);
      };
      A root = 1, along = 0; // the mean of du·u, through which x acts on its group's root
      if constexpr (Scaled) {
        root = scaling_.template inverse_root<A>(sum_of_width<A>(width, [&]<int L>(std::int64_t i, auto& squares) {
          fetch<L>(x, begin + i + ahead);
          auto const v = load<L>(x + begin + i);
          squares.template add<L>(v * v);
        }));
        if constexpr (Map) {
          along = sum_of_width<A>(width, [&]<int L>(std::int64_t i, auto& products) {
            std::int64_t const c = begin + i;
            fetch<L>(dy, c + ahead);
            auto const u = load<L>(x + c) * splat<A, L>(root);
            products.template add<L>(gradient.template operator()<L>(c, load<L>(dy + c), u) * u);
          });
          along /= static_cast<A>(width);
        }
      }
      auto const each = [&]<int L>(std::int64_t i, [[maybe_unused]] bool streams) {
        std::int64_t const c = begin + i;
        if constexpr (!Scaled) fetch<L>(x, c + ahead);
        if constexpr (!Scaled || !Map) fetch<L>(dy, c + ahead);
        auto const g = load<L>(dy + c);
        auto u = load<L>(x + c);
        if constexpr (Scaled) u *= splat<A, L>(root);
        if constexpr (Map) {
          auto du = gradient.template operator()<L>(c, g, u);
          if constexpr (Scaled) du = splat<A, L>(root) * (du - u * splat<A, L>(along));
          put<L>(dx + c, du, streams);
        }
        if constexpr (Sums) {
          store<L>(of_dy + c, load<L>(of_dy + c) + g);
          store<L>(of_dy_u + c, load<L>(of_dy_u + c) + g * u);
        }
      };
      for_each_lanes_of<lanes>(Map ? dx + begin : nullptr, width, how, each);
    }
    sums.next();
  }

  /// Contiguous rows, or any strides: a run of one channel at a time.
  void rows(std::int64_t first, std::int64_t length, std::int64_t group, double* sum_dy, double* sum_dy_u) const {
    constexpr int lanes = native_lanes<A>;
    run_buffer<A> root, along, keep, dy_copy, x_copy, dx_copy;
    auto const how = power_stores::of_rows(dx_, is_in_place());
    std::int64_t const width = Scaled ? scaling_.width : 1;
    parts_.for_each_run(group, longest_power_run, [&](groups::piece const& at) {
      bool any_masked = false;
      for (std::int64_t i = 0; mask_.data != nullptr && i < at.length; ++i) {
        bool const hidden = is_masked(mask_, at.sample, at.begin + i);
        any_masked = any_masked || hidden;
        keep[static_cast<std::size_t>(i)] = hidden ? A{0} : A{1};
      }
      for (std::int64_t begin = first; begin < first + length; begin += width) {
        if constexpr (Scaled) find_factors(at, begin, root.data(), along.data(), dy_copy.data(), x_copy.data());
        for (std::int64_t c = begin; c < begin + width; ++c) {
          A const* const dy = fetch_run(dy_, c, at, dy_copy.data());
          A const* const x = fetch_run(x_, c, at, x_copy.data());
          A* const dx = Map ? place_run(dx_, c, at, dx_copy.data(), how) : nullptr;
          lane_sum<A, lanes> of_dy, of_dy_u;
          for_each_lanes<lanes>(at.length, [&]<int L>(std::int64_t i) {
            auto g = load<L>(dy + i), u = load<L>(x + i);
            if (any_masked) {
              g = kept<A, L>(load<L>(keep.data() + i), g);
              u = kept<A, L>(load<L>(keep.data() + i), u);
            }
            if constexpr (Scaled) u *= load<L>(root.data() + i);
            if constexpr (Map) {
              auto du = g * splat<A, L>(dy_scale_[c]) + u * splat<A, L>(u_scale_[c]);
              if constexpr (Scaled) du = load<L>(root.data() + i) * (du - u * load<L>(along.data() + i));
              put<L>(dx + i, any_masked ? kept<A, L>(load<L>(keep.data() + i), du) : du,
                     how.streams && dx != dx_copy.data());
            }
            if constexpr (Sums) {
              of_dy.template add<L>(g);
              of_dy_u.template add<L>(any_masked ? kept<A, L>(load<L>(keep.data() + i), g * u) : g * u);
            }
          });
          if constexpr (Map) finish_run(dx_, c, at, dx, dx_copy.data(), how);
          if constexpr (Sums) {
            sum_dy[c - first] += static_cast<double>(of_dy.total());
            sum_dy_u[c - first] += static_cast<double>(of_dy_u.total());
          }
        }
      }
    });
  }

  /// Of each position of a run and a group of channels the factor, and the mean of du·u.
  void find_factors(groups::piece const& at, std::int64_t begin, A* root, A* along, A* dy_copy, A* x_copy) const {
    find_roots(x_, scaling_, at, begin, root, x_copy);
    if constexpr (!Map) return;
    sum_of_width(scaling_.width, at.length, along, [&](std::int64_t of) {
      std::int64_t const c = begin + of;
      A const* const dy = fetch_run(dy_, c, at, dy_copy);
      A const* const x = fetch_run(x_, c, at, x_copy);
      for_each_lanes<native_lanes<A>>(at.length, [&]<int L>(std::int64_t i) {
        auto const u = load<L>(x + i) * load<L>(root + i);
        auto const du = load<L>(dy + i) * splat<A, L>(dy_scale_[c]) + u * splat<A, L>(u_scale_[c]);
        store<L>(along + i, load<L>(along + i) + du * u);
      });
    });
    for (std::int64_t i = 0; i < at.length; ++i) along[i] /= static_cast<A>(scaling_.width);
  }

  tensor_view<T const> dy_, x_;
  tensor_view<T> dx_;
  mask_view mask_;
  channel_groups scaling_;
  A const *dy_scale_, *u_scale_;
  groups parts_;
  layout layout_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
