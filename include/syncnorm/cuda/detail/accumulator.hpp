#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

namespace syncnorm::cuda::detail {

/// Whether elements that do not count are part of sums, too.
template <class Op>
inline constexpr bool sums_all = requires {
  requires Op::sums_all;
};

/// Where packs that are summed come from: the tensors of the op.
struct from_tensors {
  template <axis Axis, known K, class Hw, class Op, class Items, class T>
  SYNCNORM_DEVICE void load(Hw const& hw, Op const& op, Items const&, spot const& at, pack<T> (&in)[Op::inputs]) const {
    op.template load<Axis, K>(hw, at, in);
  }
};

/// Packs of a thread that are in flight at a time, and which of their elements count.
template <class Op, int Unroll>
struct batch {
  using T = typename Op::element_type;
  static constexpr int unroll = Unroll;
  static constexpr unsigned full = (1u << pack_length<T>)-1;

  pack<T> in[Unroll][Op::inputs];
  unsigned bits[Unroll];    ///< of the elements that count
  unsigned present[Unroll]; ///< of those that exist, where `sums_all<Op>`

  template <axis Axis, known K, class Hw, class From, class Items>
  SYNCNORM_DEVICE void load(Hw const& hw, Op const& op, From const& from, Items& items) {
    [[maybe_unused]] mask_word_t<Axis, T> words[Unroll]{};
    constexpr bool unmasked = Items::unmasked || (Axis == axis::channels && K == known::whole);
    if constexpr (!unmasked)
      if (op.mask.data != nullptr) { // so that no load waits for a mask
        auto at = items;
        SYNCNORM_UNROLL
        for (int u = 0; u < Unroll; ++u) {
          words[u] = load_mask<Axis, T, K>(hw, op.mask, at.template here<K>());
          at.template advance<K>();
        }
      }
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u) {
      spot const at = items.template here<K>();
      bits[u] = existing<T, K>(at);
      if constexpr (sums_all<Op>) present[u] = bits[u];
      from.template load<Axis, K>(hw, op, items, at, in[u]);
      items.template advance<K>();
    }
    if constexpr (!unmasked)
      if (op.mask.data != nullptr) {
        SYNCNORM_UNROLL
        for (int u = 0; u < Unroll; ++u) bits[u] = counted<Axis, T>(words[u], bits[u]);
      }
  }
  [[nodiscard]] SYNCNORM_DEVICE bool all_full() const {
    unsigned all = full;
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u) all &= bits[u];
    return all == full;
  }
};

/// Adds element e of pack u.
template <bool Full, class Op, int Unroll>
SYNCNORM_DEVICE void add_element(Op const& op, typename Op::fine& to, typename Op::constants const& k,
                                 batch<Op, Unroll> const& some, int u, int e) {
  typename Op::element_type in[Op::inputs];
  SYNCNORM_UNROLL
  for (int i = 0; i < Op::inputs; ++i) in[i] = some.in[u][i][e];
  bool const counts = Full || (some.bits[u] >> e & 1u) != 0;
  if constexpr (sums_all<Op>)
    op.add(to, k, in, counts, Full || (some.present[u] >> e & 1u) != 0);
  else
    op.add(to, k, in, counts);
}

/// Takes the next items of a thread as a batch: f(batch) after it has been loaded. Batches of one size share their f.
template <axis Axis, class Op, class Items, class Hw, class From, class F>
SYNCNORM_DEVICE void take_batch(Hw const& hw, Op const& op, From const& from, Items& items, F const& f) {
  constexpr int unroll = Op::unroll[static_cast<int>(Axis)];
  known const next = items.next(unroll, Op::unroll_aligned);
  if (unroll > 1 && next == known::nothing) {
    batch<Op, 1> one;
    one.template load<Axis, known::nothing>(hw, op, from, items);
    return f(one);
  }
  if (Op::unroll_aligned < unroll && next == known::aligned) {
    batch<Op, Op::unroll_aligned> some;
    some.template load<Axis, known::aligned>(hw, op, from, items);
    return f(some);
  }
  batch<Op, unroll> some;
  if (next == known::whole)
    some.template load<Axis, known::whole>(hw, op, from, items);
  else if (Op::unroll_aligned == unroll && next == known::aligned)
    some.template load<Axis, known::aligned>(hw, op, from, items);
  else if constexpr (unroll == 1)
    some.template load<Axis, known::nothing>(hw, op, from, items);
  f(some);
}

