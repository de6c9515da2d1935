#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <cuda_runtime_api.h>

#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::cuda::detail {

using syncnorm::detail::relaxed_capture;

/// Sets `device` to that of a stream, where that can be told: not of the default one, which is of any, of one that is being captured, or
/// by an old driver.
[[nodiscard]] inline cudaError_t ask_device([[maybe_unused]] cudaStream_t stream, [[maybe_unused]] int& device) {
#if CUDART_VERSION >= 12080
  if (stream == nullptr) return cudaSuccess;
  // Some drivers refuse to answer of a stream that is being captured, and the refusal ends the capture.
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  auto code = cudaStreamIsCapturing(stream, &capturing);
  if (code == cudaSuccess && capturing == cudaStreamCaptureStatusNone) {
    relaxed_capture const as_asking_enqueues_nothing;
    code = cudaStreamGetDevice(stream, &device);
  }
  if (code != cudaErrorCallRequiresNewerDriver) return code; // newer than there need be for the rest
  syncnorm::detail::forget_last_error();
#endif
  return cudaSuccess;
}

/// What is wrong with a call on a device: as `call_check`, and that pointers are of that device's memory.
class device_check : public syncnorm::detail::call_check {
public:
  explicit device_check(int device) : device_{device}, stream_device_{device} {}

  /// The calling thread and the stream are of the device. A stream that is being captured is taken for one that is.
  void place(cudaStream_t stream) {
    int current = -1;
    call(cudaGetDevice(&current), "cudaGetDevice");
    require(current == device_,
            [&] { return text("the current device is ", current, ", the memory of the layer is on ", device_); });
    stream_device_ = device_;
    call(ask_device(stream, stream_device_), "cudaStreamGetDevice");
    require(stream_device_ == device_, [&] {
      return text("the stream is of device ", stream_device_, ", the memory of the layer is on ", device_);
    });
  }

  /// Of the stream that was looked at.
  [[nodiscard]] int stream_device() const noexcept { return stream_device_; }

  /// A name is anything that can be written to a stream.
  template <class T, class Name>
  void input(tensor_view<T> const& x, Name name, std::int64_t channels) {
    tensor(x, name, channels);
    if (!failed() && x.size() != 0) memory(x.data, name);
  }
  template <class T, class Name>
  void input_like(tensor_view<T const> const& y, Name name, tensor_view<T const> const& x) {
    same_extents(y, name, x);
    if (!failed() && y.size() != 0) memory(y.data, name);
  }
  template <class T, class Name>
  void written(tensor_view<T> const& y, Name name, tensor_view<T const> const& x) {
    output(y, name, x);
    if (!failed() && y.size() != 0) memory(y.data, name);
  }
  template <class P>
  void values(std::span<P> of_channels, std::string_view name, std::int64_t channels) {
    channel_values(of_channels, name, channels);
    if (!of_channels.empty()) memory(of_channels.data(), name);
  }
  template <class T>
  void epilogue_of(batch_norm_epilogue<T> const& given, tensor_view<T const> const& x, std::size_t k = 0,
                   std::size_t batches = 1) {
    using syncnorm::detail::batch_name;
    batch_name const residual{"the residual", k, batches};
    epilogue(given, x, residual, batch_name{"the mask", k, batches});
    if (failed()) return;
    if (given.has_residual() && x.size() != 0) memory(given.residual.data, residual);
    mask_of(given.mask, x, k, batches);
  }
  template <class T>
  void mask_of(mask_view const& given, tensor_view<T const> const& x, std::size_t k, std::size_t batches) {
    syncnorm::detail::batch_name const name{"the mask", k, batches};
    mask(given, name, x);
    if (!failed() && given && x.count() != 0) memory(given.data, name);
  }

  /// `of` is what passes of so many channels leave.
  template <class Saved>
  void saved(Saved const& of, std::int64_t channels) {
    require(of.channels() == channels, [&] {
      return text("what a forward pass leaves is for ", of.channels(), " channels, expected ", channels);
    });
  }

  /// There is one of `what`, or none where that will do, for each micro-batch of x.
  void batches_of(std::size_t found, std::size_t batches, std::string_view what, bool optional) {
    require(found == batches || (optional && found == 0),
            [&] { return text("there are ", found, " ", what, ", expected ", batches, " as micro-batches of x"); });
  }

  /// `pointer` is aligned to its elements and is memory of the device.
  template <class T, class Name>
  void memory(T* pointer, Name name) {
    if (failed()) return;
    auto const address = reinterpret_cast<std::uintptr_t>(pointer);
    require(address % alignof(T) == 0,
            [&] { return text(name, " is misaligned: its address is no multiple of ", alignof(T)); });
    cudaPointerAttributes found{};
    call(cudaPointerGetAttributes(&found, pointer), "cudaPointerGetAttributes");
    require(found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged,
            [&] { return text(name, " is memory of the host, expected of device ", device_); });
    require(found.type != cudaMemoryTypeDevice || found.device == device_,
            [&] { return text(name, " is memory of device ", found.device, ", expected of ", device_); });
  }

  void call(cudaError_t code, char const* name) {
    if (code != cudaSuccess) syncnorm::detail::forget_last_error();
    require(code == cudaSuccess, [&] { return text(name, ": ", cudaGetErrorString(code)); });
  }

private:
  int device_, stream_device_;
};

/// Makes `device` the current one as long as it lives.
class device_scope {
public:
  explicit device_scope(int device) : device_{device} {
    syncnorm::detail::require_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) syncnorm::detail::require_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  device_scope(device_scope const&) = delete;
  device_scope& operator=(device_scope const&) = delete;
  ~device_scope() {
    if (before_ != device_) cudaSetDevice(before_);
  }

private:
  int device_, before_ = 0;
};

[[nodiscard]] inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  syncnorm::detail::require_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

} // namespace syncnorm::cuda::detail
