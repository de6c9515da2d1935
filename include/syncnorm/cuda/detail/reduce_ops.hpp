#pragma once

#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/coefficients.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/moments.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/channel_access.hpp>
#include <syncnorm/cuda/detail/epilogue_math.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/pack.hpp>
#include <syncnorm/cuda/detail/packet_access.hpp>
#include <syncnorm/cuda/operands.hpp>

// What reduce_kernel sums. A thread keeps `fine` sums of a channel in the type of the elements' arithmetic, over fewer than 96
// elements, and puts them into `sums` doubles of its own (`flush`); of these it makes `parts` doubles at the end
// (`finish`), which are put together in the order of threads, warps and blocks (`combine`). What a packet says (`values_of`) may be added to that of
// the micro-batches before (`add_before`).
namespace syncnorm::cuda::detail {

template <class Hw>
[[nodiscard]] SYNCNORM_DEVICE double warp_sum(Hw const& hw, double value) {
  SYNCNORM_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) value += hw.shuffle_xor(value, lanes);
  return value;
}

/// The first lane of a warp whose `value` is true; of none: 0.
template <class Hw>
[[nodiscard]] SYNCNORM_DEVICE int first_lane(Hw const& hw, bool value) {
  unsigned const lanes = hw.ballot(~0u, value);
  return lanes == 0 ? 0 : hw.population((lanes & (0u - lanes)) - 1);
}

/// Parts that are put together by adding, of channels that are so many `Components` of packets.
template <int Parts, int Components = 1>
struct added_parts {
  static constexpr int parts = Parts, sums = Parts, components = Components;
  static constexpr bool counts = false;

  template <class At>
  static SYNCNORM_DEVICE void combine(At const& at, int k, double (&all)[Parts]) {
    SYNCNORM_UNROLL
    for (int p = 0; p < Parts; ++p) all[p] = 0;
    SYNCNORM_UNROLL_FOUR
    for (int i = 0; i < k; ++i) {
      SYNCNORM_UNROLL
      for (int p = 0; p < Parts; ++p) all[p] += at(i, p);
    }
  }
  template <class Hw>
  static SYNCNORM_DEVICE void combine_warp(Hw const& hw, double (&all)[Parts]) {
    SYNCNORM_UNROLL
    for (int p = 0; p < Parts; ++p) all[p] = warp_sum(hw, all[p]);
  }
  template <int Values, class Hw>
  static SYNCNORM_DEVICE void add_before(Hw const& hw, incoming_packets const& before, std::int64_t c,
                                         double (&)[Parts], double (&value)[Values]) {
    SYNCNORM_UNROLL
    for (int v = 0; v < Values; ++v) value[v] += before.value(hw, 0, v / Components, Components * c + v % Components);
  }
};

/// Count, mean and m2. k of them are put together by Chan's formula for all at once: with d = meanᵢ − r, mean = r + Σ n·d / Σ n and
/// m2 = Σ (m2 + n·d²) − (Σ n·d)² / Σ n, which divides once where merging one after the other would divide k times. r is the mean of the
/// first part with elements, so that equal means have that very mean, and no m2. What the difference loses is as much as r's part of the
/// elements is small, which doubles, having no more digits than that, do not bear: they take a second look, m2 = Σ m2 + Σ n·(meanᵢ − mean)².
template <class T>
struct moments_op {
  using element_type = T;
  using A = accumulate_t<T>;
  static constexpr int inputs = 1, needed_inputs = 1, sums = 2, parts = 3, threads = 256;
  /// Packs of each input that are in flight, of packs along positions and along channels; of those that may be there in part.
  static constexpr int unroll[2] = {4, sizeof(T) == 8 ? 4 : 8}, unroll_aligned = sizeof(T) == 4 ? 4 : 2;
  /// Blocks that a multiprocessor holds at a time by their registers.
  static constexpr int resident[2] = {sizeof(T) == 8 ? 3 : 4, 2};
  static constexpr bool counts = true; ///< part 0 is the count
  static constexpr bool pivoted = true;

  tensor_view<T const> x;
  mask_view mask{};

  /// Those that `inputs` counts; what is not there has no data.
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& input(int) const { return x; }