/// Adds all items of a thread to `sums`.
template <axis Axis, class Op, class Sums, class Items, class Hw, class From>
SYNCNORM_DEVICE void add_items(Hw const& hw, Op const& op, From const& from, Items& items, Sums& sums) {
  while (items.inside()) take_batch<Axis>(hw, op, from, items, [&](auto const& some) { sums.add(hw, some); });
}

/// 1/n, or 0 of nothing.
template <class A>
[[nodiscard]] SYNCNORM_DEVICE A reciprocal(std::int64_t n) {
  return n == 0 ? A{0} : A{1} / static_cast<A>(n);
}

/// Whether so few elements of a thread have been summed that the pivot, one of them or their mean, may be far from all others, whose
/// squares would then be summed in float: so it moves after the next batch.
template <class Op>
[[nodiscard]] SYNCNORM_DEVICE bool moves_pivot_soon(std::int64_t count) {
  if constexpr (Op::pivoted && sizeof(typename Op::A) == sizeof(float))
    return count < 8;
  else
    return false;
}

/// What a thread has summed of one channel, of packs along positions.
template <class Op>
class channel_accumulator {
public:
  using T = typename Op::element_type;
  static constexpr int length = pack_length<T>;

  template <class Hw>
  SYNCNORM_DEVICE channel_accumulator(Hw const& hw, Op const& op, std::int64_t channel)
      : op_{op}, constants_{op.constants_of(hw, channel)} {}

  template <int Unroll, class Hw>
  SYNCNORM_DEVICE void add(Hw const& hw, batch<Op, Unroll> const& some) {
    if constexpr (Op::pivoted)
      if (count_ == 0) find_pivot(some);
    bool const soon = moves_pivot_soon<Op>(count_);
    if (some.all_full()) {
      add_all<true>(some);
      count_ += Unroll * length;
    } else {
      add_all<false>(some);
      SYNCNORM_UNROLL
      for (int u = 0; u < Unroll; ++u) count_ += hw.population(some.bits[u]);
    }
    packs_ += Unroll;
    if (packs_ * length >= 64 || soon) flush();
  }

  SYNCNORM_DEVICE void finish(double (&part)[Op::parts]) {
    Op::flush(fine_, sums_);
    op_.finish(fine_, constants_, sums_, count_, reciprocal<double>(count_), part);
  }

private:
  template <bool Full, int Unroll>
  SYNCNORM_DEVICE void add_all(batch<Op, Unroll> const& some) {
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u) {
      SYNCNORM_UNROLL
      for (int e = 0; e < length; ++e) add_element<Full>(op_, fine_, constants_, some, u, e);
    }
  }
  template <int Unroll>
  SYNCNORM_DEVICE void find_pivot(batch<Op, Unroll> const& some) {
    bool found = false;
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u) {
      SYNCNORM_UNROLL
      for (int e = 0; e < length; ++e)
        if (!found && (some.bits[u] >> e & 1u) != 0) {
          Op::set_pivot(fine_, some.in[u][0][e]);
          found = true;
        }
    }
  }
  SYNCNORM_DEVICE void flush() {
    Op::flush(fine_, sums_);
    if constexpr (Op::pivoted) Op::move_pivot(fine_, sums_, count_, reciprocal<typename Op::A>(count_));
    packs_ = 0;
  }

  Op const& op_;
  typename Op::constants constants_;
  typename Op::fine fine_{};
  double sums_[Op::sums]{};
  std::int64_t count_ = 0;
  int packs_ = 0;
};

/// What a thread has summed of the channels of a pack, of packs along channels. The doubles are in shared memory, of which
/// cell (i, e) belongs to double i of channel e of this thread. Rows are so far apart that threads which put together the channels
/// of some packs find them in different banks.
template <class Op, int Threads>
class pack_accumulator {
public:
  using T = typename Op::element_type;
  static constexpr int length = pack_length<T>;
  static constexpr int cells = Op::counts ? Op::parts - 1 : Op::parts;
  static_assert(cells == Op::sums);
  struct storage {
    double of[cells][length][Threads + sizeof(T)];
    double count[Threads];
  };

