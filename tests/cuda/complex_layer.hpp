#pragma once

#include <algorithm>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/complex.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/cuda_complex_batch_norm_layer.hpp>

#include "cuda/device_buffer.hpp"
#include "cuda/layer_cases.hpp"
#include "ops/complex_case.hpp"
#include "ops/complex_second_order.hpp"

namespace test {

/// A layer of complex numbers on a device, as the host's is called: with tensors, masks and parameters of the host, which go to the
/// device before a pass, and come back after it. Passes may be captured in a graph.
template <class T, class C, class Kernels>
class complex_layer {
public:
  using number = std::complex<T>;
  using layer_type = syncnorm::cuda::basic_complex_batch_norm<T, C, Kernels>;
  using input = syncnorm::tensor_view<number const>;
  using output = syncnorm::tensor_view<number>;

  complex_layer(C const& comm, std::int64_t channels, syncnorm::batch_norm_layer_options const& options,
                syncnorm::gamma_numbers gamma, bool captured)
      : layer_{comm, channels, options, gamma}, captured_{captured}, gamma_{layer_cases::get(layer_.gamma())},
        gamma_imag_{layer_cases::get(layer_.gamma_imag())}, beta_{layer_cases::get(layer_.beta())} {
    fetch();
    if (captured) layer_.prepare(on_);
  }

  void forward(std::vector<input> const& x, std::vector<output> const& y,
               std::vector<syncnorm::batch_norm_mask> const& masks) {
    step([&](session& of) {
      auto const device_x = of.put(x);
      auto const device_y = of.put(y);
      auto const device_masks = of.put(masks);
      run_on(on_, captured_, [&](cudaStream_t stream) { layer_.forward(device_x, device_y, device_masks, stream); });
    });
  }
  void backward(std::vector<input> const& x, std::vector<input> const& dy, std::vector<output> const& dx,
                std::vector<syncnorm::batch_norm_mask> const& masks) {
    step([&](session& of) {
      auto const device_x = of.put(x), device_dy = of.put(dy);
      auto const device_dx = of.put(dx);
      auto const device_masks = of.put(masks);
      run_on(on_, captured_,
             [&](cudaStream_t stream) { layer_.backward(device_x, device_dy, device_dx, device_masks, {}, stream); });
    });
  }
  void double_backward(syncnorm::complex_second_order<T> second, std::vector<input> const& x,
                       std::vector<input> const& dy, std::vector<output> const& to_dy, std::vector<output> const& to_x,
                       std::vector<syncnorm::batch_norm_mask> const& masks) {
    if (captured_) layer_.reserve_double_backward();
    step([&](session& of) {
      auto const device_x = of.put(x), device_dy = of.put(dy),
                 u = of.put(std::vector<input>(second.dx.begin(), second.dx.end()));
      auto const device_to_dy = of.put(to_dy), device_to_x = of.put(to_x);
      auto const device_masks = of.put(masks);
      auto const copied = [](auto const& values) {
        return device_buffer{std::vector<std::remove_cv_t<typename std::decay_t<decltype(values)>::value_type>>(
            values.begin(), values.end())};
      };
      device_buffer<T> const a = copied(second.gamma_gradient), a_imag = copied(second.gamma_imag_gradient);
      device_buffer<number> const b = copied(second.beta_gradient);
      second.dx = u;
      second.gamma_gradient = a.span(), second.gamma_imag_gradient = a_imag.span(), second.beta_gradient = b.span();
      run_on(on_, captured_, [&](cudaStream_t stream) {
        layer_.double_backward(second, device_x, device_dy, device_to_dy, device_to_x, device_masks, {}, stream);
      });
      on_.wait();
    });
  }
  void eval() { layer_.eval(); }
  void zero_grad() {
    layer_.zero_grad(on_);
    on_.wait();
    fetch();
  }

