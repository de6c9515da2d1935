#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/processor.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Rows of some tensors with contiguous channels, whose columns are summed in the type of the elements' arithmetic. A row is one
/// position, or several that follow each other: then what a loop goes through is long, and no sum is needed again before it is written.
template <class T, std::size_t Inputs>
struct column_run {
  static constexpr std::size_t longest = 256;
  static constexpr std::int64_t lanes = native_lanes<accumulate_t<T>>;

  std::array<std::array<T const*, Inputs>, longest> rows;
  std::size_t count = 0;
  std::int64_t first = 0, positions = 1; ///< the first row's position, of those that each row has
  /// Parts of a row that are contiguous, the columns of each, and elements from one part to the next.
  std::int64_t parts = 1, width = 0;
  std::array<std::int64_t, Inputs> step{};
  std::array<std::int64_t, Inputs> ahead{}; ///< elements from a row to what is fetched meanwhile

  /// Where the sums of a part are after those of the one before. Of a width that is not one of whole vectors, the last vector ends at
  /// the last column, and so may overlap the one before it; its sums are in places of their own.
  [[nodiscard]] std::int64_t places() const { return width < lanes ? width : ceil_div(width, lanes) * lanes; }

  /// Columns of consecutive channels, and where their sums are.
  struct piece {
    std::int64_t sums, column, channel, count;
  };

  /// Calls f(piece) for all columns, those of one position after those of another.
  template <class F>
  void for_each_piece(std::int64_t channels, F const& f) const {
    std::int64_t const whole = width < lanes ? width : width / lanes * lanes, shift = places() - width;
    for (std::int64_t k = 0; k < parts; ++k) {
      std::int64_t const sums = k * places(), column = k * width;
      for (std::int64_t at = 0; at < width; at += channels) {
        std::int64_t const some = std::clamp<std::int64_t>(whole - at, 0, channels), next = at + some;
        if (some != 0) f(piece{sums + at, column + at, 0, some});
        if (some != channels) f(piece{sums + next + shift, column + next, some, channels - some});
      }
    }
  }
};

/// A number of each column of a run, or of each channel.
template <class A>
struct alignas(cache_line) column_values : std::array<A, static_cast<std::size_t>(chunk_channels<float>)> {};

/// Some sums of each column of a run.
template <class A, std::size_t Sums>
using column_sums = std::array<column_values<A>, Sums>;

/// Calls f(place, first column) for each vector of columns [i, width), of which those before are whole vectors.
template <int L, class F>
[[gnu::always_inline]] inline void for_each_vector(std::int64_t i, std::int64_t width, F const& f) {
  for (; i + L <= width; i += L) f(i, i);
  if (i < width) f(i, width - L);
}

