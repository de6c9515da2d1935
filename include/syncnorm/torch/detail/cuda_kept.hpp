#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/recoverable.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/cuda_batch_norm_in_place.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_memory.hpp>
#include <syncnorm/torch/detail/cuda_stream.hpp>

namespace syncnorm::torch::detail {

/// What a pass in place on a CUDA device keeps of each x, in memory of libtorch's; nothing where it is not recorded.
template <class T>
struct cuda_kept {
  std::vector<at::Tensor> memory;
  std::vector<cuda::batch_norm_kept<T>> of;

  void allocate(std::int64_t channels, std::int64_t room, tensor_view<T const> const& x, at::Device device) {
    auto const bytes = static_cast<std::int64_t>(cuda::batch_norm_kept<T>::bytes(channels, room, x.count()));
    auto const& made = memory.emplace_back(at::empty({bytes}, at::TensorOptions{}.dtype(at::kByte).device(device)));
    of.emplace_back(channels, room, x, static_cast<std::byte*>(made.data_ptr())).of_copies = true;
  }
};

/// For how many channels passes in place of a module make room, since only the device knows weight and bias: for as many as the latest
/// pass has kept that the host knows of, and some besides. It waits for the stream to read weight and bias before the first pass, and
/// again where they are in other memory, or where there was no room for a pass.
class kept_room {
public:
  /// Elements are of type `T`; weight and bias are contiguous or undefined. `wait` waits for a stream.
  template <class T>
  [[nodiscard]] std::int64_t channels(std::int64_t all, at::Tensor const& weight, at::Tensor const& bias,
                                      activation const& of, at::Device device, function_ref<void(cudaStream_t)> wait) {
    auto latest = latest_kept();
    if (!cuda::has_inverse<T>(of)) return all;
    source const now{address_of(weight), address_of(bias), recoverable_ratio<T>};
    auto needed = read_ == now ? latest.load(std::memory_order_relaxed) : -1;
    if (needed < 0) {
      needed = read<T>(all, weight, bias, device, wait);
      latest.store(needed, std::memory_order_relaxed);
      read_ = now;
    }
    return std::min(all, needed + std::max<std::int64_t>(4, (all + 15) / 16));
  }

  /// Lets the host know what a pass has kept in the end, also where that throws; −1 where it kept nothing for a fault. It ends in the
  /// turn of that pass, since its copy is a part of that.
  class watch {
  public:
    watch(kept_room& room, std::int64_t* state, cudaStream_t stream) : room_{room}, state_{state}, stream_{stream} {
      if (state_ != nullptr)
        syncnorm::detail::require_cuda(cudaMemsetAsync(state, 0xff, sizeof *state, stream), "cudaMemsetAsync");
    }
    watch(watch const&) = delete;
    watch& operator=(watch const&) = delete;
    ~watch() {
      if (state_ != nullptr)
        cudaMemcpyAsync(room_.memory_.host(), state_, sizeof *state_, cudaMemcpyDeviceToHost, stream_);
    }

  private:
    kept_room& room_;
    std::int64_t* state_;
    cudaStream_t stream_;
  };

private:
  struct source {
    void const *weight = nullptr, *bias = nullptr;
    double ratio = 0;
    bool operator==(source const&) const = default;
  };
  [[nodiscard]] static void const* address_of(at::Tensor const& tensor) {
    return tensor.defined() ? tensor.data_ptr() : nullptr;
  }
  /// Written to by the device, too.
  [[nodiscard]] std::atomic_ref<std::int64_t> latest_kept() {
    if (memory_.host() == nullptr) memory_ = cuda::detail::mapped_memory{sizeof(std::int64_t)};
    return std::atomic_ref{*reinterpret_cast<std::int64_t*>(memory_.host())};
  }

  template <class T>
  [[nodiscard]] static std::int64_t read(std::int64_t all, at::Tensor const& weight, at::Tensor const& bias,
                                         at::Device device, function_ref<void(cudaStream_t)> wait) {
    auto const stream = current_stream(device);
    if (cuda::detail::is_capturing(stream))
      throw invalid_argument_error{"the stream is being captured in a graph before there was a pass in place: run such "
                                   "a step outside of a graph first"};
    wait(stream);
    auto const on_host = [&](at::Tensor const& of, double otherwise) -> at::Tensor {
      auto const wide = at::TensorOptions{}.dtype(at::kDouble);
      return of.defined() ? of.detach().cpu().to(at::kDouble) : at::full({all}, otherwise, wide);
    };
    at::Tensor const gamma = on_host(weight, 1), beta = on_host(bias, 0);
    std::int64_t needed = 0;
    for (std::int64_t c = 0; c < std::min({all, gamma.numel(), beta.numel()}); ++c)
      if (!is_recoverable(gamma.data_ptr<double>()[c], beta.data_ptr<double>()[c], 1, recoverable_ratio<T>)) ++needed;
    return needed;
  }

  std::optional<source> read_{};
  cuda::detail::mapped_memory memory_;
};

} // namespace syncnorm::torch::detail
