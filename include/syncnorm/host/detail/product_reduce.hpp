#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/boxes.hpp>
#include <syncnorm/host/detail/columns.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/product_rows.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/reduce.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/streaming.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>
#include <syncnorm/host/executor.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

struct no_map {};

/// Sums of products of channels over one group of pieces, for `reduce_channels`; `Terms` are `terms_of_lanes`. With a `Map`, an
/// `elementwise_map` of tensors of the same extents, each piece is mapped as soon as it is summed.
template <class T, class Terms, class Map = no_map>
class product_kernel {
  using A = accumulate_t<T>;
  using rows_type = product_rows<T, Terms>;
  using views = typename rows_type::views;
  static constexpr bool maps = !std::is_same_v<Map, no_map>;

public:
  static constexpr std::size_t sum_count = rows_type::sum_count;

  product_kernel(Terms const& terms, views const& in, prepared_mask const* mask, groups const& parts,
                 Map const* map = nullptr)
      : terms_{terms}, in_{in}, mask_{mask}, parts_{parts}, layout_{common_layout(in)}, map_{map} {}

  [[gnu::noinline]] void operator()(std::int64_t first, std::int64_t length, std::int64_t group,
                                    sums_of_channels<sum_count> const& to) const {
    sum(first, length, group, to);
    if constexpr (maps) stream_fence();
  }

  static void merge(std::int64_t before, std::int64_t more, sums_of_channels<sum_count> const& to,
                    sums_of_channels<sum_count> const& from, std::int64_t length) {
    rows_type::merge(before, more, to, from, length);
  }

private:
  void sum(std::int64_t first, std::int64_t length, std::int64_t group, sums_of_channels<sum_count> const& to) const {
    Terms const terms = terms_from(first);
    views const in = channels_of(in_, first, length);
    if (layout_ == layout::channels) {
      sum_channels<T>(terms, in, parts_, mask_, group, to, [&]([[maybe_unused]] auto const& run) {
        if constexpr (maps)
          (*map_)(boxes::box{first, length, 0, 1, run.first, run.positions * static_cast<std::int64_t>(run.count)});
      });
    } else if (layout_ == layout::rows && are_short_rows(in[0].spatial)) {
      short_row_sums<T, Terms> const sums{terms, in, mask_};
      sums(parts_.begin(group), parts_.end(group), to);
    } else {
      return rows(first, length, group, to);
    }
    for (std::int64_t c = 0; c < length; ++c) take_off(to, c, terms.excess(c));
  }