/// The sums of products of the columns of `run`; `Op` is one of `short_row_sums`, whose coefficient j of column c is values[j][c]. Of
/// vectors, fetches what is read later.
template <int L, class T, class Op, class A = accumulate_t<T>>
[[gnu::noinline]] void sum_columns(Op const& given, column_run<T, Op::inputs> const& run,
                                   std::array<column_values<A>, Op::coefficients> const& values,
                                   column_sums<A, products_of<Op::values>>& sums) {
  using vector = vector_t<A, L>;
  constexpr std::size_t inputs = Op::inputs, coefficients = Op::coefficients, sum_count = products_of<Op::values>;
  constexpr std::int64_t line = std::max<std::int64_t>(L, line_elements<T>); // what is fetched at once
  auto const op = given;
  bool const finds_pages = processor::here().finds_pages_ahead();
  auto const ahead = run.ahead, step = run.step;
  std::int64_t const parts = run.parts, width = run.width, places = run.places();
  constexpr auto at_once = static_cast<std::size_t>(longest_sum);
  column_sums<A, sum_count> later_sums;
  auto const add_later = [&] {
    for (std::int64_t i = 0; i < parts * places; ++i)
      for (std::size_t j = 0; j < sum_count; ++j)
        sums[j][static_cast<std::size_t>(i)] += later_sums[j][static_cast<std::size_t>(i)];
  };
  for (std::size_t r = 0; r < run.count; ++r) {
    bool const later = r >= at_once;
    std::array<A*, sum_count> to;
    for (std::size_t j = 0; j < sum_count; ++j) to[j] = later ? later_sums[j].data() : sums[j].data();
    if (r % at_once == 0) {
      if (r > at_once) add_later();
      for (A* const each : to) std::fill_n(each, parts * places, A{0});
    }
    auto from = run.rows[r];
    for (std::int64_t k = 0; k < parts; ++k) {
      auto const sum = [&](std::int64_t at, std::int64_t c) __attribute__((always_inline)) {
        std::array<vector, inputs> in;
        std::array<vector, coefficients> of_column;
#pragma GCC unroll 8
        for (std::size_t j = 0; j < inputs; ++j) in[j] = load<L>(from[j] + c);
#pragma GCC unroll 8
        for (std::size_t j = 0; j < coefficients; ++j) of_column[j] = load<L>(values[j].data() + k * width + c);
        auto const terms = op.apply(in, of_column);
        std::array<vector, sum_count> of_place;
#pragma GCC unroll 8
        for (std::size_t j = 0; j < sum_count; ++j) of_place[j] = load<L>(to[j] + at);
        add_products(of_place, terms);
#pragma GCC unroll 8
        for (std::size_t j = 0; j < sum_count; ++j) store<L>(to[j] + at, of_place[j]);
      };
      std::int64_t i = 0;
      if constexpr (L > 1) {
#pragma GCC unroll 8
        for (std::size_t j = 0; j < inputs; ++j)
          if (finds_pages) find_pages(from[j], ahead[j] + page_elements<T>, width, true);
        for (; i + line <= width; i += line) {
#pragma GCC unroll 8
          for (std::size_t j = 0; j < inputs; ++j) prefetch<line, 2>(from[j], i + ahead[j]);
#pragma GCC unroll 8
          for (std::int64_t c = i; c < i + line; c += L) sum(c, c);
        }
      }
      for_each_vector<L>(i, width, sum);
#pragma GCC unroll 8
      for (auto& each : to) each += places;
#pragma GCC unroll 8
      for (std::size_t j = 0; j < inputs; ++j) from[j] += step[j];
    }
  }
  if (run.count > at_once) add_later();
}

/// The same in vectors as wide as fit.
template <class T, class Op, class A = accumulate_t<T>>
void sum_columns(Op const& op, column_run<T, Op::inputs> const& run,
                 std::array<column_values<A>, Op::coefficients> const& values,
                 column_sums<A, products_of<Op::values>>& sums) {
  constexpr int lanes = native_lanes<A>;
  if (run.width < lanes)
    sum_columns<1>(op, run, values, sums);
  else
    sum_columns<lanes>(op, run, values, sums);
}

/// The positions of tensors with contiguous channels, as runs of rows. What is summed with what depends on strides and not on how many
/// of the channels there are here.
template <class T, std::size_t Inputs>
class column_runs {
public:
  using run = column_run<T, Inputs>;
  using views = std::array<tensor_view<T const>, Inputs>;

  /// `in`: at most chunk_channels. `mask`: of the positions that count; null: all.
  column_runs(views const& in, groups const& parts, prepared_mask const* mask)
      : in_{in}, parts_{parts}, mask_{mask}, channels_{in[0].channels} {
    for (auto& x : in_) x.stride_s = elements_to_next(x); // by which what follows is fetched
    in_order_ = mask == nullptr ? make_one_sample(in_) : mask->rows_follow() && join_samples_in_order(in_);
    std::int64_t const step = in_[0].stride_s;
    constexpr std::int64_t widest = 1024 / sizeof(accumulate_t<T>), fewest_rows = 16;
    std::int64_t const fit = std::min(widest / std::max<std::int64_t>(1, step), parts.elements(0) / fewest_rows);
    if (step < channels_ || fit < 2 || !all([&](auto const& x) { return x.stride_s == step; })) return;
    std::int64_t const in_lines = in_whole_lines<accumulate_t<T>>(fit, step);
    positions_ = in_lines * step % run::lanes == 0 ? in_lines : fit;
    if (!in_order_) positions_ = part_of_piece(positions_);
  }

  /// Positions of a row.
  [[nodiscard]] std::int64_t positions() const { return positions_; }

