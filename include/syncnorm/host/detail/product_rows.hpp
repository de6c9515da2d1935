#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/counted_lanes.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>
#include <syncnorm/host/detail/product_terms.hpp>
#include <syncnorm/host/detail/read_ahead.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/strided_rows.hpp>
#include <syncnorm/host/detail/sums_of_channels.hpp>

namespace syncnorm::host::detail::inline SYNCNORM_VECTORS {

/// The sums of products of the elements of one piece of a channel, of elements of type `E`; `Terms` as in product_terms.hpp.
template <class E, class Terms, class A = accumulate_t<E>>
struct product_piece {
  static constexpr std::size_t inputs = Terms::inputs, coefficients = Terms::coefficients, values = Terms::values,
                               sum_count = products_of<values>;
  static constexpr int lanes = native_lanes<A>;
  template <class V>
  using sums = std::array<V, sum_count>;

  std::array<E const*, inputs> from;
  std::uint8_t const* mask; ///< null: all count
  std::int64_t length;
  /// Elements to those that are fetched meanwhile, for a level of cache; 0: for none.
  std::array<std::int64_t, inputs> ahead;
  int fetch;

  [[nodiscard]] sums<A> sum(Terms const& terms, std::array<A, coefficients> const& k) const {
    if (length < lanes) return sum_elements(terms, k);
    auto const nothing = [](std::int64_t) {};
    return mask == nullptr ? sum_vectors<false>(terms, k, nothing) : sum_vectors<true>(terms, k, nothing);
  }

  /// Of at least a vector's elements, all of which count; between(i) after each four vectors.
  template <class Between>
  [[nodiscard, gnu::always_inline]] sums<A> sum_interleaved(Terms const& terms, std::array<A, coefficients> const& k,
                                                            Between const& between) const {
    return sum_vectors<false>(terms, k, between);
  }

  /// The same of two pieces of the same length, which are read side by side.
  template <class Between>
  [[nodiscard, gnu::always_inline]] static std::array<sums<A>, 2>
  sum_two_interleaved(Terms const& given, std::array<A, coefficients> const& of_channel, product_piece const& a,
                      Between const& between_a, product_piece const& b, Between const& between_b) {
    // Copies, which stay in registers.
    Terms const terms = given;
    product_piece const first = a, second = b;
    vectors const k = splat_all(of_channel);
    partial_sums of_first{}, of_second{};
    std::int64_t i = 0;
    for (std::int64_t const n = a.length; i + 4 * lanes <= n; i += 4 * lanes) {
      first.template add_four<false>(of_first, terms, k, i);
      second.template add_four<false>(of_second, terms, k, i);
      between_a(i);
      between_b(i);
    }
    return {first.template finish<false>(of_first, terms, k, i), second.template finish<false>(of_second, terms, k, i)};
  }

private:
  using vector = vector_t<A, lanes>;
  using terms_type = std::array<vector, values>;
  using vectors = std::array<vector, coefficients>;
  /// Vectors that are summed apart, as many as the latency of their sums hides.
  static constexpr std::size_t apart = sum_count == 2 ? 4 : 2;
  using partial_sums = std::array<sums<vector>, apart>;

  [[nodiscard]] sums<A> sum_elements(Terms const& terms, std::array<A, coefficients> const& k) const {
    sums<A> all{};
    for (std::int64_t s = 0; s < length; ++s) {
      if (mask != nullptr && mask[s] == 0) continue;
      std::array<A, inputs> in;
      for (std::size_t j = 0; j < inputs; ++j) in[j] = load<1>(from[j] + s);
      add_products(all, terms.apply(in, k));
    }
    return all;
  }

  /// What the lanes of a vector add.
  template <class Lanes>
  [[nodiscard, gnu::always_inline]] static terms_type counted(terms_type of, Lanes const& lanes_that_count) {
#pragma GCC unroll 8
    for (auto& each : of) each = where(lanes_that_count, each, vector{});
    return of;
  }

  template <bool Masked>
  [[nodiscard, gnu::always_inline]] terms_type one(Terms const& terms, vectors const& k, std::int64_t i) const {
    std::array<vector, inputs> in;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) in[j] = load<lanes>(from[j] + i);
    terms_type const made = terms.apply(in, k);
    if constexpr (Masked)
      return counted(made, counted_lanes<A, lanes>(mask + i));
    else
      return made;
  }