  [[nodiscard]] std::vector<T>& gamma() { return gamma_; }
  [[nodiscard]] std::vector<T>& gamma_imag() { return gamma_imag_; }
  [[nodiscard]] std::vector<number>& beta() { return beta_; }
  [[nodiscard]] std::vector<T>& gamma_grad() { return gamma_grad_; }
  [[nodiscard]] std::vector<T>& gamma_imag_grad() { return gamma_imag_grad_; }
  [[nodiscard]] std::vector<number>& beta_grad() { return beta_grad_; }
  [[nodiscard]] std::vector<number>& running_mean() { return running_mean_; }
  [[nodiscard]] std::vector<T>& running_var() { return running_var_; }
  [[nodiscard]] std::int64_t num_batches_tracked() const {
    return layer_cases::get(std::span{layer_.num_batches_tracked(), 1})[0];
  }
  struct saved_values {
    std::vector<double> mean, inv_std;
    std::int64_t count;
  };
  [[nodiscard]] saved_values saved() const {
    auto const of = layer_.saved().statistics();
    auto const components = static_cast<std::size_t>(2 * layer_.channels());
    return {layer_cases::get(std::span{of.mean, components}), layer_cases::get(std::span{of.inv_std, components}),
            layer_cases::get(std::span{of.count, 1})[0]};
  }

private:
  /// What is on the device for a pass; outputs come back in the end.
  class session {
  public:
    [[nodiscard]] std::vector<input> put(std::vector<input> const& views) {
      std::vector<input> there;
      for (auto const& view : views) there.push_back(put(view, nullptr));
      return there;
    }
    [[nodiscard]] std::vector<output> put(std::vector<output> const& views) {
      std::vector<output> there;
      for (auto const& view : views) {
        auto const on_device = put(view, view.data);
        there.push_back({const_cast<number*>(on_device.data), view.samples, view.channels, view.spatial, view.stride_n,
                         view.stride_c, view.stride_s});
      }
      return there;
    }
    [[nodiscard]] std::vector<syncnorm::batch_norm_mask> put(std::vector<syncnorm::batch_norm_mask> masks) {
      for (auto& each : masks) {
        auto const size = static_cast<std::size_t>(each.mask.samples * each.mask.spatial);
        masks_.emplace_back(std::vector<std::uint8_t>(each.mask.data, each.mask.data + size));
        each.mask.data = masks_.back().data();
      }
      return masks;
    }
    void bring_back() const {
      for (auto const& each : tensors_)
        if (each.to != nullptr) std::ranges::copy(each.memory.get(), each.to);
    }

  private:
    struct tensor {
      device_buffer<number> memory;
      number* to;
    };
    [[nodiscard]] input put(input view, number* to) {
      if (view.size() == 0) return view;
      auto const reach =
          (view.samples - 1) * view.stride_n + (view.channels - 1) * view.stride_c + (view.spatial - 1) * view.stride_s;
      tensors_.push_back({device_buffer{std::vector<number>(view.data, view.data + reach + 1)}, to});
      view.data = tensors_.back().memory.data();
      return view;
    }
    std::deque<tensor> tensors_;
    std::deque<device_buffer<std::uint8_t>> masks_;
  };

  template <class Step>
  void step(Step const& run) {
    copy(layer_.gamma(), gamma_), copy(layer_.gamma_imag(), gamma_imag_), copy(layer_.beta(), beta_);
    session of;
    run(of);
    layer_.synchronize(on_);
    of.bring_back();
    fetch();
  }
  template <class P>
  static void copy(std::span<P> to, std::vector<P> const& from) {
    if (!from.empty()) copy_to_device(to.data(), from.data(), to.size_bytes());
  }
  void fetch() {
    gamma_grad_ = layer_cases::get(layer_.gamma_grad()), gamma_imag_grad_ = layer_cases::get(layer_.gamma_imag_grad());
    beta_grad_ = layer_cases::get(layer_.beta_grad());
    running_mean_ = layer_cases::get(layer_.running_mean()), running_var_ = layer_cases::get(layer_.running_var());
  }

  layer_type layer_;
  bool captured_;
  stream on_;
  std::vector<T> gamma_, gamma_imag_, gamma_grad_, gamma_imag_grad_, running_var_;
  std::vector<number> beta_, beta_grad_, running_mean_;
};

/// `run_complex_case` of such a layer over `comm`, of the ranks of `host`.
template <class T, class Kernels, class Host, class C>
std::vector<std::string> run_complex_case_on_device(complex_case const& of, Host const& host, C const& comm,
                                                    bool captured) {
  return run_complex_case<T>(of, host, [&] {
    return complex_layer<T, C, Kernels>{comm, of.channels, {.norm = of.norm}, of.gamma, captured};
  });
}

/// And `check_complex_double_backward`.
template <class T, class Kernels, class Host, class C>
std::vector<std::string> check_complex_double_backward_on_device(complex_second_order_case<T> const& problem,
                                                                 Host const& host, C const& comm, bool captured) {
  auto const& of = problem.of;
  return check_complex_double_backward(problem, host, [&] {
    return complex_layer<T, C, Kernels>{comm, of.channels, {.norm = of.norm}, of.gamma, captured};
  });
}

} // namespace test
