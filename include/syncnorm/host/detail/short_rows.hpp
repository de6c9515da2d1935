#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/counted_lanes.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/repeat.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Elements whose mean is the pivot of short rows.
inline constexpr std::int64_t short_row_pilot = 16;

/// Whether rows are taken by `short_row_sums`.
[[nodiscard]] constexpr bool are_short_rows(std::int64_t spatial) {
  return spatial >= shortest_row && spatial < groups::long_piece;
}

/// The sums of products per channel over short rows, those of some rows in `A`, and of these in double. `Op` has
///
///     static constexpr std::size_t inputs, coefficients, values;
///     std::array<A, coefficients> operator()(channel)        the coefficients
///     std::array<V, values> apply(std::array<V, inputs>, std::array<V, coefficients>)        what `add_products` takes
template <class T, class Op>
class short_row_sums {
  using A = accumulate_t<T>;
  static constexpr int lanes = native_lanes<A>;
  static constexpr std::size_t inputs = Op::inputs, coefficients = Op::coefficients,
                               sum_count = products_of<Op::values>;
  using vector = vector_t<A, lanes>;
  using doubles = vector_t<double, native_lanes<double>>;
  using terms_type = std::array<vector, Op::values>;
  using sums_type = std::array<vector, sum_count>;
  using vectors = std::array<vector, coefficients>;
  using pointers = std::array<T const*, inputs>;
  static constexpr std::int64_t most_vectors = longest_sum / 2; ///< of a row, which are added in `A`
  /// Rows that are read side by side, each by instructions of its own, whose strides processors follow.
  static constexpr std::size_t most_rows = 8 / inputs;

public:
  /// `mask`: of the positions that count; null: all.
  short_row_sums(Op const& op, std::array<tensor_view<T const>, inputs> const& in, prepared_mask const* mask)
      : op_{op}, in_{in}, mask_{mask}, channels_{in[0].channels}, spatial_{in[0].spatial} {}

  /// The sums of each channel over rows [begin, end).
  void operator()(std::int64_t begin, std::int64_t end, sums_of_channels<sum_count> const& to) const {
    mask_ == nullptr ? sum<false>(begin, end, to) : sum<true>(begin, end, to);
  }

private:
  template <bool Masked>
  void sum(std::int64_t begin, std::int64_t end, sums_of_channels<sum_count> const& to) const {
    for (double* const each : to) std::fill_n(each, channels_, 0.0);
    // Of several vectors, rows are better off by themselves, with a channel's coefficients in registers, if they are few.
    bool const several_vectors = sizeof(T) >= 4 && spatial_ >= 6 * lanes;
    if (end - begin < (several_vectors ? 12 : std::int64_t{most_rows})) {
      for (std::int64_t c = 0; c < channels_; ++c) {
        auto const sums = sum_of_rows<Masked>(c, begin, end);
#pragma GCC unroll 8
        for (std::size_t j = 0; j < sum_count; ++j) to[j][c] = sums[j];
      }
      return;
    }
    bool const dense = std::ranges::all_of(in_, [&](auto const& x) { return x.stride_c == spatial_; });
    std::int64_t const together = dense ? channels_of_table<T>(spatial_) : 1;
    for (std::int64_t c = 0; c < channels_; c += together)
      add_columns<Masked>(c, std::min(together, channels_ - c), begin, end, from_channel(to, c));
  }

  [[nodiscard, gnu::always_inline]] pointers at(std::int64_t row, std::int64_t c) const {
    pointers from;
    for (std::size_t j = 0; j < inputs; ++j) from[j] = &in_[j](row, c, 0);
    return from;
  }

