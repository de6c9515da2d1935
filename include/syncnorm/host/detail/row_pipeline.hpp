#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/blocks.hpp>
#include <syncnorm/host/detail/map.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/detail/short_rows.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail {

/// Whether `row_pipeline` can take blocks of so many channels.
template <class Rows, class T, std::size_t Inputs, std::size_t Outputs>
[[nodiscard]] bool suits_row_pipeline(channel_blocks const& blocks, std::array<tensor_view<T const>, Inputs> const& in,
                                      std::array<tensor_view<T>, Outputs> const& out) {
  auto const rows = [&](auto const& x) { return has_rows(x) && !table_folds(x.channel_range(0, blocks.length)); };
  return !are_short_rows(in[0].spatial) && std::ranges::all_of(in, rows) && std::ranges::all_of(out, rows) &&
         blocks.size(blocks.count - 1) <= Rows::channels_at_once;
}

/// Sums the rows of one block of channels while it maps those of the block before, row piece by row piece in turn: then
/// memory is read and written and the cache is read at the same time. The map takes samples in the opposite order: what was
/// read last is the likeliest to be in the cache still where two blocks do not fit. `Rows` has what `moment_rows` has, `Map`
/// is a `linear_map` or an `epilogue_map`, `Parts` are the groups of pieces, masked ones perhaps.
template <class T, class Rows, class Map, class Parts>
class row_pipeline {
public:
  row_pipeline(std::int64_t samples, Parts const& parts) : parts_{parts}, samples_{samples} {}

  /// The sums `a`, `b` of `rows`, of `length` channels; meanwhile maps the `mapped` channels before these by `map`, no more.
  [[gnu::noinline]] void operator()(Rows& rows, std::int64_t length, double* a, double* b, Map const* map,
                                    std::int64_t mapped) const {
    std::array<double, Rows::channels_at_once> next_a, next_b;
    std::int64_t before = 0;
    for (std::int64_t g = 0; g < parts_.count; ++g) {
      bool begun = false;
      parts_.for_each_piece(g, [&](groups::piece const& now, groups::piece const& next) {
        std::int64_t const sample = samples_ - 1 - now.sample, end = now.begin + now.length;
        bool const begins_row = now.begin == 0, ends_row = end == parts_.cut.spatial;
        // In a piece of less than a line of the cache, none may end that begins before it.
        bool const follows_piece = !begins_row && now.length >= line_elements<T>;
        bool const precedes_piece = !ends_row && next.length >= line_elements<T>;
        // The map takes longer than the sums, so it is what fetches the next piece to be summed, unless that is short: then it comes
        // too late.
        bool const sums_fetch = map == nullptr || now.length * static_cast<std::int64_t>(sizeof(T)) < short_piece_bytes;
        row_distance const to_next_row{mapped + 1, now.sample - sample, 0};
        row_distance const to_next_piece{1, next.sample - sample, next.begin - now.begin};
        for (std::int64_t c = 0; c < length; ++c) {
          bool const last = c + 1 == length;
          rows.add(c, now, next, begun, sums_fetch ? 2 : 0);
          if (c < mapped)
            (*map)({sample, c, now.begin, end, follows_piece || (begins_row && c > 0),
                    precedes_piece || (ends_row && !last && c + 1 < mapped)},
                   sums_fetch ? std::nullopt : std::optional{last ? to_next_piece : to_next_row});
        }
        begun = true;
      });
      std::int64_t const more = parts_.elements(g);
      if (g == 0) {
        rows.finish(g, a, b);
      } else if (more != 0) {
        rows.finish(g, next_a.data(), next_b.data());
        Rows::merge(before, more, a, b, next_a.data(), next_b.data(), length);
      }
      before += more;
    }
  }

private:
  static constexpr std::int64_t short_piece_bytes = 4096;

  Parts parts_;
  std::int64_t samples_;
};

/// Whether `map_and_sum_rows` can take `out` and, after it, `next_channels` more channels.
template <class Rows, class T, std::size_t Inputs>
[[nodiscard]] bool suits_map_and_sum(executor_ref exec, std::array<tensor_view<T const>, Inputs> const& in,
                                     tensor_view<T> const& out, std::int64_t next_channels) {
  return exec.concurrency() == 1 && out.size() != 0 && next_channels <= Rows::channels_at_once &&
         suits_row_pipeline<Rows>(channel_blocks{out.channels, out.channels}, in, std::array{out});
}

/// `out` by a `linear_map`, and meanwhile the sums `a`, `b` by `rows` of the `length` channels after those of `out`.
template <class T, class Rows, class Terms, std::size_t Inputs>
void map_and_sum_rows(Terms const& terms_of, std::array<tensor_view<T const>, Inputs> const& in,
                      tensor_view<T> const& out, stores how, Rows rows, std::int64_t length, double* a, double* b) {
  using map_type = linear_map<T, Inputs>;
  scratch_lease<accumulate_t<T>> table{map_type::table_size(out)};
  map_type const map{terms_of, in, out, how, table.data()};
  row_pipeline<T, Rows, map_type, groups> const pipeline{out.samples, groups{out}};
  pipeline(rows, length, a, b, &map, out.channels);
  if (length < out.channels) map(boxes::box{length, out.channels - length, 0, out.samples, 0, out.spatial});
  stream_fence();
}

/// For each block of channels: its sums `a` and `b` by `make_rows(first, length)`, `finish(first, length)`, and
/// `make_map(first, length, table)` while the next block is summed. `x` and `parts` are those of all. Each thread takes
/// several blocks in a row.
template <class T, class Parts, class MakeRows, class MakeMap>
void reduce_and_map_rows(executor_ref exec, channel_blocks const& blocks, tensor_view<T const> const& x,
                         Parts const& parts, MakeRows const& make_rows, std::span<double> a, std::span<double> b,
                         function_ref<void(std::int64_t, std::int64_t)> finish, MakeMap const& make_map) {
  using A = accumulate_t<T>;
  using rows_type = std::invoke_result_t<MakeRows const&, std::int64_t, std::int64_t>;
  using map_type = std::invoke_result_t<MakeMap const&, std::int64_t, std::int64_t, A*>;
  row_pipeline<T, rows_type, map_type, Parts> const pipeline{x.samples, parts};
  for_each_run(exec, blocks, 2, [&](std::int64_t begin, std::int64_t end) {
    scratch_lease<A> table{map_type::table_size(x.channel_range(0, blocks.size(blocks.count - 1)))};
    std::optional<map_type> map;
    std::int64_t mapped = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t const first = blocks.first(i), length = blocks.size(i);
      auto rows = make_rows(first, length);
      pipeline(rows, length, a.data() + first, b.data() + first, map ? &*map : nullptr, mapped);
      finish(first, length);
      map.emplace(make_map(first, length, table.data()));
      mapped = length;
    }
    boxes const tasks = map->tasks();
    for (std::int64_t task = tasks.count(); task-- > 0;) (*map)(tasks[task]);
    stream_fence();
  });
}

} // namespace syncnorm::host::detail
