#pragma once

#include <complex>
#include <span>

#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/apart.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/packet.hpp>

// What passes over complex numbers are called with, on the host and on a device. Ranks exchange complex channels as their components,
// twice as many real ones.
namespace syncnorm::detail {

/// K micro-batches.
template <complex_component T>
using complex_batches = std::span<tensor_view<std::complex<T> const> const>;
template <complex_component T>
using complex_outputs = std::span<tensor_view<std::complex<T>> const>;

/// What a forward pass over complex numbers reads and writes: K micro-batches that share one statistic, and the state of the layer.
template <complex_component T>
struct complex_forward_operands {
  complex_batches<T> x;
  complex_outputs<T> y;
  complex_affine_parameters<T> affine;
  complex_running_statistics<T> running;
  statistics_scope scope = statistics_scope::all_ranks; ///< or this_rank, which exchanges nothing
  std::span<batch_norm_mask const> masks{};             ///< none, or K
};

/// What a backward pass over complex numbers reads and writes: the K micro-batches of the forward pass. No dx: not needed.
template <complex_component T>
struct complex_backward_operands {
  complex_batches<T> dy, x;
  complex_outputs<T> dx;
  complex_affine_parameters<T> affine;
  complex_affine_gradients<T> gradients;
  std::span<batch_norm_mask const> masks{}; ///< those of the forward pass: none, or K
};

/// Whether gamma is complex, by which ranks add up other sums in a backward pass.
template <complex_component T>
[[nodiscard]] bool has_complex_gamma(complex_affine_parameters<T> const& of) {
  return !of.gamma_imag.empty();
}

/// What a double backward pass over complex numbers reads and writes: the K micro-batches of the backward pass. Of `gradients` gamma's alone.
template <complex_component T>
struct complex_double_backward_operands {
  complex_batches<T> dy, x;
  complex_second_order<T> second;
  complex_affine_parameters<T> affine;
  complex_outputs<T> to_dy, to_x; ///< none, or K; default views: not needed
  complex_affine_gradients<T> gradients;
  std::span<batch_norm_mask const> masks{}; ///< those of the forward pass: none, or K
};

/// What such a pass writes is apart from all that it reads, which it is yet to read for the other output.
template <complex_component T>
void check_outputs_apart(call_check& check, complex_double_backward_operands<T> const& of) {
  check_outputs_apart<std::complex<T>>(
      check, of.x.size(), {"the gradient to dy", of.to_dy}, {"the gradient to x", of.to_x},
      {{"dy", of.dy}, {"x", of.x}, {"the gradient with respect to dx", of.second.dx}}, false);
}

/// Says that there is a gradient of the imaginary part of gamma only where gamma has one.
template <complex_component T>
void check_gamma_gradients(call_check& check, complex_double_backward_operands<T> const& of) {
  check.require((of.gradients.gamma_imag.empty() && of.second.gamma_imag_gradient.empty()) ||
                    has_complex_gamma(of.affine),
                [] { return "gamma is real, but there is a gradient of its imaginary part"; });
}

/// The numbers of a `[C]` array one after the other, real part and imaginary part.
template <class T>
[[nodiscard]] std::span<T> components_of(std::span<std::complex<T>> numbers) {
  return {reinterpret_cast<T*>(numbers.data()), 2 * numbers.size()};
}
template <class T>
[[nodiscard]] std::span<T const> components_of(std::span<std::complex<T> const> numbers) {
  return {reinterpret_cast<T const*>(numbers.data()), 2 * numbers.size()};
}

/// What a header says of complex numbers.
template <complex_component T>
void name_complex(packet_header& own) {
  set_text(own.element, element_traits<std::complex<T>>::name);
}

/// What is said of a complex gamma in a header's `affine`.
template <complex_component T>
void name_complex_gamma(packet_header& own, complex_affine_parameters<T> const& of) {
  if (has_complex_gamma(of)) own.affine += 4;
}

} // namespace syncnorm::detail
