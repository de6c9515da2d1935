#pragma once

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/geometry.hpp>
#include <syncnorm/cuda/detail/kept_packs.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

namespace syncnorm::cuda::detail {

/// The whole packs along channels that a thread maps, `Op::unroll` at a time, on their way through shared memory: two such batches are
/// in flight while it maps one, and take no registers. A thread finds there what it has fetched itself, and waits for no other.
template <class Op>
class pack_stream {
public:
  using T = typename Op::element_type;
  static constexpr int batches = 3, unroll = Op::unroll, inputs = Op::inputs;

  /// Bytes of dynamic shared memory of a block.
  [[nodiscard]] static constexpr int bytes(int threads) { return threads * batches * unroll * inputs * 16; }

  template <class Hw>
  SYNCNORM_DEVICE pack_stream(Hw const& hw, Op const& op, walk<axis::channels, T> const& items)
      : op_{op}, ahead_{items}, room_{reinterpret_cast<T*>(hw.dynamic_shared()) + hw.thread() * pack_length<T>},
        stride_{hw.threads() * pack_length<T>} {}

  template <class Hw>
  SYNCNORM_DEVICE void begin(Hw const& hw) {
    SYNCNORM_UNROLL
    for (int b = 0; b < batches - 1; ++b) fetch(hw, b);
  }
  /// The next batch, all of whose packs are inside.
  template <class Hw>
  SYNCNORM_DEVICE void next(Hw const& hw, pack<T> (&in)[unroll][inputs]) {
    fetch(hw, batch_ == 0 ? batches - 1 : batch_ - 1);
    hw.template wait_for_copies_but<batches - 1>();
    SYNCNORM_UNROLL
    for (int u = 0; u < unroll; ++u) {
      SYNCNORM_UNROLL
      for (int i = 0; i < inputs; ++i) {
        in[u][i] = pack<T>{};
        if (has_input(op_, i)) in[u][i] = hw.load_pack(static_cast<T const*>(place(batch_, u, i)), cached::normally);
      }
    }
    batch_ = batch_ == batches - 1 ? 0 : batch_ + 1;
  }

private:
  [[nodiscard]] SYNCNORM_DEVICE T* place(int batch, int u, int i) const {
    return room_ + ((batch * unroll + u) * inputs + i) * stride_;
  }
  template <class Hw>
  SYNCNORM_DEVICE void fetch(Hw const& hw, int batch) {
    if (ahead_.inside(unroll)) {
      SYNCNORM_UNROLL
      for (int u = 0; u < unroll; ++u) {
        spot const at = ahead_.template here<known::whole>();
        SYNCNORM_UNROLL
        for (int i = 0; i < inputs; ++i)
          if (has_input(op_, i))
            hw.template copy<16>(place(batch, u, i), address<axis::channels, known::whole>(op_.input(i), at));
        ahead_.template advance<known::whole>();
      }
    }
    hw.commit_copies();
  }

  Op const& op_;
  walk<axis::channels, T> ahead_;
  T* room_;
  int stride_, batch_ = 0;
};

/// Whether the packs of a map go through a `pack_stream`.
template <class Op, axis Axis>
inline constexpr bool streams = Axis == axis::channels&& requires(Op const& op) {
  op.input(0);
};

/// Bytes of dynamic shared memory of a block of a map.
template <class Op>
[[nodiscard]] constexpr int stream_bytes(geometry const& cut) {
  if constexpr (streams<Op, axis::channels>) return cut.streamed ? pack_stream<Op>::bytes(cut.threads) : 0;
  return 0;
}

} // namespace syncnorm::cuda::detail