  void rows(std::int64_t first, std::int64_t length, std::int64_t group, sums_of_channels<sum_count> const& to) const {
    fetching const fetch = fetching::of(in_[0], parts_, std::ssize(in_));
    for (std::int64_t done = 0; done < length; done += rows_type::channels_at_once) {
      std::int64_t const some = std::min(rows_type::channels_at_once, length - done);
      std::optional<typename rows_type::copies_type> copies;
      if (layout_ == layout::strided) copies.emplace();
      rows_type sums{terms_from(first + done), channels_of(in_, first + done, some), mask_,
                     copies ? &*copies : nullptr};
      sum_rows(
          sums, parts_, group, some, fetch, from_channel(to, done), [&](std::int64_t c, groups::piece const& piece) {
            if constexpr (maps) {
              auto const& cut = parts_.cut;
              (*map_)(part_of_row<T>(cut, piece.sample, first + done + c, in_[0].channels, piece.begin / cut.length),
                      std::nullopt);
            }
          });
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
  Map const* map_;
};

/// Whether tensors can be summed and mapped at once: long rows, or contiguous channels in groups enough to occupy the executor; these
/// become one sample.
template <class T, std::size_t Inputs, std::size_t Outputs>
[[nodiscard]] bool suits_sum_and_map(executor_ref exec, groups const& parts,
                                     std::array<tensor_view<T const>, Inputs>& in,
                                     std::array<tensor_view<T>, Outputs>& out) {
  auto const all = [&](auto const& holds) { return std::ranges::all_of(in, holds) && std::ranges::all_of(out, holds); };
  if (all([](auto const& x) { return has_rows(x) && !table_folds(x); })) return !are_short_rows(in[0].spatial);
  bool const shared = exec.concurrency() == 1 || parts.count >= 2 * exec.concurrency();
  return shared && in[0].channels <= chunk_channels<accumulate_t<T>> &&
         all([](auto const& x) { return has_contiguous_channels(x) && !has_rows(x); }) && make_one_sample(in, out) &&
         common_layout(in) == layout::channels; // which one channel's positions are not
}

/// The sums of products of each channel of `in`, and `make_map(0, channels, table)`, an `elementwise_map` to `out` that depends on no sums and
/// writes over nothing that it does not read itself, in one reading of each tensor; whether it can do so. The bits are those of
/// `reduce_products`.
template <class T, class Terms, std::size_t Outputs, class MakeMap>
[[nodiscard]] bool sum_and_map(executor_ref exec, Terms const& terms,
                               std::array<tensor_view<T const>, Terms::inputs> in,
                               std::array<tensor_view<T>, Outputs> out,
                               sums_of_channels<products_of<Terms::values>> const& to, MakeMap const& make_map) {
  using A = accumulate_t<T>;
  using map_type = std::invoke_result_t<MakeMap const&, std::int64_t, std::int64_t, A*>;
  using lanes = terms_of_lanes<Terms>;
  groups const parts{in[0]};
  std::int64_t const channels = in[0].channels;
  std::int64_t const table_size = map_type::table_size(in[0]);
  if (in[0].size() == 0 || !suits_sum_and_map<T>(exec, parts, in, out)) return false;
  scratch_lease<A> table{table_size};
  map_type const map = make_map(std::int64_t{0}, channels, table.data());
  std::int64_t chunk = reduction_chunk(in[0]);
  for (auto const& x : in) chunk = std::min(chunk, reduction_chunk(x));
  // Of rows, too few groups are made up for by fewer channels to a task.
  if (std::int64_t const tasks = 4 * exec.concurrency(); tasks > 4 && has_rows(in[0]) && parts.count < tasks)
    chunk = std::min(chunk, ceil_div(channels * parts.count, tasks));
  reduce_channels<A>(exec, parts, channels, chunk,
                     product_kernel<T, lanes, map_type>{lanes{terms}, in, nullptr, parts, &map}, to);
  return true;
}

/// The sums of products of each channel of `in`, over the positions that count; `mask`: null where all do. The same bits whatever the executor.
template <class T, class Terms>
void reduce_products(executor_ref exec, Terms const& terms, std::array<tensor_view<T const>, Terms::inputs> in,
                     prepared_mask const* mask, sums_of_channels<products_of<Terms::values>> const& to) {
  constexpr std::size_t sum_count = products_of<Terms::values>;
  terms_of_lanes<Terms> of{terms};
  std::int64_t const channels = in[0].channels, fold = in[0].spatial;
  auto const reduce = [&](sums_of_channels<sum_count> const& sums) {
    groups const parts{in[0]};
    // Fewer where each has more sums, so that these stay in the first-level cache.
    std::int64_t chunk = std::min(reduction_chunk(in[0]), 2 * chunk_channels<accumulate_t<T>> / std::ssize(sums));
    for (auto const& x : in) chunk = std::min(chunk, reduction_chunk(x));
    reduce_channels<accumulate_t<T>>(exec, parts, in[0].channels, chunk,
                                     product_kernel<T, terms_of_lanes<Terms>>{of, in, mask, parts}, sums);
  };
  if (mask != nullptr || !std::ranges::all_of(in, [](auto const& x) { return folds(x); })) return reduce(to);
  for (auto& x : in) x = folded(x);
  of.fold = fold;
  std::int64_t const lanes = channels * fold;
  scratch_lease<double> scratch{static_cast<std::int64_t>(sum_count) * lanes};
  auto const of_lanes = consecutive_sums<sum_count>(scratch.data(), lanes);
  reduce(of_lanes);
  for (std::size_t j = 0; j < sum_count; ++j)
    for (std::int64_t c = 0; c < channels; ++c)
      to[j][c] = std::accumulate(of_lanes[j] + c * fold, of_lanes[j] + (c + 1) * fold, 0.0);
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
