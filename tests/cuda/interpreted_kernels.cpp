// kernels_of over the interpreter of tests/simt, where no nvcc has compiled it.
#include <syncnorm/cuda/compiled_kernels.hpp>

#include <syncnorm/core/cuda_element.hpp>

#include "cuda/simt_kernels.hpp"

namespace syncnorm::cuda {

template <class T>
void kernels_of<T>::load_kernels() {
  test::simt_kernels::load_kernels<T>();
}

template <class T>
void kernels_of<T>::load_double_backward_kernels() {
  test::simt_kernels::load_double_backward_kernels<T>();
}

template <class T>
void kernels_of<T>::local_moments(in x, mask_view mask, header const& own, packet_place const& packet,
                                  workspace const& work, device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::local_moments<T>(x, mask, own, packet, work, limits, stream);
}

template <class T>
void kernels_of<T>::normalize(in x, out y, affine_values const& affine, epilogue const& done,
                              batch_norm_options const& options, gathered_packets const& packets,
                              saved_statistics const& saved, running_outputs const& running, fault_report const& report,
                              workspace const& work, device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::normalize<T>(x, y, affine, done, options, packets, saved, running, report, work, limits, stream);
}

template <class T>
void kernels_of<T>::normalize_constant(in x, out y, affine_values const& affine, epilogue const& done,
                                       batch_norm_options const& options, channel_values const& mean,
                                       channel_values const& var, saved_statistics const& saved,
                                       std::int64_t const* kept_state, fault_report const& report,
                                       device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::normalize_constant<T>(x, y, affine, done, options, mean, var, saved, kept_state, report, limits,
                                            stream);
}

template <class T>
void kernels_of<T>::accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) {
  test::simt_kernels::accept_sums(of, report, stream);
}

template <class T>
void kernels_of<T>::agree_on_group(gathered_headers const& headers, bool forward, fault_report const& report,
                                   cudaStream_t stream) {
  test::simt_kernels::agree_on_group(headers, forward, report, stream);
}

template <class T>
void kernels_of<T>::keep(out x, affine_values const& affine, activation const& of, kept_channels const& kept,
                         device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::keep<T>(x, affine, of, kept, limits, stream);
}

template <class T>
void kernels_of<T>::recover(out y, epilogue const& done, affine_values const& affine, saved_statistics const& saved,
                            kept_channels const& kept, device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::recover<T>(y, done, affine, saved, kept, limits, stream);
}

template <class T>
void kernels_of<T>::forward_alone(in x, out y, affine_values const& affine, epilogue const& done,
                                  batch_norm_options const& options, header const& own, packet_place const& packet,
                                  saved_statistics const& saved, running_outputs const& running,
                                  fault_report const& report, workspace const& work, device_limits const& limits,
                                  cudaStream_t stream) {
  test::simt_kernels::forward_alone<T>(x, y, affine, done, options, own, packet, saved, running, report, work, limits,
                                       stream);
}

template <class T>
void kernels_of<T>::backward_reduce(in dy, in x, affine_values const& affine, epilogue const& done,
                                    saved_statistics const& saved, header const& own, packet_place const& packet,
                                    workspace const& work, device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::backward_reduce<T>(dy, x, affine, done, saved, own, packet, work, limits, stream);
}

template <class T>
void kernels_of<T>::backward_elemt(in dy, in x, out dx, out dresidual, affine_values const& affine,
                                   epilogue const& done, saved_statistics const& saved, gathered_packets const& packets,
                                   packet_place const& own, affine_outputs const& gradients, fault_report const& report,
                                   device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::backward_elemt<T>(dy, x, dx, dresidual, affine, done, saved, packets, own, gradients, report,
                                        limits, stream);
}

template <class T>
void kernels_of<T>::backward_alone(in dy, in x, out dx, out dresidual, affine_values const& affine,
                                   epilogue const& done, saved_statistics const& saved, header const& own,
                                   packet_place const& packet, affine_outputs const& gradients,
                                   fault_report const& report, workspace const& work, device_limits const& limits,
                                   cudaStream_t stream) {
  test::simt_kernels::backward_alone<T>(dy, x, dx, dresidual, affine, done, saved, own, packet, gradients, report, work,
                                        limits, stream);
}

template <class T>
void kernels_of<T>::double_backward_reduce(second_order<T> const& second, in dy, in x, affine_values const& affine,
                                           epilogue const& done, saved_statistics const& saved, header const& own,
                                           packet_place const& packet, workspace const& work,
                                           device_limits const& limits, cudaStream_t stream) {
  test::simt_kernels::double_backward_reduce<T>(second, dy, x, affine, done, saved, own, packet, work, limits, stream);
}

template <class T>
void kernels_of<T>::double_backward_elemt(second_order<T> const& second, in dy, in x, out to_dy, out to_x,
                                          affine_values const& affine, epilogue const& done,
                                          saved_statistics const& saved, gathered_packets const& packets,
                                          packet_place const& own, channel_outputs const& gamma_gradient,
                                          fault_report const& report, device_limits const& limits,
                                          cudaStream_t stream) {
  test::simt_kernels::double_backward_elemt<T>(second, dy, x, to_dy, to_x, affine, done, saved, packets, own,
                                               gamma_gradient, report, limits, stream);
}

} // namespace syncnorm::cuda

template struct syncnorm::cuda::kernels_of<float>;
template struct syncnorm::cuda::kernels_of<double>;
template struct syncnorm::cuda::kernels_of<__half>;
template struct syncnorm::cuda::kernels_of<__nv_bfloat16>;
