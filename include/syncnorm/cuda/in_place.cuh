#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/recoverable.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/kept_kernels.hpp>
#include <syncnorm/cuda/detail/launch.cuh>
#include <syncnorm/cuda/operands.hpp>

// What a pass over x itself needs beside those of forward.cuh and backward.cuh: some channels of x are kept, the others are
// recovered from y.
namespace syncnorm::cuda {

namespace detail {

inline constexpr int choose_threads = 256, copy_threads = 256;

template <class Architectures>
__attribute__((visibility("hidden"))) __global__ void choose_global(__grid_constant__ choose_arguments const a) {
  choose_kernel<choose_threads>(hardware{}, a);
}

template <class Word, class Architectures>
__attribute__((visibility("hidden"))) __global__ void copy_global(__grid_constant__ copy_arguments<Word> const a) {
  copy_kernel(hardware{}, a);
}

template <class T, class Architectures>
void launch_copy(tensor_view<T> x, kept_channels const& kept, std::int64_t const* saved_count,
                 device_limits const& limits, cudaStream_t stream) {
  if (kept.room == 0 || x.size() == 0) return;
  using word = copied_word<T>;
  syncnorm::detail::require_cuda(launch<copy_arguments<word>>(&copy_global<word, Architectures>,
                                                              copy_blocks(x, kept, limits), copy_threads,
                                                              make_copy(x, kept, saved_count), 0, stream),
                                 "the copy of kept channels");
}

} // namespace detail

/// Chooses the channels of x that `is_recoverable` says no of, and copies them to `kept`; where they are more than there is
/// room for, sets kept.state[0] to −1 and copies nothing. x `[N, C, S]`.
template <class T, class Architectures = detail::architectures>
void keep(tensor_view<T> x, affine_values const& affine, activation const& of, kept_channels const& kept,
          device_limits const& limits, cudaStream_t stream) {
  detail::operand_check const check{"keep"};
  check.tensor(x, "x");
  check.kept(kept);
  syncnorm::detail::require_cuda(
      detail::launch<detail::choose_arguments>(&detail::choose_global<Architectures>, 1, detail::choose_threads,
                                               detail::make_choose<T>(x.channels, affine, of, kept), 0, stream),
      "keep");
  detail::launch_copy<T, Architectures>(x, kept, nullptr, limits, stream);
}

/// Makes y, which a forward pass wrote over x, x again, up to rounding, in the channels that `keep` has not kept, and copies the
/// others back; nothing where the forward pass failed. What its mask made 0 becomes anything finite. y and the residual `[N, C, S]`.
template <class T, class Architectures = detail::architectures>
void recover(tensor_view<T> y, batch_norm_epilogue<T> const& epilogue, affine_values const& affine,
             saved_statistics const& saved, kept_channels const& kept, device_limits const& limits,
             cudaStream_t stream) {
  detail::operand_check const check{"recover"};
  check.tensor(y, "y");
  check.optional(epilogue.residual, "the residual", y);
  check.saved(saved, y.channels);
  check.kept(kept);
  auto const run = [&]<bool Epilogue>(std::bool_constant<Epilogue>) {
    auto const op = detail::make_recover<detail::device_element_t<T>, Epilogue>(
        detail::device_view(y), detail::device_epilogue(epilogue), affine, saved);
    syncnorm::detail::require_cuda(detail::launch_map<Architectures>(detail::make_map(op, limits, op.threads), stream),
                                   "recover");
  };
  if (epilogue.activation.negative_slope > 0) // else all channels are kept
    epilogue.does_something() ? run(std::true_type{}) : run(std::false_type{});
  detail::launch_copy<T, Architectures>(y, kept, saved.count, limits, stream);
}

} // namespace syncnorm::cuda
