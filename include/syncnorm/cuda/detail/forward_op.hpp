#pragma once

#include <cmath>
#include <cstdint>

#include <syncnorm/config.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
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

namespace syncnorm::cuda::detail {

/// What maps by the statistics of a forward pass; all but the first leave nothing, and go by its `saved_statistics`.
enum class map_of : std::uint8_t {
  x,  ///< y, of x
  y,  ///< x again, unless the pass failed or x is there
  dy, ///< dx, where statistics are constant
};

/// The statistics of a forward pass: of all ranks' packets, or, where there are none, of the running statistics.
struct forward_statistics {
  gathered_packets packets{};
  double eps = 0, momentum = -1; ///< −1: cumulative average
  running_variance variance = running_variance::unbiased;
  saved_statistics saved{};
  running_outputs running{};
  affine_values affine{};
  fault_report report{};
  std::uint32_t* ticket = nullptr;          ///< how many groups are done with the counter; 0 between launches
  std::int64_t const* kept_state = nullptr; ///< of `kept_channels`; null: y is not in place
  map_of of = map_of::x;

  static constexpr int values = 2;

  struct summary {
    double mean, inv_std, m2; ///< m2: 0 where statistics are constant
    std::int64_t count;
  };

  [[nodiscard]] SYNCNORM_DEVICE bool constant() const { return packets.data == nullptr; }
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE bool failed_before(Hw const& hw) const {
    return kept_state != nullptr && hw.load(kept_state) < 0;
  }
  /// What makes one channel fail the pass.
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE bool refuses(Hw const& hw, summary const& s) const {
    if (of != map_of::x) return s.count < 0 || (kept_state != nullptr && hw.load(kept_state + 1) != 0);
    return s.count == 1 || (constant() && failed_before(hw));
  }

  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary merge_ranks(Hw const& hw, std::int64_t channels, std::int64_t c) const {
    moments<double> all;
    if (of != map_of::x)
      return {of == map_of::y ? hw.load(saved.mean + c) : 0, hw.load(saved.inv_std + c), 0, hw.load(saved.count)};
    if (constant()) {
      double const held = load_value(hw, running.var, c, 1);
      return {load_value(hw, running.mean, c, 0), inverse_deviation(held, variance, eps), 0, 0};
    }
    incoming_packets const from{packets, channels};
    // Merging divides, and loads would wait for that: several are in flight.
    constexpr int some = 2;
    for (int first = 0; first < from.ranks(); first += some) {
      moments<double> next[some];
      SYNCNORM_UNROLL
      for (int u = 0; u < some; ++u)
        if (int const rank = first + u; rank < from.ranks())
          next[u] = {from.count(hw, rank), from.value(hw, rank, 0, c), from.value(hw, rank, 1, c)};
      SYNCNORM_UNROLL
      for (int u = 0; u < some; ++u) all = merge(all, next[u]); // of nothing, beyond the last
    }
    return summarize(all);
  }
  /// Of one rank alone, by the parts of `moments_op`.
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE summary of_rank(Hw const&, std::int64_t, double const (&part)[3],
                                                double const (&)[values]) const {
    return summarize({static_cast<std::int64_t>(part[0]), part[1], part[2]});
  }
  [[nodiscard]] SYNCNORM_DEVICE summary summarize(moments<double> const& all) const {
    if (all.count == 0) return {0, 0, 0, 0};
    normalized_count const n{all.count, saved.normalized_by};
    return {all.mean, inverse_deviation(all.m2 / static_cast<double>(n.degrees_of_freedom()), eps), all.m2, all.count};
  }

