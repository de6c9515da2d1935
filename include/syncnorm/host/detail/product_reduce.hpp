#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/columns.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/product_rows.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Σ a and Σ a·b of channels over one group of pieces, for `reduce_channels`; `Terms` are `terms_of_lanes`.
template <class T, class Terms>
class product_kernel {
  using A = accumulate_t<T>;
  using rows_type = product_rows<T, Terms>;
  using views = typename rows_type::views;

public:
  product_kernel(Terms const& terms, views const& in, prepared_mask const* mask, groups const& parts)
      : terms_{terms}, in_{in}, mask_{mask}, parts_{parts}, layout_{common_layout(in)} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group, double* a,
                                    double* b) const {
    Terms const terms = terms_from(first);
    views const in = channels_of(in_, first, length);
    if (layout_ == layout::channels) {
      sum_channels<T>(terms, in, parts_, mask_, group, a, b);
    } else if (layout_ == layout::rows && mask_ == nullptr && are_short_rows(in[0].spatial)) {
      short_row_sums<T, Terms> const sums{terms, in};
      sums(parts_.begin(group), parts_.end(group), a, b);
    } else {
      return rows(first, length, group, a, b);
    }
    for (std::int64_t c = 0; c < length; ++c) b[c] = multiply_add(-terms.excess(c), a[c], b[c]);
  }

  static void merge(std::int64_t before, std::int64_t more, double* a, double* b, double const* a_more,
                    double const* b_more, std::int64_t length) {
    rows_type::merge(before, more, a, b, a_more, b_more, length);
  }

private:
  void rows(std::int64_t first, std::int64_t length, std::int64_t group, double* a, double* b) const {
    fetching const fetch = fetching::of(in_[0], parts_, std::ssize(in_));
    for (std::int64_t done = 0; done < length; done += rows_type::channels_at_once) {
      std::int64_t const some = std::min(rows_type::channels_at_once, length - done);
      rows_type sums{terms_from(first + done), channels_of(in_, first + done, some), mask_, layout_};
      sum_rows(sums, parts_, group, some, fetch, a + done, b + done);
    }
  }

  [[nodiscard]] Terms terms_from(std::int64_t first) const {
    auto terms = terms_;
    terms.first += first;
    return terms;
  }

  Terms terms_;
  views in_;
  prepared_mask const* mask_;
  groups parts_;
  layout layout_;
};

/// Σ a and Σ a·b of each channel of `in`, over the positions that count; `mask`: null where all do. The same bits whatever the executor.
template <class T, class Terms>
void reduce_products(executor_ref exec, Terms const& terms, std::array<tensor_view<T const>, Terms::inputs> in,
                     prepared_mask const* mask, std::span<double> a, std::span<double> b) {
  terms_of_lanes<Terms> of{terms};
  std::int64_t const channels = in[0].channels, fold = in[0].spatial;
  auto const reduce = [&](std::span<double> first, std::span<double> second) {
    groups const parts{in[0]};
    std::int64_t chunk = reduction_chunk(in[0]);
    for (auto const& x : in) chunk = std::min(chunk, reduction_chunk(x));
    reduce_channels<accumulate_t<T>>(exec, parts, in[0].channels, chunk,
                                     product_kernel<T, terms_of_lanes<Terms>>{of, in, mask, parts}, first, second);
  };
  if (mask != nullptr || !std::ranges::all_of(in, [](auto const& x) { return folds(x); })) return reduce(a, b);
  for (auto& x : in) x = folded(x);
  of.fold = fold;
  auto const lanes = static_cast<std::size_t>(channels * fold);
  scratch_lease<double> scratch{2 * channels * fold};
  std::span<double> const first{scratch.data(), lanes}, second{scratch.data() + lanes, lanes};
  reduce(first, second);
  for (std::int64_t c = 0; c < channels; ++c) {
    auto const of_channel = [&](std::span<double const> values) {
      auto const part = channels_of(values, c * fold, fold);
      return std::accumulate(part.begin(), part.end(), 0.0);
    };
    a[static_cast<std::size_t>(c)] = of_channel(first);
    b[static_cast<std::size_t>(c)] = of_channel(second);
  }
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
