#pragma once

#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/cuda/double_backward.cuh>
#include <syncnorm/ops/cuda_batch_norm.cuh>

#include "cuda/compiled_kernels.hpp"

// The members of kernels_of, for a source that instantiates it for one element type.
namespace test {

namespace gpu = syncnorm::cuda;

template <class T>
void kernels_of<T>::load_kernels() {
  gpu::load_kernels<T>();
}

template <class T>
void kernels_of<T>::load_double_backward_kernels() {
  gpu::load_double_backward_kernels<T>();
}

template <class T>
void kernels_of<T>::local_moments(in x, syncnorm::mask_view mask, header const& own, gpu::packet_place const& packet,
                                  gpu::workspace const& work, gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::local_moments<T>(x, mask, own, packet, work, limits, stream);
}

template <class T>
void kernels_of<T>::normalize(in x, out y, gpu::affine_values const& affine, epilogue const& done,
                              syncnorm::batch_norm_options const& options, gpu::gathered_packets const& packets,
                              gpu::saved_statistics const& saved, gpu::running_outputs const& running,
                              gpu::fault_report const& report, gpu::workspace const& work,
                              gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::normalize<T>(x, y, affine, done, options, packets, saved, running, report, work, limits, stream);
}

template <class T>
void kernels_of<T>::normalize_constant(in x, out y, gpu::affine_values const& affine, epilogue const& done,
                                       syncnorm::batch_norm_options const& options, gpu::channel_values const& mean,
                                       gpu::channel_values const& var, gpu::saved_statistics const& saved,
                                       std::int64_t const* kept_state, gpu::fault_report const& report,
                                       gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::normalize_constant<T>(x, y, affine, done, options, mean, var, saved, kept_state, report, limits, stream);
}

template <class T>
void kernels_of<T>::accept_sums(gpu::reduced_packets const& of, gpu::fault_report const& report, cudaStream_t stream) {
  gpu::accept_sums(of, report, stream);
}

template <class T>
void kernels_of<T>::agree_on_group(gpu::gathered_headers const& headers, bool forward, gpu::fault_report const& report,
                                   cudaStream_t stream) {
  gpu::agree_on_group(headers, forward, report, stream);
}

template <class T>
void kernels_of<T>::keep(out x, gpu::affine_values const& affine, syncnorm::activation const& of,
                         gpu::kept_channels const& kept, gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::keep<T>(x, affine, of, kept, limits, stream);
}

template <class T>
void kernels_of<T>::recover(out y, epilogue const& done, gpu::affine_values const& affine,
                            gpu::saved_statistics const& saved, gpu::kept_channels const& kept,
                            gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::recover<T>(y, done, affine, saved, kept, limits, stream);
}

template <class T>
void kernels_of<T>::forward_alone(in x, out y, gpu::affine_values const& affine, epilogue const& done,
                                  syncnorm::batch_norm_options const& options, header const& own,
                                  gpu::packet_place const& packet, gpu::saved_statistics const& saved,
                                  gpu::running_outputs const& running, gpu::fault_report const& report,
                                  gpu::workspace const& work, gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::forward_alone<T>(x, y, affine, done, options, own, packet, saved, running, report, work, limits, stream);
}

template <class T>
void kernels_of<T>::backward_reduce(in dy, in x, gpu::affine_values const& affine, epilogue const& done,
                                    gpu::saved_statistics const& saved, header const& own,
                                    gpu::packet_place const& packet, gpu::workspace const& work,
                                    gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::backward_reduce<T>(dy, x, affine, done, saved, own, packet, work, limits, stream);
}

template <class T>
void kernels_of<T>::backward_elemt(in dy, in x, out dx, out dresidual, gpu::affine_values const& affine,
                                   epilogue const& done, gpu::saved_statistics const& saved,
                                   gpu::gathered_packets const& packets, gpu::packet_place const& own,
                                   gpu::affine_outputs const& gradients, gpu::fault_report const& report,
                                   gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::backward_elemt<T>(dy, x, dx, dresidual, affine, done, saved, packets, own, gradients, report, limits, stream);
}

template <class T>
void kernels_of<T>::backward_alone(in dy, in x, out dx, out dresidual, gpu::affine_values const& affine,
                                   epilogue const& done, gpu::saved_statistics const& saved, header const& own,
                                   gpu::packet_place const& packet, gpu::affine_outputs const& gradients,
                                   gpu::fault_report const& report, gpu::workspace const& work,
                                   gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::backward_alone<T>(dy, x, dx, dresidual, affine, done, saved, own, packet, gradients, report, work, limits,
                         stream);
}

template <class T>
void kernels_of<T>::double_backward_reduce(gpu::second_order<T> const& second, in dy, in x,
                                           gpu::affine_values const& affine, epilogue const& done,
                                           gpu::saved_statistics const& saved, header const& own,
                                           gpu::packet_place const& packet, gpu::workspace const& work,
                                           gpu::device_limits const& limits, cudaStream_t stream) {
  gpu::double_backward_reduce<T>(second, dy, x, affine, done, saved, own, packet, work, limits, stream);
}

template <class T>
void kernels_of<T>::double_backward_elemt(gpu::second_order<T> const& second, in dy, in x, out to_dy, out to_x,
                                          gpu::affine_values const& affine, epilogue const& done,
                                          gpu::saved_statistics const& saved, gpu::gathered_packets const& packets,
                                          gpu::packet_place const& own, gpu::channel_outputs const& gamma_gradient,
                                          gpu::fault_report const& report, gpu::device_limits const& limits,
                                          cudaStream_t stream) {
  gpu::double_backward_elemt<T>(second, dy, x, to_dy, to_x, affine, done, saved, packets, own, gamma_gradient, report,
                                limits, stream);
}

} // namespace test
