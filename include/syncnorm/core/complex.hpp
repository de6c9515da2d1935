#pragma once

#include <complex>
#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm {

/// Of what complex numbers of tensors and parameters have two.
template <class T>
concept complex_component = std::same_as<T, float> || std::same_as<T, double>;

/// Complex numbers, whose sums are kept in the type of their components. No `element`: what takes one takes no complex numbers.
template <complex_component T>
struct element_traits<std::complex<T>> {
  using accumulate_type = T;
  static constexpr std::string_view name = std::is_same_v<T, float> ? "complex float" : "complex double";
};

/// What the gamma of a layer of complex numbers is made of.
enum class gamma_numbers : std::uint8_t { real, complex };

/// The affine parameters of complex channels, `[C]` each. An empty span stands for a real part of gamma of 1, an imaginary one of 0, or
/// beta = 0.
template <complex_component P>
struct complex_affine_parameters {
  std::span<P const> gamma{}; ///< its real part
  std::span<std::complex<P> const> beta{};
  std::span<P const> gamma_imag{};
};

/// Where their gradients go, `[C]` each. An empty span: not needed.
template <complex_component P>
struct complex_affine_gradients {
  std::span<P> gamma{};
  std::span<std::complex<P>> beta{};
  std::span<P> gamma_imag{};
};

/// The gradients of a loss with respect to what a backward pass of K micro-batches gave: dx `[N_k, C, S_k]`, none or one for each, and
/// this rank's gradients of gamma and beta, `[C]` each. A default view and empty spans stand for 0.
template <complex_component T>
struct complex_second_order {
  std::span<tensor_view<std::complex<T> const> const> dx{};
  std::span<T const> gamma_gradient{}; ///< of its real part
  std::span<std::complex<T> const> beta_gradient{};
  std::span<T const> gamma_imag_gradient{};
};

/// The running statistics of complex channels, `[C]` each, and their counter. Empty spans: not tracked.
template <complex_component P>
struct complex_running_statistics {
  std::span<std::complex<P>> mean{};
  std::span<P> var{};
  std::int64_t* num_batches_tracked = nullptr;
};

/// Which positions `[N, S]` count, by a default mask all, and what becomes of the outputs of the others.
struct batch_norm_mask {
  mask_view mask{};
  masked_outputs masked = masked_outputs::normalized;
};

} // namespace syncnorm
