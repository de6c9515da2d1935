#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/packet_header.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

/// The launchers of cuda/ for one element type, for a compiler that knows no CUDA. A program that uses them has one source for
/// nvcc, or one for each element type, which compile at the same time:
///
///     #include <syncnorm/cuda/compiled_kernels.cuh>
///     template struct syncnorm::cuda::kernels_of<float>; // in any case; and double, __half, __nv_bfloat16 as needed
template <class T>
struct kernels_of {
  using in = tensor_view<T const>;
  using out = tensor_view<T>;
  using epilogue = batch_norm_epilogue<T>;
  using header = syncnorm::detail::packet_header;

  static void load_kernels();
  static void load_double_backward_kernels();
  static void local_moments(in x, mask_view mask, header const& own, packet_place const& packet, workspace const& work,
                            device_limits const& limits, cudaStream_t stream);
  static void normalize(in x, out y, affine_values const& affine, epilogue const& done,
                        batch_norm_options const& options, gathered_packets const& packets,
                        saved_statistics const& saved, running_outputs const& running, fault_report const& report,
                        workspace const& work, device_limits const& limits, cudaStream_t stream);
  static void normalize_constant(in x, out y, affine_values const& affine, epilogue const& done,
                                 batch_norm_options const& options, channel_values const& mean,
                                 channel_values const& var, saved_statistics const& saved,
                                 std::int64_t const* kept_state, fault_report const& report,
                                 device_limits const& limits, cudaStream_t stream);
  static void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream);
  static void agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report,
                             cudaStream_t stream);
  static void keep(out x, affine_values const& affine, activation const& of, kept_channels const& kept,
                   device_limits const& limits, cudaStream_t stream);
  static void recover(out y, epilogue const& done, affine_values const& affine, saved_statistics const& saved,
                      kept_channels const& kept, device_limits const& limits, cudaStream_t stream);
  static void forward_alone(in x, out y, affine_values const& affine, epilogue const& done,
                            batch_norm_options const& options, header const& own, packet_place const& packet,
                            saved_statistics const& saved, running_outputs const& running, fault_report const& report,
                            workspace const& work, device_limits const& limits, cudaStream_t stream);
  static void backward_reduce(in dy, in x, affine_values const& affine, epilogue const& done,
                              saved_statistics const& saved, header const& own, packet_place const& packet,
                              workspace const& work, device_limits const& limits, cudaStream_t stream);
  static void backward_elemt(in dy, in x, out dx, out dresidual, affine_values const& affine, epilogue const& done,
                             saved_statistics const& saved, gathered_packets const& packets, packet_place const& own,
                             affine_outputs const& gradients, fault_report const& report, device_limits const& limits,
                             cudaStream_t stream);
  static void backward_alone(in dy, in x, out dx, out dresidual, affine_values const& affine, epilogue const& done,
                             saved_statistics const& saved, header const& own, packet_place const& packet,
                             affine_outputs const& gradients, fault_report const& report, workspace const& work,
                             device_limits const& limits, cudaStream_t stream);
  static void double_backward_reduce(second_order<T> const& second, in dy, in x, affine_values const& affine,
                                     epilogue const& done, saved_statistics const& saved, header const& own,
                                     packet_place const& packet, workspace const& work, device_limits const& limits,
                                     cudaStream_t stream);
  static void double_backward_elemt(second_order<T> const& second, in dy, in x, out to_dy, out to_x,
                                    affine_values const& affine, epilogue const& done, saved_statistics const& saved,
                                    gathered_packets const& packets, packet_place const& own,
                                    channel_outputs const& gamma_gradient, fault_report const& report,
                                    device_limits const& limits, cudaStream_t stream);
};

/// The kernels of `basic_batch_norm`, as `gpu_kernels`, of any element type for which some source instantiates `kernels_of`.
struct compiled_kernels {
  template <class T>
  static void load_kernels() {
    kernels_of<T>::load_kernels();
  }
  template <class T>
  static void load_double_backward_kernels() {
    kernels_of<T>::load_double_backward_kernels();
  }
  template <class T, class... Arguments>
  static void local_moments(Arguments const&... arguments) {
    kernels_of<T>::local_moments(arguments...);
  }
  template <class T, class... Arguments>
  static void normalize(Arguments const&... arguments) {
    kernels_of<T>::normalize(arguments...);
  }
  template <class T, class... Arguments>
  static void normalize_constant(Arguments const&... arguments) {
    kernels_of<T>::normalize_constant(arguments...);
  }
  template <class... Arguments>
  static void accept_sums(Arguments const&... arguments) {
    kernels_of<float>::accept_sums(arguments...);
  }
  template <class... Arguments>
  static void agree_on_group(Arguments const&... arguments) {
    kernels_of<float>::agree_on_group(arguments...);
  }
  template <class T, class... Arguments>
  static void keep(Arguments const&... arguments) {
    kernels_of<T>::keep(arguments...);
  }
  template <class T, class... Arguments>
  static void recover(Arguments const&... arguments) {
    kernels_of<T>::recover(arguments...);
  }
  template <class T, class... Arguments>
  static void forward_alone(Arguments const&... arguments) {
    kernels_of<T>::forward_alone(arguments...);
  }
  template <class T, class... Arguments>
  static void backward_reduce(Arguments const&... arguments) {
    kernels_of<T>::backward_reduce(arguments...);
  }
  template <class T, class... Arguments>
  static void backward_elemt(Arguments const&... arguments) {
    kernels_of<T>::backward_elemt(arguments...);
  }
  template <class T, class... Arguments>
  static void backward_alone(Arguments const&... arguments) {
    kernels_of<T>::backward_alone(arguments...);
  }
  template <class T, class... Arguments>
  static void double_backward_reduce(Arguments const&... arguments) {
    kernels_of<T>::double_backward_reduce(arguments...);
  }
  template <class T, class... Arguments>
  static void double_backward_elemt(Arguments const&... arguments) {
    kernels_of<T>::double_backward_elemt(arguments...);
  }
};

} // namespace syncnorm::cuda