  struct constants {};
  /// Sums of x − pivot and its square. The pivot is the first element of a thread, and from flush to flush, the first of which comes
  /// soon, the mean of its elements so far: so the squares that are lost to rounding are of differences that m2 holds anyway.
  struct fine {
    A pivot, first, second;
  };

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& lead() const { return x; }
  /// Whether f(tensor) of all that are there.
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.x);
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE constants constants_of(Hw const&, std::int64_t) const {
    return {};
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<T> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, x, at, cached::normally);
  }
  static SYNCNORM_DEVICE void set_pivot(fine& to, T value) { to.pivot = to_accumulate(value); }
  static SYNCNORM_DEVICE void add(fine& to, constants const&, T const (&in)[inputs], bool counts_too) {
    A const d = counts_too ? to_accumulate(in[0]) - to.pivot : A{0};
    to.first += d;
    to.second += d * d;
  }
  static SYNCNORM_DEVICE void flush(fine& from, double (&sum)[sums]) {
    sum[0] += static_cast<double>(from.first);
    sum[1] += static_cast<double>(from.second);
    from.first = from.second = 0;
  }
  /// `n`: how many elements the sums are of; `one_of`: 1/n.
  static SYNCNORM_DEVICE void move_pivot(fine& from, double (&sum)[sums], std::int64_t n, A one_of) {
    A const pivot = from.pivot + static_cast<A>(sum[0]) * one_of;
    double const moved = static_cast<double>(from.pivot) - static_cast<double>(pivot);
    double const count = static_cast<double>(n);
    sum[1] += moved * (2 * sum[0] + count * moved);
    sum[0] += count * moved;
    from.pivot = pivot;
  }
  static SYNCNORM_DEVICE void finish(fine const& from, constants const&, double const (&sum)[sums], std::int64_t n,
                                     double one_of, double (&part)[parts]) {
    double const shift = sum[0] * one_of, m2 = sum[1] - sum[0] * shift;
    part[0] = static_cast<double>(n);
    part[1] = static_cast<double>(from.pivot) + shift;
    part[2] = m2 < 0 ? 0 : m2;
  }

  template <class At>
  static SYNCNORM_DEVICE void combine(At const& at, int k, double (&all)[parts]) {
    int some = 0;
    while (some < k && at(some, 0) == 0) ++some;
    double const first = some < k ? at(some, 1) : 0;
    double count = 0, sum = 0, m2 = 0;
    SYNCNORM_UNROLL_FOUR
    for (int i = some; i < k; ++i) {
      double const n = at(i, 0), d = at(i, 1) - first;
      count += n;
      sum += n * d;
      if constexpr (sizeof(T) < 8) m2 += at(i, 2) + n * (d * d);
    }
    double const shift = count > 0 ? sum / count : 0, mean = first + shift;
    if constexpr (sizeof(T) < 8) {
      m2 -= sum * shift;
      if (m2 < 0) m2 = 0;
    } else {
      SYNCNORM_UNROLL_FOUR
      for (int i = some; i < k; ++i) {
        double const d = at(i, 1) - mean;
        m2 += at(i, 2) + at(i, 0) * (d * d);
      }
    }
    all[0] = count, all[1] = mean, all[2] = m2;
  }
  template <class Hw>
  static SYNCNORM_DEVICE void combine_warp(Hw const& hw, double (&all)[parts]) {
    double const first = hw.shuffle(all[1], first_lane(hw, all[0] > 0));
    double const count = warp_sum(hw, all[0]), sum = warp_sum(hw, all[0] * (all[1] - first));
    double const mean = count > 0 ? first + sum / count : 0, d = all[1] - mean;
    all[2] = warp_sum(hw, all[2] + all[0] * (d * d));
    all[0] = count, all[1] = mean;
  }

  static constexpr int values = 2;
  /// What a packet says of channel c.
  template <class Hw>
  SYNCNORM_DEVICE void values_of(Hw const&, std::int64_t, double const (&all)[parts], double (&value)[values]) const {
    value[0] = all[1], value[1] = all[2];
  }
  /// Merges the micro-batches before into those values, and the count.
  template <class Hw>
  static SYNCNORM_DEVICE void add_before(Hw const& hw, incoming_packets const& before, std::int64_t c,
                                         double (&all)[parts], double (&value)[values]) {
    auto const merged =
        merge(moments<double>{before.count(hw, 0), before.value(hw, 0, 0, c), before.value(hw, 0, 1, c)},
              moments<double>{static_cast<std::int64_t>(all[0]), value[0], value[1]});
    all[0] = static_cast<double>(merged.count), value[0] = merged.mean, value[1] = merged.m2;
  }
};