  /// Calls f(run) for each run of rows of group `g`: of several positions all of which count, and of one.
  template <class F>
  void for_each(std::int64_t g, F const& f) const {
    run several = rows_of(positions_), single = rows_of(1);
    auto const flush = [&](run& rows) {
      if (rows.count != 0) f(std::as_const(rows));
      rows.count = 0;
    };
    auto const add = [&](run& rows, std::int64_t n, std::int64_t s) {
      if (rows.count == 0) rows.first = s;
      for (std::size_t j = 0; j < Inputs; ++j) rows.rows[rows.count][j] = &in_[j](n, 0, s);
      if (++rows.count == run::longest) flush(rows);
    };
    auto const add_counted = [&](std::int64_t n, std::int64_t begin, std::int64_t end) {
      std::uint8_t const* const counts = mask_ == nullptr ? nullptr : mask_->row(n);
      for (std::int64_t s = begin; s < end; ++s)
        if (counts == nullptr || counts[s] != 0) add(single, n, s);
    };
    auto const add_range = [&](std::int64_t n, std::int64_t begin, std::int64_t end) {
      for (; positions_ > 1 && begin + positions_ <= end; begin += positions_)
        all_count(n, begin) ? add(several, n, begin) : add_counted(n, begin, begin + positions_);
      add_counted(n, begin, end);
    };
    if (in_order_) {
      std::int64_t const begin = parts_.first_element(g);
      add_range(0, begin, begin + parts_.elements(g));
    } else {
      parts_.for_each_piece(
          g, [&](groups::piece const& piece) { add_range(piece.sample, piece.begin, piece.begin + piece.length); });
    }
    flush(several);
    flush(single);
  }

private:
  template <class Holds>
  [[nodiscard]] bool all(Holds const& holds) const {
    return std::ranges::all_of(in_, holds);
  }

  [[nodiscard]] run rows_of(std::int64_t positions) const {
    run rows;
    rows.positions = positions;
    bool const contiguous = in_[0].stride_s == channels_;
    rows.parts = contiguous ? 1 : positions;
    rows.width = contiguous ? positions * channels_ : channels_;
    std::int64_t const later =
        std::max<std::int64_t>(1, elements_ahead<T>(Inputs) / (positions * channels_)) * positions;
    for (std::size_t j = 0; j < Inputs; ++j) {
      rows.step[j] = in_[j].stride_s;
      rows.ahead[j] = later * in_[j].stride_s;
    }
    return rows;
  }

  /// Of so many positions at most as many as leave the fewest of a piece over, which are summed one by one, and more than half.
  [[nodiscard]] std::int64_t part_of_piece(std::int64_t most) const {
    std::int64_t const length = parts_.cut.length;
    std::int64_t best = std::min(most, length);
    for (std::int64_t some = best - 1; some > most / 2 && length % best != 0; --some)
      if (length % some < length % best) best = some;
    return best;
  }

  /// Whether the positions of a row of sample `n` from `first` on all do.
  [[nodiscard]] bool all_count(std::int64_t n, std::int64_t first) const {
    return mask_ == nullptr || all_nonzero(mask_->row(n) + first, positions_);
  }

  views in_;
  groups parts_;
  prepared_mask const* mask_;
  std::int64_t channels_, positions_ = 1;
  bool in_order_; ///< samples follow each other like positions do, and so do the rows of the mask
};

/// The sums of products per channel over the positions of group `g` that count, in double where runs meet, with the coefficients that
/// `op` has. f(run) after each.
template <class T, class Op, class F>
void sum_channels(Op const& op, std::array<tensor_view<T const>, Op::inputs> const& in, groups const& parts,
                  prepared_mask const* mask, std::int64_t g, sums_of_channels<products_of<Op::values>> const& out,
                  F const& f) {
  using A = accumulate_t<T>;
  column_runs<T, Op::inputs> const runs{in, parts, mask};
  std::int64_t const channels = in[0].channels;
  std::array<column_values<A>, Op::coefficients> values;
  column_sums<A, products_of<Op::values>> sums;
  for (std::int64_t c = 0; c < channels; ++c) {
    auto const of_channel = op(c);
    for (std::size_t j = 0; j < Op::coefficients; ++j)
      for (std::int64_t k = 0; k < runs.positions(); ++k)
        values[j][static_cast<std::size_t>(k * channels + c)] = of_channel[j];
  }
  for (double* const each : out) std::fill_n(each, channels, 0.0);
  runs.for_each(g, [&](auto const& run) {
    sum_columns<T>(op, run, values, sums);
    run.for_each_piece(channels, [&](auto const& piece) {
      for (std::size_t j = 0; j < out.size(); ++j) {
        A const* const of_columns = sums[j].data() + piece.sums;
        double* const to = out[j] + piece.channel;
        for (std::int64_t i = 0; i < piece.count; ++i) to[i] += static_cast<double>(of_columns[i]);
      }
    });
    f(run);
  });
}

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
