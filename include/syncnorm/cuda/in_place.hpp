#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/detail/check.hpp>
#include <syncnorm/cuda/detail/device_element.hpp>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>

// The members of kernels_of for what a pass over x itself needs besides: some channels of x are kept, the others are recovered
// from y.
namespace syncnorm::cuda {

namespace detail {

template <class Kernels, class T>
void launch_copy(tensor_view<T> x, kept_channels const& kept, std::int64_t const* saved_count,
                 device_limits const& limits, cudaStream_t stream) {
  if (kept.room == 0 || x.size() == 0) return;
  using entry = copy_entry<copied_word<T>>;
  launch<Kernels, entry>("the copy of kept channels", {copy_blocks(x, kept, limits), Kernels::threads(entry::threads)},
                         make_copy(x, kept, saved_count), stream);
}

} // namespace detail

template <class T, class Kernels>
void kernels_of<T, Kernels>::keep(out x, affine_values const& affine, activation const& of, kept_channels const& kept,
                                  device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "keep";
  detail::operand_check const check{call};
  check.tensor(x, "x");
  check.kept(kept);
  using entry = detail::choose_entry;
  detail::launch<Kernels, entry>(call, {1, Kernels::threads(entry::threads)},
                                 detail::make_choose<T>(x.channels, affine, of, kept), stream);
  detail::launch_copy<Kernels>(x, kept, nullptr, limits, stream);
}

template <class T, class Kernels>
void kernels_of<T, Kernels>::recover(out y, epilogue const& done, affine_values const& affine,
                                     saved_statistics const& saved, kept_channels const& kept,
                                     device_limits const& limits, cudaStream_t stream) {
  auto const* const call = "recover";
  detail::operand_check const check{call};
  check.tensor(y, "y");
  check.optional(done.residual, "the residual", y);
  check.saved(saved, y.channels);
  check.kept(kept);
  if (recoverable_slope(done.activation) > 0) // else all channels are kept
    detail::with_epilogue(done, [&](auto has_epilogue) {
      using enum detail::epilogue_kind;
      constexpr auto kind = has_epilogue() ? linear : none;
      auto const op = detail::make_recover<detail::device_element_t<T>, kind>(
          detail::device_view(y), detail::device_epilogue(done), affine, saved, kept);
      detail::launch_map<Kernels>(call, op, limits, stream);
    });
  detail::launch_copy<Kernels>(y, kept, saved.count, limits, stream);
  if (kept.once)
    syncnorm::detail::require_cuda(cudaMemsetAsync(kept.state + 1, 1, sizeof *kept.state, stream), "cudaMemsetAsync");
}

} // namespace syncnorm::cuda