  /// Of so many vectors, in whatever order is the quickest.
  template <bool Masked>
  [[gnu::always_inline]] void add_vectors(partial_sums& to, Terms const& terms, vectors const& k,
                                          std::int64_t i) const {
    std::array<std::array<vector, inputs>, apart> in;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j)
#pragma GCC unroll 8
      for (std::size_t v = 0; v < apart; v += 2) {
        auto const both = load_pair<lanes>(from[j] + i + static_cast<std::int64_t>(v) * lanes);
        in[v][j] = both[0];
        in[v + 1][j] = both[1];
      }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < apart; v += 2) {
      terms_type made0 = terms.apply(in[v], k), made1 = terms.apply(in[v + 1], k);
      if constexpr (Masked) {
        auto const of = counted_pair<E, lanes>(mask + i + static_cast<std::int64_t>(v) * lanes);
        made0 = counted(made0, of[0]);
        made1 = counted(made1, of[1]);
      }
      add_products(to[v], made0);
      add_products(to[v + 1], made1);
    }
  }

  [[gnu::always_inline]] void ask(std::int64_t i) const {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < inputs; ++j) prefetch_for<4 * lanes>(fetch, from[j], i + ahead[j]);
  }

  template <bool Masked, class Between>
  [[nodiscard, gnu::always_inline]] sums<A>
  sum_vectors(Terms const& given, std::array<A, coefficients> const& of_channel, Between const& between) const {
    // Copies, which stay in registers.
    Terms const terms = given;
    product_piece const piece = *this;
    vectors const k = splat_all(of_channel);
    partial_sums of{};
    std::int64_t const n = length;
    std::int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
      piece.ask(i);
      piece.template add_four<Masked>(of, terms, k, i);
      between(i);
    }
    if (i < n) piece.ask(i);
    return piece.template finish<Masked>(of, terms, k, i);
  }

  [[nodiscard, gnu::always_inline]] static vectors splat_all(std::array<A, coefficients> const& of_channel) {
    vectors k;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < coefficients; ++j) k[j] = splat<A, lanes>(of_channel[j]);
    return k;
  }

  template <bool Masked>
  [[gnu::always_inline]] void add_four(partial_sums& to, Terms const& terms, vectors const& k, std::int64_t i) const {
#pragma GCC unroll 8
    for (std::size_t v = 0; v < 4; v += apart)
      add_vectors<Masked>(to, terms, k, i + static_cast<std::int64_t>(v) * lanes);
  }

  /// Adds what is left from element `i` on, less than four vectors, and adds up all.
  template <bool Masked>
  [[nodiscard, gnu::always_inline]] sums<A> finish(partial_sums& of, Terms const& terms, vectors const& k,
                                                   std::int64_t i) const {
    std::int64_t const n = length;
    for (; i + lanes <= n; i += lanes) add_products(of[0], one<Masked>(terms, k, i));
    if (i < n) {
      auto last = one<Masked>(terms, k, n - lanes);
#pragma GCC unroll 8
      for (auto& each : last) each = keep_last<A, lanes>(each, static_cast<int>(n - i));
      add_products(of[1], last);
    }
    sums<A> all;
#pragma GCC unroll 8
    for (std::size_t j = 0; j < sum_count; ++j) {
      vector some = of[0][j] + of[1][j];
      if constexpr (apart == 4) some += of[2][j] + of[3][j];
      all[j] = sum_lanes<A, lanes>(some);
    }
    return all;
  }
};

/// The sums of products of a few channels, row piece by row piece; the sums of a group of pieces at a time.
template <class T, class Terms>
class product_rows {
  using A = accumulate_t<T>;
  static constexpr std::size_t inputs = Terms::inputs;

public:
  using views = std::array<tensor_view<T const>, inputs>;
  static constexpr std::int64_t channels_at_once = 64;
  /// Whether `sum_two_interleaved` is worth while, as registers suffice for two.
  static constexpr bool reads_side_by_side = Terms::coefficients == 1 && simd_bytes >= 32;
  static constexpr std::size_t sum_count = products_of<Terms::values>;

  using copies_type = copied_rows<T, inputs>;

  /// `in`: up to channels_at_once channels, of which `terms` are; `mask`: null: all count; `copies`: null where rows are contiguous, else
  /// those of this `in`.
  product_rows(Terms const& terms, views const& in, prepared_mask const* mask, copies_type* copies = nullptr)
      : terms_{terms}, in_{in}, mask_{mask}, copies_{copies} {
    for (std::int64_t c = 0; c < in[0].channels; ++c) coefficients_[static_cast<std::size_t>(c)] = terms(c);
  }

  /// Adds a piece of channel `c`, and fetches what is read later; `begun`: not the first of its group.
  void add(std::int64_t c, groups::piece const& now, read_ahead const& later, bool begun) {
    auto const i = static_cast<std::size_t>(c);
    if (!begun) sums_[i] = {};
    if (mask_ != nullptr && mask_->at(now).counted == 0) return;
    add_to(sums_[i], copies_ == nullptr ? piece_of(c, now, later).sum(terms_, coefficients_[i]) : sum_copies(c, now));
  }