  /// Of the pack at `column`, where `columns` of them are one of the `channels`.
  template <class Hw>
  SYNCNORM_DEVICE pack_accumulator(Hw const& hw, Op const& op, storage& shared, std::int64_t column,
                                   std::int64_t channels, int columns)
      : op_{op}, shared_{shared} {
    auto const unsigned_of = [](auto value) { return static_cast<std::uint32_t>(value); };
    std::int64_t channel = columns == 1 ? column : unsigned_of(column) / unsigned_of(columns);
    int left = columns == 1 ? 1 : columns - static_cast<int>(unsigned_of(column) - unsigned_of(channel * columns));
    SYNCNORM_UNROLL
    for (int e = 0; e < length; ++e) {
      // A pack's channels beyond the last one have nothing to count.
      constants_[e] = op.constants_of(hw, channel < channels ? channel : channels - 1);
      if (--left == 0) ++channel, left = columns;
      SYNCNORM_UNROLL
      for (int i = 0; i < cells; ++i) hw.store(&shared_.of[i][e][hw.thread()], 0.0);
    }
  }

  template <int Unroll, class Hw>
  SYNCNORM_DEVICE void add(Hw const& hw, batch<Op, Unroll> const& some) {
    if constexpr (Op::pivoted)
      if (count_ == 0) find_pivot(some);
    bool const soon = moves_pivot_soon<Op>(count_);
    if (some.all_full()) {
      add_all<true>(some);
      count_ += Unroll;
    } else {
      add_all<false>(some);
      SYNCNORM_UNROLL
      for (int u = 0; u < Unroll; ++u) count_ += some.bits[u] != 0 ? 1 : 0;
    }
    packs_ += Unroll;
    if (packs_ >= 64 || soon) flush(hw);
  }

  /// Leaves the parts in the cells, and the count.
  template <class Hw>
  SYNCNORM_DEVICE void finish(Hw const& hw) {
    double const one_of = reciprocal<double>(count_);
    SYNCNORM_UNROLL
    for (int e = 0; e < length; ++e) {
      double sums[Op::sums], part[Op::parts];
      SYNCNORM_UNROLL
      for (int i = 0; i < cells; ++i) sums[i] = hw.load(&shared_.of[i][e][hw.thread()]);
      Op::flush(fine_[e], sums);
      op_.finish(fine_[e], constants_[e], sums, count_, one_of, part);
      SYNCNORM_UNROLL
      for (int i = 0; i < cells; ++i) hw.store(&shared_.of[i][e][hw.thread()], part[Op::parts - cells + i]);
    }
    hw.store(&shared_.count[hw.thread()], static_cast<double>(count_));
  }

private:
  template <bool Full, int Unroll>
  SYNCNORM_DEVICE void add_all(batch<Op, Unroll> const& some) {
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u) {
      SYNCNORM_UNROLL
      for (int e = 0; e < length; ++e) add_element<Full>(op_, fine_[e], constants_[e], some, u, e);
    }
  }
  template <int Unroll>
  SYNCNORM_DEVICE void find_pivot(batch<Op, Unroll> const& some) {
    bool found = false;
    SYNCNORM_UNROLL
    for (int u = 0; u < Unroll; ++u) {
      if (found || some.bits[u] == 0) continue;
      SYNCNORM_UNROLL
      for (int e = 0; e < length; ++e) Op::set_pivot(fine_[e], some.in[u][0][e]);
      found = true;
    }
  }
  template <class Hw>
  SYNCNORM_DEVICE void flush(Hw const& hw) {
    auto const one_of = reciprocal<typename Op::A>(count_);
    SYNCNORM_UNROLL
    for (int e = 0; e < length; ++e) {
      double sums[Op::sums];
      SYNCNORM_UNROLL
      for (int i = 0; i < cells; ++i) sums[i] = hw.load(&shared_.of[i][e][hw.thread()]);
      Op::flush(fine_[e], sums);
      if constexpr (Op::pivoted) Op::move_pivot(fine_[e], sums, count_, one_of);
      SYNCNORM_UNROLL
      for (int i = 0; i < cells; ++i) hw.store(&shared_.of[i][e][hw.thread()], sums[i]);
    }
    packs_ = 0;
  }

  Op const& op_;
  storage& shared_;
  typename Op::constants constants_[length];
  typename Op::fine fine_[length]{};
  std::int64_t count_ = 0;
  int packs_ = 0;
};

} // namespace syncnorm::cuda::detail
