#pragma once

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

namespace syncnorm::cuda::detail {

/// What becomes of a pack: of element e by coefficients k[e], or all by k[0], and by whether bit e says that it counts. `Forward`: of an op
/// that goes both ways, the one.
template <bool Forward, class Op, class T, class A, int Bytes, int Sets>
SYNCNORM_DEVICE void apply_to_pack(Op const& op, A const (&k)[Sets][Op::coefficients],
                                   pack<T, Bytes> const (&in)[Op::inputs], unsigned bits,
                                   pack<T, Bytes> (&out)[Op::outputs]) {
  constexpr int length = pack<T, Bytes>::length;
  T all[Op::outputs][length];
  SYNCNORM_UNROLL
  for (int e = 0; e < length; ++e) {
    T one[Op::inputs], made[Op::outputs];
    SYNCNORM_UNROLL
    for (int i = 0; i < Op::inputs; ++i) one[i] = in[i][e];
    bool const counts = (bits >> e & 1u) != 0;
    if constexpr (Forward && requires { op.template apply<true>(k[0], one, counts, made); })
      op.template apply<true>(k[Sets == 1 ? 0 : e], one, counts, made);
    else
      op.apply(k[Sets == 1 ? 0 : e], one, counts, made);
    SYNCNORM_UNROLL
    for (int o = 0; o < Op::outputs; ++o) all[o][e] = made[o];
  }
  SYNCNORM_UNROLL
  for (int o = 0; o < Op::outputs; ++o) out[o] = pack<T, Bytes>{all[o]};
}

} // namespace syncnorm::cuda::detail