/// sum_dy and sum_dy_xmu; with an epilogue, of what was activated.
template <class T, epilogue_kind Kind>
struct backward_sums_op : added_parts<2> {
  static constexpr bool has_epilogue = Kind != epilogue_kind::none;
  using element_type = T;
  using A = accumulate_t<T>;
  static constexpr int inputs = has_epilogue ? 3 : 2, needed_inputs = 2, threads = 256;
  static constexpr int unroll[2] = {(has_epilogue ? 2 : 4) - (sizeof(T) == 2 ? 1 : 0),
                                    has_epilogue ? (sizeof(T) == 2 ? 1 : 2) : 4},
                       unroll_aligned = has_epilogue || sizeof(T) == 2 ? 1 : 2;
  static constexpr int resident[2] = {sizeof(T) == 8 ? 2 : has_epilogue ? 3 : 4, 2};
  static constexpr bool pivoted = false;

  tensor_view<T const> dy, x, residual{}; ///< residual without data: none
  mask_view mask{};                       ///< of the outputs that have a gradient
  saved_statistics saved{};
  affine_values affine{};
  A slope = 1;

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& input(int i) const {
    return i == 0 ? dy : i == 1 ? x : residual;
  }

  struct constants {
    A center, scale, shift;
  };
  struct fine {
    A first, second;
  };

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& lead() const { return x; }
  /// Whether f(tensor) of all that are there.
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x) && (op.residual.data == nullptr || f(op.residual));
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE constants constants_of(Hw const& hw, std::int64_t c) const {
    double const mean = hw.load(saved.mean + c);
    if constexpr (!has_epilogue) return {static_cast<A>(mean), 0, 0};
    auto const k = make_normalize_coefficients<A>(mean, hw.load(saved.inv_std + c), load_value(hw, affine.gamma, c, 1),
                                                  load_value(hw, affine.beta, c, 0));
    return {k.center, k.scale, k.shift};
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<T> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, dy, at, cached::normally);
    in[1] = load_at<Axis, K>(hw, x, at, cached::normally);
    if constexpr (has_epilogue) {
      in[2] = pack<T>{};
      if (residual.data != nullptr) in[2] = load_at<Axis, K>(hw, residual, at, cached::normally);
    }
  }
  static SYNCNORM_DEVICE void set_pivot(fine&, T) {}
  SYNCNORM_DEVICE void add(fine& to, constants const& k, T const (&in)[inputs], bool counts_too) const {
    A g = to_accumulate(in[0]);
    A const d = to_accumulate(in[1]) - k.center;
    if constexpr (has_epilogue) {
      A v = d * k.scale + k.shift;
      if (residual.data != nullptr) v += to_accumulate(in[2]);
      g = activation_gradient<Kind>(v, g, slope);
    }
    to.first += counts_too ? g : A{0};
    to.second += counts_too ? g * d : A{0};
  }
  static SYNCNORM_DEVICE void flush(fine& from, double (&sum)[sums]) {
    sum[0] += static_cast<double>(from.first);
    sum[1] += static_cast<double>(from.second);
    from.first = from.second = 0;
  }
  SYNCNORM_DEVICE void finish(fine const&, constants const&, double const (&sum)[sums], std::int64_t, double,
                              double (&part)[parts]) const {
    part[0] = sum[0], part[1] = sum[1];
  }

  static constexpr int values = 2;
  template <class Hw>
  SYNCNORM_DEVICE void values_of(Hw const& hw, std::int64_t c, double const (&all)[parts],
                                 double (&value)[values]) const {
    // Makes up for what rounding the mean lost.
    double const mean = hw.load(saved.mean + c), lost = mean - static_cast<double>(static_cast<A>(mean));
    value[0] = all[0], value[1] = all[1] - lost * all[0];
  }
};

/// Σ g, Σ g·X, Σ m·u, Σ m·u·X, Σ u·g, where X = x − mean, and g = w·f′·dy, m, w and u are those of
/// `batch_norm_double_backward`.
template <class T, bool Epilogue>
struct double_backward_sums_op : added_parts<5> {
  using element_type = T;
  using A = accumulate_t<T>;
  static constexpr int inputs = Epilogue ? 4 : 3, threads = 128;
  static constexpr int unroll[2] = {Epilogue ? 1 : 2, Epilogue ? 1 : 2}, unroll_aligned = 1;
  static constexpr int resident[2] = {Epilogue ? 4 : 6, sizeof(T) == 2 ? 2 : 3};
  static constexpr bool pivoted = false;
  static constexpr bool sums_all = true; ///< elements that do not count are in some sums

