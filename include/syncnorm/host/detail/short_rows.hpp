#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/mask.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/repeat.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/vector.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// Elements whose mean is the pivot of short rows.
inline constexpr std::int64_t short_row_pilot = 16;

/// Whether rows are taken by `short_row_sums`.
[[nodiscard]] constexpr bool are_short_rows(std::int64_t spatial) {
  return spatial >= shortest_row && spatial < groups::long_piece;
}

/// Σ a and Σ a·b per channel over short rows, those of some rows in `A`, and of these in double. `Op` has
///
///     static constexpr std::size_t inputs, coefficients;
///     std::array<A, coefficients> operator()(channel)        the coefficients
///     std::array<V, 2> apply(std::array<V, inputs>, std::array<V, coefficients>)        a and b
template <class T, class Op>
class short_row_sums {
  using A = accumulate_t<T>;
  static constexpr int lanes = native_lanes<A>;
  static constexpr std::size_t inputs = Op::inputs, coefficients = Op::coefficients;
  using vector = vector_t<A, lanes>;
  using doubles = vector_t<double, native_lanes<double>>;
  using pair = std::array<vector, 2>;
  using vectors = std::array<vector, coefficients>;
  using pointers = std::array<T const*, inputs>;
  static constexpr std::int64_t most_vectors = longest_sum / 2; ///< of a row, which are added in `A`

public:
  /// `mask`: of the positions that count; null: all.
  short_row_sums(Op const& op, std::array<tensor_view<T const>, inputs> const& in, prepared_mask const* mask)
      : op_{op}, in_{in}, mask_{mask}, channels_{in[0].channels}, spatial_{in[0].spatial} {}

  /// The sums of each channel over rows [begin, end).
  void operator()(std::int64_t begin, std::int64_t end, double* first, double* second) const {
    mask_ == nullptr ? sum<false>(begin, end, first, second) : sum<true>(begin, end, first, second);
  }

private:
  template <bool Masked>
  void sum(std::int64_t begin, std::int64_t end, double* first, double* second) const {
    std::fill_n(first, channels_, 0.0);
    std::fill_n(second, channels_, 0.0);
    constexpr std::int64_t fewest_for_columns = sizeof(T) == 2 ? 8 : 12;
    if (end - begin < fewest_for_columns) {
      for (std::int64_t c = 0; c < channels_; ++c) add_rows<Masked>(c, begin, end, first[c], second[c]);
      return;
    }
    bool const dense = std::ranges::all_of(in_, [&](auto const& x) { return x.stride_c == spatial_; });
    std::int64_t const together = dense ? channels_of_table<T>(spatial_) : 1;
    for (std::int64_t c = 0; c < channels_; c += together)
      add_columns<Masked>(c, std::min(together, channels_ - c), begin, end, first + c, second + c);
  }

  [[nodiscard, gnu::always_inline]] pointers at(std::int64_t row, std::int64_t c) const {
    pointers from;
    for (std::size_t j = 0; j < inputs; ++j) from[j] = &in_[j](row, c, 0);
    return from;
  }

