#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/host/stores.hpp>

namespace syncnorm::host::detail {

/// Cuts `[N, C, S]` into boxes of about `box_elements`, of which every element belongs to one.
class boxes {
public:
  static constexpr std::int64_t box_elements = 1 << 17;

  struct box {
    std::int64_t channel, channels, sample, samples, position, positions;
  };

  boxes(std::int64_t samples, std::int64_t channels, std::int64_t spatial, std::int64_t most_channels)
      : samples_{samples}, channels_{channels}, spatial_{spatial} {
    if (samples * channels * spatial == 0) return;
    std::int64_t const wide = std::max<std::int64_t>(16, box_elements / std::min(spatial, box_elements) / 16 * 16);
    c_ = even_part(channels, std::min(wide, most_channels));
    s_ = even_part(spatial, std::max<std::int64_t>(16, box_elements / c_ / 16 * 16));
    n_ = std::clamp<std::int64_t>(box_elements / (c_ * s_), 1, samples);
    count_ = ceil_div(channels, c_) * ceil_div(spatial, s_) * ceil_div(samples, n_);
  }

  [[nodiscard]] std::int64_t count() const { return count_; }

  [[nodiscard]] box operator[](std::int64_t i) const {
    std::int64_t const over_s = ceil_div(spatial_, s_), over_c = ceil_div(channels_, c_);
    std::int64_t const s = i % over_s * s_, c = i / over_s % over_c * c_, n = i / over_s / over_c * n_;
    return {c, std::min(c_, channels_ - c), n, std::min(n_, samples_ - n), s, std::min(s_, spatial_ - s)};
  }

private:
  std::int64_t samples_, channels_, spatial_, n_ = 0, c_ = 0, s_ = 0, count_ = 0;
};

/// Elementwise `out = op(in…, coefficients of the channel)`. `Op` has
///
///     static constexpr std::size_t inputs, coefficients;
///     std::array<A, coefficients> operator()(channel)        the coefficients
///     static V apply(std::array<V, inputs>, std::array<V, coefficients>)
template <class T, class Op>
class map_kernel {
  using A = accumulate_t<T>;
  static constexpr std::size_t inputs = Op::inputs, coefficients = Op::coefficients;
  static constexpr std::size_t most = static_cast<std::size_t>(chunk_channels<A>);
  using pointers = std::array<T const*, inputs>;

public:
  map_kernel(Op const& op, std::array<tensor_view<T const>, inputs> const& in, tensor_view<T> const& out, stores how)
      : op_{op}, in_{in}, out_{out}, layout_{
                                         std::apply([&](auto const&... x) { return common_layout(out, x...); }, in)} {
    bool in_place = false;
    for (auto const& x : in) in_place |= x.data == out.data;
    if (how == stores::automatic) how = stores_for(out);
    // Lines of an input are in the cache already.
    stream_ = how == stores::streaming && can_stream<T> && !in_place && layout_ != layout::strided;
  }

  [[nodiscard]] boxes tasks() const { return {out_.samples, out_.channels, out_.spatial, chunk_channels<A>}; }

  [[gnu::noinline]] void operator()(boxes::box const& box) const {
    std::array<std::array<A, most>, coefficients> k;
    for (std::int64_t c = 0; c < box.channels; ++c) {
      auto const values = op_(box.channel + c);
      for (std::size_t j = 0; j < coefficients; ++j) k[j][static_cast<std::size_t>(c)] = values[j];
    }
    if (stream_) {
      run_box<true>(box, k);
      stream_fence();
    } else {
      run_box<false>(box, k);
    }
  }

private:
  using coefficient_arrays = std::array<std::array<A, most>, coefficients>;

  template <bool Stream>
  void run_box(boxes::box const& box, coefficient_arrays const& k) const {
    // Backwards: what was read last is the likeliest to be in the cache still.
    for (std::int64_t n = box.sample + box.samples; n-- > box.sample;) {
      if (layout_ == layout::channels) {
        for (std::int64_t s = box.position + box.positions; s-- > box.position;) {
          run<Stream>(at(n, box.channel, s), &out_(n, box.channel, s), box.channels, [&]<int L>(std::int64_t i) {
            std::array<vector_t<A, L>, coefficients> v;
            for (std::size_t j = 0; j < coefficients; ++j) v[j] = load<L>(&k[j][static_cast<std::size_t>(i)]);
            return v;
          });
        }
      } else {
        for (std::int64_t c = box.channels; c-- > 0;) {
          auto const constant = [&]<int L>(std::int64_t) {
            std::array<vector_t<A, L>, coefficients> v;
            for (std::size_t j = 0; j < coefficients; ++j) v[j] = splat<A, L>(k[j][static_cast<std::size_t>(c)]);
            return v;
          };
          if (layout_ == layout::rows) {
            run<Stream>(at(n, box.channel + c, box.position), &out_(n, box.channel + c, box.position), box.positions,
                        constant);
          } else {
            for (std::int64_t s = box.position; s < box.position + box.positions; ++s)
              run<false>(at(n, box.channel + c, s), &out_(n, box.channel + c, s), 1, constant);
          }
        }
      }
    }
  }

  [[nodiscard]] pointers at(std::int64_t n, std::int64_t c, std::int64_t s) const {
    pointers from;
    for (std::size_t j = 0; j < inputs; ++j) from[j] = &in_[j](n, c, s);
    return from;
  }

  template <int L, class Coefficients>
  static vector_t<A, L> compute(pointers const& from, std::int64_t i, Coefficients const& k) {
    std::array<vector_t<A, L>, inputs> v;
    for (std::size_t j = 0; j < inputs; ++j) v[j] = load<L>(from[j] + i);
    return Op::apply(v, k.template operator()<L>(i));
  }

  /// `n` contiguous elements.
  template <bool Stream, class Coefficients>
  static void run(pointers const& from, T* to, std::int64_t n, Coefficients const& k) {
    constexpr int lanes = native_lanes<A>;
    std::int64_t i = 0;
    if constexpr (Stream) {
      auto const misaligned = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(to) % simd_bytes / sizeof(T));
      std::int64_t const head = misaligned == 0 ? 0 : std::min<std::int64_t>(n, lanes - misaligned);
      for (; i < head; ++i) stream<1>(to + i, compute<1>(from, i, k));
      for (; i + lanes <= n; i += lanes) stream<lanes>(to + i, compute<lanes>(from, i, k));
      for (; i < n; ++i) stream<1>(to + i, compute<1>(from, i, k));
    } else if (n < lanes) {
      for (; i < n; ++i) store<1>(to + i, compute<1>(from, i, k));
    } else {
      // The last vector may overlap the one before it, which in place overwrites what it reads.
      auto const last = compute<lanes>(from, n - lanes, k);
      for (; i + lanes < n; i += lanes) store<lanes>(to + i, compute<lanes>(from, i, k));
      store<lanes>(to + n - lanes, last);
    }
  }

  Op op_;
  std::array<tensor_view<T const>, inputs> in_;
  tensor_view<T> out_;
  layout layout_;
  bool stream_ = false;
};

template <class T, class Op, executor E>
void map_channels(E const& exec, Op const& op, std::array<tensor_view<T const>, Op::inputs> const& in,
                  tensor_view<T> const& out, stores how) {
  map_kernel<T, Op> const kernel{op, in, out, how};
  boxes const tasks = kernel.tasks();
  exec.for_each(tasks.count(), [&](std::int64_t i) { kernel(tasks[tasks.count() - 1 - i]); });
}

} // namespace syncnorm::host::detail
