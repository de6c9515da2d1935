#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/packet_header.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace test {

/// The launchers of cuda/ for one element type, which nvcc has compiled elsewhere; see compiled_kernels.cuh.
template <class T>
struct kernels_of {
  using in = syncnorm::tensor_view<T const>;
  using out = syncnorm::tensor_view<T>;
  using epilogue = syncnorm::batch_norm_epilogue<T>;
  using header = syncnorm::detail::packet_header;

  static void load_kernels();
  static void load_double_backward_kernels();
  static void local_moments(in x, syncnorm::mask_view mask, header const& own,
                            syncnorm::cuda::packet_place const& packet, syncnorm::cuda::workspace const& work,
                            syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
  static void normalize(in x, out y, syncnorm::cuda::affine_values const& affine, epilogue const& done,
                        syncnorm::batch_norm_options const& options, syncnorm::cuda::gathered_packets const& packets,
                        syncnorm::cuda::saved_statistics const& saved, syncnorm::cuda::running_outputs const& running,
                        syncnorm::cuda::fault_report const& report, syncnorm::cuda::workspace const& work,
                        syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
  static void normalize_constant(in x, out y, syncnorm::cuda::affine_values const& affine, epilogue const& done,
                                 syncnorm::batch_norm_options const& options,
                                 syncnorm::cuda::channel_values const& mean, syncnorm::cuda::channel_values const& var,
                                 syncnorm::cuda::saved_statistics const& saved, std::int64_t const* kept_state,
                                 syncnorm::cuda::fault_report const& report,
                                 syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
  static void accept_sums(syncnorm::cuda::reduced_packets const& of, syncnorm::cuda::fault_report const& report,
                          cudaStream_t stream);
  static void agree_on_group(syncnorm::cuda::gathered_headers const& headers, bool forward,
                             syncnorm::cuda::fault_report const& report, cudaStream_t stream);
  static void keep(out x, syncnorm::cuda::affine_values const& affine, syncnorm::activation const& of,
                   syncnorm::cuda::kept_channels const& kept, syncnorm::cuda::device_limits const& limits,
                   cudaStream_t stream);
  static void recover(out y, epilogue const& done, syncnorm::cuda::affine_values const& affine,
                      syncnorm::cuda::saved_statistics const& saved, syncnorm::cuda::kept_channels const& kept,
                      syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
  static void forward_alone(in x, out y, syncnorm::cuda::affine_values const& affine, epilogue const& done,
                            syncnorm::batch_norm_options const& options, header const& own,
                            syncnorm::cuda::packet_place const& packet, syncnorm::cuda::saved_statistics const& saved,
                            syncnorm::cuda::running_outputs const& running, syncnorm::cuda::fault_report const& report,
                            syncnorm::cuda::workspace const& work, syncnorm::cuda::device_limits const& limits,
                            cudaStream_t stream);
  static void backward_reduce(in dy, in x, syncnorm::cuda::affine_values const& affine, epilogue const& done,
                              syncnorm::cuda::saved_statistics const& saved, header const& own,
                              syncnorm::cuda::packet_place const& packet, syncnorm::cuda::workspace const& work,
                              syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
  static void backward_elemt(in dy, in x, out dx, out dresidual, syncnorm::cuda::affine_values const& affine,
                             epilogue const& done, syncnorm::cuda::saved_statistics const& saved,
                             syncnorm::cuda::gathered_packets const& packets, syncnorm::cuda::packet_place const& own,
                             syncnorm::cuda::affine_outputs const& gradients,
                             syncnorm::cuda::fault_report const& report, syncnorm::cuda::device_limits const& limits,
                             cudaStream_t stream);
  static void backward_alone(in dy, in x, out dx, out dresidual, syncnorm::cuda::affine_values const& affine,
                             epilogue const& done, syncnorm::cuda::saved_statistics const& saved, header const& own,
                             syncnorm::cuda::packet_place const& packet,
                             syncnorm::cuda::affine_outputs const& gradients,
                             syncnorm::cuda::fault_report const& report, syncnorm::cuda::workspace const& work,
                             syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
  static void double_backward_reduce(syncnorm::cuda::second_order<T> const& second, in dy, in x,
                                     syncnorm::cuda::affine_values const& affine, epilogue const& done,
                                     syncnorm::cuda::saved_statistics const& saved, header const& own,
                                     syncnorm::cuda::packet_place const& packet, syncnorm::cuda::workspace const& work,
                                     syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
  static void double_backward_elemt(syncnorm::cuda::second_order<T> const& second, in dy, in x, out to_dy, out to_x,
                                    syncnorm::cuda::affine_values const& affine, epilogue const& done,
                                    syncnorm::cuda::saved_statistics const& saved,
                                    syncnorm::cuda::gathered_packets const& packets,
                                    syncnorm::cuda::packet_place const& own,
                                    syncnorm::cuda::channel_outputs const& gamma_gradient,
                                    syncnorm::cuda::fault_report const& report,
                                    syncnorm::cuda::device_limits const& limits, cudaStream_t stream);
};

/// The kernels of a layer, of any element type for which `kernels_of` is instantiated.
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

} // namespace test