  tensor_view<T const> u, dy, x, residual{}; ///< u or residual without data: 0
  mask_view mask{};                          ///< of the positions that count
  bool zeroes = false;                       ///< outputs that do not count are 0
  A slope = 1;
  saved_statistics saved{};
  affine_values affine{};
  channel_values gamma_gradient{};

  struct constants {
    A center, scale, shift;
  };
  struct fine {
    A of[sums];
  };

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& lead() const { return x; }
  /// Whether f(tensor) of all that are there.
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.dy) && f(op.x) && (op.u.data == nullptr || f(op.u)) && (op.residual.data == nullptr || f(op.residual));
  }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE constants constants_of(Hw const& hw, std::int64_t c) const {
    double const mean = hw.load(saved.mean + c);
    if constexpr (!Epilogue) return {static_cast<A>(mean), 0, 0};
    auto const k = make_normalize_coefficients<A>(mean, hw.load(saved.inv_std + c), load_value(hw, affine.gamma, c, 1),
                                                  load_value(hw, affine.beta, c, 0));
    return {k.center, k.scale, k.shift};
  }

  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<T> (&in)[inputs]) const {
    in[0] = pack<T>{};
    if (u.data != nullptr) in[0] = load_at<Axis, K>(hw, u, at, cached::normally);
    in[1] = load_at<Axis, K>(hw, dy, at, cached::normally);
    in[2] = load_at<Axis, K>(hw, x, at, cached::normally);
    if constexpr (Epilogue) {
      in[3] = pack<T>{};
      if (residual.data != nullptr) in[3] = load_at<Axis, K>(hw, residual, at, cached::normally);
    }
  }
  static SYNCNORM_DEVICE void set_pivot(fine&, T) {}
  SYNCNORM_DEVICE void add(fine& to, constants const& k, T const (&in)[inputs], bool counts_too, bool exists) const {
    if (!exists) return;
    A const d = to_accumulate(in[2]) - k.center;
    A g = to_accumulate(in[1]);
    if constexpr (Epilogue) {
      A v = d * k.scale + k.shift;
      if (residual.data != nullptr) v += to_accumulate(in[3]);
      g = activation_gradient<epilogue_kind::linear>(v, g, slope);
    }
    // Nothing of what does not count, and not 0 times it: it may be infinite.
    bool const counted = !Epilogue || counts_too, written = counted || !zeroes;
    to.of[0] += written ? g : A{0};
    to.of[1] += written ? g * d : A{0};
    if (u.data == nullptr) return;
    A const second = to_accumulate(in[0]);
    to.of[2] += counted ? second : A{0};
    to.of[3] += counted ? second * d : A{0};
    to.of[4] += written ? second * g : A{0};
  }
  static SYNCNORM_DEVICE void flush(fine& from, double (&sum)[sums]) {
    SYNCNORM_UNROLL
    for (int i = 0; i < sums; ++i) {
      sum[i] += static_cast<double>(from.of[i]);
      from.of[i] = 0;
    }
  }
  SYNCNORM_DEVICE void finish(fine const&, constants const&, double const (&sum)[sums], std::int64_t, double,
                              double (&part)[parts]) const {
    SYNCNORM_UNROLL
    for (int i = 0; i < sums; ++i) part[i] = sum[i];
  }

  static constexpr int values = 7;
  /// g, g_xmu, u, u_xmu, u_g, a_g, a_g_xmu, as the host has them.
  template <class Hw>
  SYNCNORM_DEVICE void values_of(Hw const& hw, std::int64_t c, double const (&all)[parts],
                                 double (&value)[values]) const {
    double const mean = hw.load(saved.mean + c), lost = mean - static_cast<double>(static_cast<A>(mean));
    double const a = load_value(hw, gamma_gradient, c, 0);
    value[0] = all[0], value[1] = all[1] - lost * all[0], value[2] = all[2], value[3] = all[3] - lost * all[2];
    value[4] = all[4], value[5] = times_given(a, value[0]), value[6] = times_given(a, value[1]);
  }
};

} // namespace syncnorm::cuda::detail