  /// Where rows are contiguous, and all positions count: all of group `g` of channel `c`, in pieces of a vector's elements at least;
  /// `between` is an `elementwise_run::interleaved`, of the same pieces of another channel.
  template <class Between>
  [[gnu::noinline]] void add_interleaved(std::int64_t c, groups const& parts, std::int64_t g, Between const& between) {
    auto const i = static_cast<std::size_t>(c);
    views const in = in_; // copies, which stay in registers
    Terms const terms = terms_;
    auto const k = coefficients_[i];
    std::array<double, sum_count> all{};
    for_each_piece_of_channel<T>(
        parts, g, c,
        in[0].channels, [&](groups::piece const& now, later_piece const& later) __attribute__((always_inline)) {
          piece_type piece{{}, nullptr, now.length, {}, 1};
#pragma GCC unroll 8
          for (std::size_t j = 0; j < inputs; ++j) {
            piece.from[j] = &in[j](now.sample, c, now.begin);
            piece.ahead[j] = later.distance(in[j], now);
          }
          Between here = between; // a copy, which stays in registers
          here.move_to(now.sample, now.begin, now.length);
          add_to(all, piece.sum_interleaved(terms, k, here));
          here.finish(now.length);
        });
    sums_[i] = all;
  }

  /// The same of group `g`, which `matches_next`, to `first`, and of the one after it to `second`: they are read side by side.
  template <class Between>
  [[gnu::noinline]] void sum_two_interleaved(std::int64_t c, groups const& parts, std::int64_t g,
                                             Between const& between, sums_of_channels<sum_count> const& first,
                                             sums_of_channels<sum_count> const& second) const {
    views const in = in_; // copies, which stay in registers
    Terms const terms = terms_;
    auto const k = coefficients_[static_cast<std::size_t>(c)];
    std::array<double, sum_count> of_first{}, of_second{};
    auto const piece_at = [&](groups::piece const& at) __attribute__((always_inline)) {
      piece_type piece{{}, nullptr, at.length, {}, 0};
#pragma GCC unroll 8
      for (std::size_t j = 0; j < inputs; ++j) piece.from[j] = &in[j](at.sample, c, at.begin);
      return piece;
    };
    parts.for_each_two_pieces(
        g, [&](groups::piece const& now, groups::piece const& then) __attribute__((always_inline)) {
          Between here = between, there = between; // copies, which stay in registers
          here.move_to(now.sample, now.begin, now.length);
          there.move_to(then.sample, then.begin, then.length);
          auto const [a, b] = piece_type::sum_two_interleaved(terms, k, piece_at(now), here, piece_at(then), there);
          add_to(of_first, a);
          add_to(of_second, b);
          here.finish(now.length);
          there.finish(now.length);
        });
    put(of_first, c, first);
    put(of_second, c, second);
  }

  /// The sums of all channels over the group that was added.
  void finish(std::int64_t, sums_of_channels<sum_count> const& to) const {
    for (std::int64_t c = 0; c < in_[0].channels; ++c) put(sums_[static_cast<std::size_t>(c)], c, to);
  }

  static void merge(std::int64_t, std::int64_t, sums_of_channels<sum_count> const& to,
                    sums_of_channels<sum_count> const& from, std::int64_t length) {
    for (std::size_t j = 0; j < sum_count; ++j)
      for (std::int64_t c = 0; c < length; ++c) to[j][c] += from[j][c];
  }

private:
  using piece_type = product_piece<T, Terms>;
  using sums = typename piece_type::template sums<A>;

  void put(std::array<double, sum_count> const& of, std::int64_t c, sums_of_channels<sum_count> const& to) const {
    for (std::size_t j = 0; j < sum_count; ++j) to[j][c] = of[j];
    take_off(to, c, terms_.excess(c));
  }

  [[nodiscard]] std::uint8_t const* mask_of(groups::piece const& now) const {
    return mask_ == nullptr ? nullptr : mask_->row(now.sample) + now.begin;
  }

  [[gnu::always_inline]] static void add_to(std::array<double, sum_count>& to, sums const& of_piece) {
    for (std::size_t j = 0; j < sum_count; ++j) to[j] += static_cast<double>(of_piece[j]);
  }

  [[nodiscard, gnu::always_inline]] piece_type piece_of(std::int64_t c, groups::piece const& now,
                                                        read_ahead const& later) const {
    piece_type piece{{}, mask_of(now), now.length, {}, later.level};
    for (std::size_t j = 0; j < inputs; ++j) {
      piece.from[j] = &in_[j](now.sample, c, now.begin);
      piece.ahead[j] = lookahead(in_[j], c, now, later);
    }
    return piece;
  }

  [[nodiscard, gnu::noinline]] sums sum_copies(std::int64_t c, groups::piece const& now) const {
    product_piece<A, Terms> const piece{(*copies_)(in_, c, now), mask_of(now), now.length, {}, 0};
    return piece.sum(terms_, coefficients_[static_cast<std::size_t>(c)]);
  }

  Terms terms_;
  views in_;
  prepared_mask const* mask_;
  copies_type* copies_;
  std::array<std::array<A, Terms::coefficients>, channels_at_once> coefficients_;
  std::array<std::array<double, sum_count>, channels_at_once> sums_;
};

} // namespace syncnorm::host::detail::inline SYNCNORM_VECTORS