  /// a and b of the elements from `i` on, 0 of those that do not count by the bytes at `mask`; fetches those `Ahead` bytes further.
  template <bool Masked, std::int64_t Ahead>
  [[nodiscard, gnu::always_inline]] pair terms(pointers const& from, std::int64_t i, vectors const& k,
                                               [[maybe_unused]] std::uint8_t const* mask) const {
    std::array<vector, inputs> v;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) {
      if constexpr (Ahead != 0) prefetch<lanes, 2>(from[j], i + Ahead / static_cast<std::int64_t>(sizeof(T)));
      v[j] = load<lanes>(from[j] + i);
    }
    pair const of = op_.apply(v, k);
    if constexpr (Masked) {
      auto const counted = counted_lanes<A, lanes>(mask);
      return {where(counted, of[0], vector{}), where(counted, of[1], vector{})};
    } else {
      return of;
    }
  }

  [[gnu::always_inline]] static void add_terms(pair& to, pair const& more) {
    to[0] += more[0];
    to[1] = multiply_add(more[0], more[1], to[1]);
  }

  /// All but the last `count` lanes are nothing.
  [[nodiscard, gnu::always_inline]] static pair last_of(pair const& v, int count) {
    return {keep_last<A, lanes>(v[0], count), keep_last<A, lanes>(v[1], count)};
  }

  /// Adds the rows of one channel one after the other, as many as make up a long piece in `A`.
  template <bool Masked>
  void add_rows(std::int64_t c, std::int64_t begin, std::int64_t end, double& first, double& second) const {
    auto const values = op_(c);
    vectors k;
    for (std::size_t j = 0; j < coefficients; ++j) k[j] = splat<A, lanes>(values[j]);
    std::int64_t const at_once = ceil_div(groups::long_piece, spatial_);
    doubles a{}, b{};
    for (std::int64_t row = begin; row < end; row += at_once) {
      auto const sums = sum_rows<Masked>(c, row, std::min(end, row + at_once), k);
      a += fold_in_double<A>(sums[0]);
      b += fold_in_double<A>(sums[1]);
    }
    first += sum_lanes<double, native_lanes<double>>(a);
    second += sum_lanes<double, native_lanes<double>>(b);
  }

  template <bool Masked>
  [[nodiscard]] pair sum_rows(std::int64_t c, std::int64_t begin, std::int64_t end, vectors const& k) const {
    constexpr int L = lanes;
    pair s0{}, s1{}, s2{}, s3{};
    auto const rest = static_cast<int>(spatial_ % L);
    for (std::int64_t row = begin; row < end; ++row) {
      pointers const from = at(row, c);
      std::uint8_t const* const mask = Masked ? mask_->row(row) : nullptr;
      auto const next = [&](std::int64_t i) __attribute__((always_inline)) {
        return terms<Masked, lookahead_bytes>(from, i, k, Masked ? mask + i : nullptr);
      };
      std::int64_t i = 0;
      for (; i + 4 * L <= spatial_; i += 4 * L) {
        add_terms(s0, next(i));
        add_terms(s1, next(i + L));
        add_terms(s2, next(i + 2 * L));
        add_terms(s3, next(i + 3 * L));
      }
      if (i + L <= spatial_) add_terms(s0, next(i));
      if (i + 2 * L <= spatial_) add_terms(s1, next(i + L));
      if (i + 3 * L <= spatial_) add_terms(s2, next(i + 2 * L));
      std::int64_t const end_of = spatial_ - L;
      if (rest != 0) add_terms(s3, last_of(terms<Masked, 0>(from, end_of, k, Masked ? mask + end_of : nullptr), rest));
    }
    // What is returned is none of these, which the compiler would keep in the caller's memory then.
    return {(s0[0] + s1[0]) + (s2[0] + s3[0]), (s0[1] + s1[1]) + (s2[1] + s3[1])};
  }

  /// Adds the rows of channels position by position. Where the rows of a sample follow each other without a gap, those of
  /// several channels are taken at once, so that their vectors are whole and they are read in the order of memory.
  template <bool Masked>
  void add_columns(std::int64_t c, std::int64_t channels, std::int64_t begin, std::int64_t end, double* first,
                   double* second) const {
    constexpr auto room = static_cast<std::size_t>(chunk_channels<A> + lanes);
    alignas(cache_line) std::array<std::array<A, room>, coefficients> table;
    alignas(cache_line) std::array<std::array<A, room>, 2> sums;
    // Rows of so many inputs that are a power of two apart share few sets of the first-level cache.
    constexpr std::int64_t most_rows = 16 / static_cast<std::int64_t>(inputs);
    // Which lanes of the rows taken at once count.
    std::array<std::array<std::uint8_t, Masked ? room : 1>, Masked ? static_cast<std::size_t>(most_rows) : 1> counted;
    for (std::int64_t i = 0; i < channels; ++i) {
      auto const values = op_(c + i);
      // The last vector goes on into the positions of the next channel, which come later.
      for (std::size_t j = 0; j < coefficients; ++j)
        for (std::int64_t s = 0; s < spatial_; s += lanes)
          store<lanes>(&table[j][static_cast<std::size_t>(i * spatial_ + s)], splat<A, lanes>(values[j]));
    }
    std::int64_t const width = channels * spatial_, at_once = ceil_div(end - begin, ceil_div(end - begin, most_rows));
    // So many are added up in `A`, and then so many vectors of them: `longest_sum` in all.
    std::int64_t const vectors_of_row = std::min(most_vectors, spatial_ / lanes),
                       stretch = (longest_sum - vectors_of_row) / at_once * at_once;
    for (std::int64_t row = begin; row < end; row += at_once) {
      std::int64_t const last = std::min(end, row + at_once);
      if constexpr (Masked)
        for (std::int64_t r = row; r < last; ++r) {
          std::uint8_t* const of_row = counted[static_cast<std::size_t>(r - row)].data();
          std::copy_n(mask_->row(r), spatial_, of_row);
          repeat(of_row, spatial_, width);
        }
      bool const begun = (row - begin) % stretch != 0, done = last == end || (last - begin) % stretch == 0;
      auto const sum_columns = [&]<std::size_t Columns>(std::int64_t first_lane,
                                                        std::integral_constant<std::size_t, Columns>, int fresh = lanes)
          __attribute__((always_inline)) {
        std::array<vectors, Columns> k;
        std::array<pair, Columns> sum{};
        auto const lane = [&](std::size_t v) { return first_lane + static_cast<std::int64_t>(v) * lanes; };
        for (std::size_t v = 0; v < Columns; ++v)
          for (std::size_t j = 0; j < coefficients; ++j)
            k[v][j] = load<lanes>(&table[j][static_cast<std::size_t>(lane(v))]);
        pointers from = at(row, c);
        std::uint8_t const* mask = counted[0].data();
        for (std::int64_t r = row; r < last; ++r, mask += counted[0].size()) {
#pragma GCC unroll 8
          for (std::size_t j = 0; j < inputs; ++j)
            prefetch<static_cast<std::int64_t>(Columns) * lanes, 2>(
                from[j], first_lane + 256 / static_cast<std::int64_t>(sizeof(T)));
#pragma GCC unroll 8
          for (std::size_t v = 0; v < Columns; ++v)
            add_terms(sum[v], terms<Masked, 0>(from, lane(v), k[v], Masked ? mask + lane(v) : nullptr));
#pragma GCC unroll 8
          for (std::size_t j = 0; j < inputs; ++j) from[j] += in_[j].stride_n;
        }
        for (std::size_t v = 0; v < Columns; ++v)
          for (std::size_t j = 0; j < 2; ++j) {
            A* const to = &sums[j][static_cast<std::size_t>(lane(v))];
            store<lanes>(to, begun ? load<lanes>(to) + keep_last<A, lanes>(sum[v][j], fresh) : sum[v][j]);
          }
      };
      constexpr std::integral_constant<std::size_t, 1> one{};
      constexpr std::integral_constant<std::size_t, line_elements<T> / lanes >= 2 ? 2 : 1> some{};
      constexpr std::int64_t some_lanes = static_cast<std::int64_t>(some.value) * lanes;
      std::int64_t lane = 0;
      // A line of the cache may be gone before it is read again.
      for (; lane + some_lanes <= width; lane += some_lanes) sum_columns(lane, some);
      for (; lane + lanes <= width; lane += lanes) sum_columns(lane, one);
      if (width % lanes != 0) sum_columns(width - lanes, one, static_cast<int>(width % lanes));
      if (!done) continue;
      for (std::int64_t i = 0; i < channels; ++i) {
        first[i] += sum_positions(&sums[0][static_cast<std::size_t>(i * spatial_)]);
        second[i] += sum_positions(&sums[1][static_cast<std::size_t>(i * spatial_)]);
      }
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