  /// What the elements from `i` on add, 0 of those that do not count by the bytes at `mask`; fetches those `Ahead` bytes further.
  template <bool Masked, std::int64_t Ahead>
  [[nodiscard, gnu::always_inline]] terms_type terms(pointers const& from, std::int64_t i, vectors const& k,
                                                     [[maybe_unused]] std::uint8_t const* mask) const {
    std::array<vector, inputs> v;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) {
      if constexpr (Ahead != 0) prefetch<lanes, 2>(from[j], i + Ahead / static_cast<std::int64_t>(sizeof(T)));
      v[j] = load<lanes>(from[j] + i);
    }
    terms_type of = op_.apply(v, k);
    if constexpr (Masked) {
      auto const counted = counted_lanes<A, lanes>(mask);
#pragma GCC unroll 8
      for (auto& each : of) each = where(counted, each, vector{});
    }
    return of;
  }

  /// All but the last `count` lanes are nothing.
  [[nodiscard, gnu::always_inline]] static terms_type last_of(terms_type of, int count) {
#pragma GCC unroll 8
    for (auto& each : of) each = keep_last<A, lanes>(each, count);
    return of;
  }

  /// The sums of the rows of one channel, which are added one after the other, as many as make up a long piece in `A`.
  template <bool Masked>
  [[nodiscard, gnu::always_inline]] std::array<double, sum_count> sum_of_rows(std::int64_t c, std::int64_t begin,
                                                                              std::int64_t end) const {
    auto const values = op_(c);
    vectors k;
    for (std::size_t j = 0; j < coefficients; ++j) k[j] = splat<A, lanes>(values[j]);
    std::int64_t const at_once = ceil_div(groups::long_piece, spatial_);
    std::array<doubles, sum_count> all{};
    for (std::int64_t row = begin; row < end; row += at_once) {
      auto const sums = sum_rows<Masked>(c, row, std::min(end, row + at_once), k);
#pragma GCC unroll 8
      for (std::size_t j = 0; j < sum_count; ++j) all[j] += fold_in_double<A>(sums[j]);
    }
    std::array<double, sum_count> sums;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < sum_count; ++j) sums[j] = sum_lanes<double, native_lanes<double>>(all[j]);
    return sums;
  }

  template <bool Masked>
  [[nodiscard, gnu::always_inline]] sums_type sum_rows(std::int64_t c, std::int64_t begin, std::int64_t end,
                                                       vectors const& k) const {
    constexpr int L = lanes;
    sums_type s0{}, s1{}, s2{}, s3{};
    auto const rest = static_cast<int>(spatial_ % L);
    for (std::int64_t row = begin; row < end; ++row) {
      pointers const from = at(row, c);
      std::uint8_t const* const mask = Masked ? mask_->row(row) : nullptr;
      auto const next = [&](std::int64_t i) __attribute__((always_inline)) {
        return terms<Masked, lookahead_bytes>(from, i, k, Masked ? mask + i : nullptr);
      };
      std::int64_t i = 0;
      for (; i + 4 * L <= spatial_; i += 4 * L) {
        add_products(s0, next(i));
        add_products(s1, next(i + L));
        add_products(s2, next(i + 2 * L));
        add_products(s3, next(i + 3 * L));
      }
      if (i + L <= spatial_) add_products(s0, next(i));
      if (i + 2 * L <= spatial_) add_products(s1, next(i + L));
      if (i + 3 * L <= spatial_) add_products(s2, next(i + 2 * L));
      std::int64_t const end_of = spatial_ - L;
      if (rest != 0)
        add_products(s3, last_of(terms<Masked, 0>(from, end_of, k, Masked ? mask + end_of : nullptr), rest));
    }
    // What is returned is none of these, which the compiler would keep in the caller's memory then.
    return [&]<std::size_t... J>(std::index_sequence<J...>) { return sums_type{(s0[J] + s1[J]) + (s2[J] + s3[J])...}; }
    (std::make_index_sequence<sum_count>{});
  }

  /// Adds the rows of channels position by position. Where the rows of a sample follow each other without a gap, those of
  /// several channels are taken at once, so that their vectors are whole and they are read in the order of memory. Not inlined, which
  /// would take registers from `sum_of_rows`.
  template <bool Masked>
  [[gnu::noinline]] void add_columns(std::int64_t c, std::int64_t channels, std::int64_t begin, std::int64_t end,
                                     sums_of_channels<sum_count> const& to) const {
    constexpr auto room = static_cast<std::size_t>(chunk_channels<A> + lanes);
    alignas(cache_line) std::array<std::array<A, room>, coefficients> table;
    alignas(cache_line) std::array<std::array<A, room>, sum_count> sums;
    // Which lanes of the rows read side by side count.
    std::array<std::array<std::uint8_t, Masked ? room : 1>, Masked ? most_rows : 1> counted;
    for (std::int64_t i = 0; i < channels; ++i) {
      auto const values = op_(c + i);
      // The last vector goes on into the positions of the next channel, which come later.
      for (std::size_t j = 0; j < coefficients; ++j)
        for (std::int64_t s = 0; s < spatial_; s += lanes)
          store<lanes>(&table[j][static_cast<std::size_t>(i * spatial_ + s)], splat<A, lanes>(values[j]));
    }
    std::int64_t const width = channels * spatial_;
    auto const add_rows = [&]<std::size_t Rows>(std::int64_t row, bool begun, std::integral_constant<std::size_t, Rows>)
        __attribute__((always_inline)) {
      std::array<pointers, Rows> from;
      for (std::size_t r = 0; r < Rows; ++r) {
        std::int64_t const sample = row + static_cast<std::int64_t>(r);
        from[r] = at(sample, c);
        if constexpr (Masked) {
          std::copy_n(mask_->row(sample), spatial_, counted[r].data());
          repeat(counted[r].data(), spatial_, width);
        }
      }
      auto const add_lanes = [&](std::int64_t lane, int fresh) __attribute__((always_inline)) {
        auto const place = [&](auto& of) __attribute__((always_inline)) { return &of[static_cast<std::size_t>(lane)]; };
        vectors k;
#pragma GCC unroll 8
        for (std::size_t j = 0; j < coefficients; ++j) k[j] = load<lanes>(place(table[j]));
        sums_type sum{};
#pragma GCC unroll 8
        for (std::size_t r = 0; r < Rows; ++r)
          add_products(sum, terms<Masked, 0>(from[r], lane, k, Masked ? counted[r].data() + lane : nullptr));
#pragma GCC unroll 8
        for (std::size_t j = 0; j < sum_count; ++j) {
          if (begun) sum[j] = load<lanes>(place(sums[j])) + keep_last<A, lanes>(sum[j], fresh);
          store<lanes>(place(sums[j]), sum[j]);
        }
      };
      std::int64_t lane = 0;
      for (; lane + lanes <= width; lane += lanes) add_lanes(lane, lanes);
      if (width % lanes != 0) add_lanes(width - lanes, static_cast<int>(width % lanes));
    };
    // So many are added up in `A`, and then so many vectors of them: `longest_sum` in all.
    std::int64_t const stretch = longest_sum - std::min(most_vectors, spatial_ / lanes);
    for (std::int64_t row = begin; row < end;) {
      std::int64_t const last = std::min(end, row + stretch);
      bool begun = false;
      auto const add_some = [&]<std::size_t Rows>(std::integral_constant<std::size_t, Rows> rows) {
        for (constexpr std::int64_t n = Rows; row + n <= last; row += n, begun = true) add_rows(row, begun, rows);
      };
      add_some(std::integral_constant<std::size_t, most_rows>{});
      if constexpr (most_rows > 2) add_some(std::integral_constant<std::size_t, most_rows / 2>{});
      add_some(std::integral_constant<std::size_t, 1>{});
      for (std::size_t j = 0; j < sum_count; ++j)
        for (std::int64_t i = 0; i < channels; ++i)
          to[j][i] += sum_positions(&sums[j][static_cast<std::size_t>(i * spatial_)]);
    }
  }

  [[nodiscard, gnu::always_inline]] double sum_positions(A const* sums) const {
    doubles all{};
    for (std::int64_t i = 0; i < spatial_;) {
      vector some{};
      std::int64_t const end = std::min(spatial_, i + most_vectors * lanes);
      for (; i + lanes <= end; i += lanes) some += load<lanes>(sums + i);
      if (i < end) some += keep_last<A, lanes>(load<lanes>(sums + end - lanes), static_cast<int>(end - i));
      all += fold_in_double<A>(some);
      i = end;
    }
    return sum_lanes<double, native_lanes<double>>(all);
  }

  Op op_;
  std::array<tensor_view<T const>, inputs> in_;
  prepared_mask const* mask_;
  std::int64_t channels_, spatial_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