  /// Writes what a channel leaves.
  template <class Hw>
  SYNCNORM_DEVICE void commit(Hw const& hw, std::int64_t c, summary const& s) const {
    if (of != map_of::x) return;
    if (saved.mean != nullptr) {
      hw.store(saved.mean + c, s.mean);
      hw.store(saved.inv_std + c, s.inv_std);
      if (c == 0) hw.store(saved.count, s.count);
    }
    if (constant() || running.mean.data == nullptr || s.count == 0) return;
    double const weight = weight_of_batch(hw);
    learn(hw, running.mean, c, weight, s.mean);
    learn(hw, running.var, c, weight, running_value(s.m2, s.count));
  }
  /// Of this batch in the running statistics.
  template <class Hw>
  [[nodiscard]] SYNCNORM_DEVICE double weight_of_batch(Hw const& hw) const {
    if (momentum >= 0) return momentum;
    std::int64_t const tracked = hw.load(running.num_batches_tracked);
    return 1 / static_cast<double>(tracked < 0 ? 1 : tracked + 1);
  }
  /// Moves number c of a running statistic towards `value`.
  template <class Hw>
  static SYNCNORM_DEVICE void learn(Hw const& hw, channel_outputs const& to, std::int64_t c, double weight,
                                    double value) {
    store_value(hw, to, c, (1 - weight) * load_value(hw, to, c, 0) + weight * value);
  }
  /// What the running variance is to hold of a batch.
  [[nodiscard]] SYNCNORM_DEVICE double running_value(double m2, std::int64_t count) const {
    double const value = m2 / static_cast<double>(running_degrees_of_freedom(variance, {count, saved.normalized_by}));
    return variance == running_variance::standard_deviation ? std::sqrt(value + eps) : value;
  }
  /// Counts the pass, when the last of `groups` blocks has read the counter. By one block of each group, all threads of it.
  template <class Hw>
  SYNCNORM_DEVICE void count_pass(Hw const& hw, std::uint32_t groups, std::int64_t count) const {
    if (constant() || running.mean.data == nullptr || running.num_batches_tracked == nullptr) return;
    hw.barrier();
    if (hw.thread() != 0 || count == 0) return;
    if (hw.atomic_increment(ticket, groups - 1) != groups - 1) return;
    hw.store(running.num_batches_tracked, hw.load(running.num_batches_tracked) + 1);
  }
  template <class Hw>
  SYNCNORM_DEVICE void fail(Hw const& hw, incoming_packets const& from, pass_fault fault) const {
    if (of != map_of::x) return;
    from.tell(hw, report, constant() ? pass_fault::no_room : fault);
    if (hw.thread() == 0 && saved.count != nullptr) hw.store(saved.count, std::int64_t{-1});
  }
};

/// y = f((x − center)·scale + shift + residual), or 0 where positions do not count; or the other way round, where `slope` is that
/// of the inverse, x = (f⁻¹(y) − residual − shift)/scale + center; or dx = dy·scale.
template <class T, epilogue_kind Kind>
struct normalize_op {
  static constexpr bool has_epilogue = Kind != epilogue_kind::none;
  using element_type = T;
  using A = accumulate_t<T>;
  static constexpr int inputs = has_epilogue ? 2 : 1, needed_inputs = 1, outputs = 1, coefficients = 3, threads = 256;
  static constexpr int unroll = has_epilogue ? 2 : 4,
                       unroll_aligned = has_epilogue ? (sizeof(T) == 8 ? 1 : 2) : (sizeof(T) == 4 ? 4 : 2);
  static constexpr int resident[2] = {has_epilogue && sizeof(T) == 2 ? 2 : 3, 2};

  tensor_view<T const> x, residual{}; ///< residual without data: none
  tensor_view<T> y;
  mask_view mask{}; ///< of the outputs that are not 0
  A slope = 1;
  forward_statistics statistics{};
  cached use = cached::normally;

  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& lead() const { return x; }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T const> const& input(int i) const { return i == 0 ? x : residual; }
  [[nodiscard]] SYNCNORM_HOST_DEVICE tensor_view<T> const& output(int) const { return y; }
  /// Whether f(tensor) of all that are there.
  template <class Op, class F>
  [[nodiscard]] static bool each_tensor(Op& op, F const& f) {
    return f(op.x) && f(op.y) && (op.residual.data == nullptr || f(op.residual));
  }

  template <class Summary>
  SYNCNORM_DEVICE void coefficients_of(Summary const& s, double gamma, double beta, A (&k)[coefficients]) const {
    auto const made = make_normalize_coefficients<A>(s.mean, s.inv_std, gamma, beta);
    k[0] = made.center, k[1] = made.scale, k[2] = made.shift;
    if (statistics.of != map_of::y) return;
    double const scale = s.inv_std * gamma;
    k[0] = made.shift, k[1] = scale == 0 ? A{0} : static_cast<A>(1 / scale), k[2] = made.center;
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load(Hw const& hw, spot const& at, pack<T> (&in)[inputs]) const {
    in[0] = load_at<Axis, K>(hw, x, at, use);
    load_rest<Axis, K>(hw, at, in);
  }
  /// What moments_op did not load.
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void load_rest(Hw const& hw, spot const& at, pack<T> (&in)[inputs]) const {
    if constexpr (has_epilogue) {
      in[1] = pack<T>{};
      if (residual.data != nullptr) in[1] = load_at<Axis, K>(hw, residual, at, use);
    }
  }
  template <bool Forward = false>
  SYNCNORM_DEVICE void apply(A const (&k)[coefficients], T const (&in)[inputs], bool counts, T (&out)[outputs]) const {
    A v = to_accumulate(in[0]);
    if constexpr (has_epilogue) {
      bool const inverts = !Forward && statistics.of == map_of::y;
      A const r = residual.data != nullptr ? to_accumulate(in[1]) : A{0};
      if (inverts) v = activate<Kind>(v, slope) - r;
      v = (v - k[0]) * k[1] + k[2];
      if (!inverts) v = counts ? activate<Kind>(v + r, slope) : A{0};
    } else {
      v = (v - k[0]) * k[1] + k[2];
    }
    out[0] = from_accumulate<T>(v);
  }
  template <axis Axis, known K, class Hw>
  SYNCNORM_DEVICE void store(Hw const& hw, spot const& at, pack<T> const (&out)[outputs]) const {
    store_at<Axis, K>(hw, y, at, out[0], use);
  }
};

} // namespace syncnorm::cuda::detail
