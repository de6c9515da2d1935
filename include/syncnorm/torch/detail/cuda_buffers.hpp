#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <cuda_runtime_api.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/cuda_check.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/cuda/workspace.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>
#include <syncnorm/torch/detail/cuda_kept.hpp>
#include <syncnorm/torch/detail/cuda_stream.hpp>
#include <syncnorm/torch/detail/device_passes.hpp>

namespace syncnorm::torch::detail {

/// What a module's passes on one device share, under one exchange policy. Passes may be on different streams, each of which
/// comes after those before it; but for those that are captured in a graph, whose order is the user's.
class cuda_buffers {
public:
  /// Allocates on the device, once, and waits for that.
  template <communicator C>
  cuda_buffers(C const& comm, at::Device device, std::int64_t channels, exchange_policy policy)
      : cuda_buffers{device, channels, syncnorm::size(comm),
                     syncnorm::detail::gathers_on_stream(policy, comm, channels, 2),
                     syncnorm::detail::gathers_on_stream(policy, comm, channels, 7)} {}
  cuda_buffers(cuda_buffers const&) = delete;
  cuda_buffers& operator=(cuda_buffers const&) = delete;
  /// Waits for the passes in flight, since what they use goes.
  ~cuda_buffers() {
    if (last_) cudaEventSynchronize(done_);
    cudaEventDestroy(done_);
  }

  /// The turn of a pass with the buffers `of` one device: its current stream, which comes after the passes before, and before those
  /// after. The device is the current one meanwhile. Also where the pass throws, which may be when everything is enqueued.
  class turn {
  public:
    explicit turn(std::span<cuda_buffers* const> of)
        : of_{of}, there_{of.front()->device_}, stream_{current_stream(of.front()->device_)},
          captured_{cuda::detail::is_capturing(stream_)} {
      if (captured_) return;
      for (auto const* buffers : of_) buffers->order(stream_);
    }
    turn(turn const&) = delete;
    turn& operator=(turn const&) = delete;
    ~turn() {
      if (captured_) return;
      for (auto* buffers : of_)
        if (cudaEventRecord(buffers->done_, stream_) == cudaSuccess) buffers->last_ = stream_;
    }
    [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

  private:
    std::span<cuda_buffers* const> of_;
    c10::DeviceGuard there_;
    cudaStream_t stream_;
    bool captured_;
  };

  /// f(workspace, stream) in turn. Elements are of type `T`.
  template <class Kernels, class T, class F>
  void run(F const& f) {
    load<Kernels, T>();
    auto* const self = this;
    turn const own{{&self, 1}};
    f(workspace_, own.stream());
  }

  [[nodiscard]] at::Device device() const noexcept { return device_; }
  [[nodiscard]] cuda::batch_norm_workspace& workspace() noexcept { return workspace_; }

  /// Lest a first launch wait for the device, and for other ranks there.
  template <class Kernels, class T>
  void load() {
    load_once(loaded_.at(static_cast<std::size_t>(cuda::kind_of<T>)),
              [] { cuda::kernels_of<T, Kernels>::load_kernels(); });
  }
  template <class Kernels, class T>
  void load_double_backward() {
    load_once(double_loaded_.at(static_cast<std::size_t>(cuda::kind_of<T>)),
              [] { cuda::kernels_of<T, Kernels>::load_double_backward_kernels(); });
  }

  /// Waits on the current stream, as long as the communicator lets it, and throws what has failed.
  template <communicator C>
  void synchronize(C const& comm) {
    c10::DeviceGuard const there{device_};
    auto const stream = current_stream(device_);
    order(stream);
    cuda::batch_norm_workspace::wait(comm, stream);
    workspace_.raise();
    syncnorm::check(comm);
  }

  [[nodiscard]] kept_room& room() noexcept { return room_; }

  /// Memory in place of what a pass could not allocate, which reports that to the other ranks.
  [[nodiscard]] cuda::batch_norm_saved& spare() noexcept { return spare_; }

private:
  cuda_buffers(at::Device device, std::int64_t channels, int ranks, bool gathers, bool double_gathers)
      : device_{device}, there_{device}, limits_{cuda::current_limits()},
        workspace_{channels, ranks, limits_, cuda::workspace_bytes(channels, limits_), gathers, double_gathers},
        spare_{channels} {
    syncnorm::detail::require_cuda(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming),
                                   "cudaEventCreateWithFlags");
    there_.reset();
  }

  template <class Load>
  void load_once(bool& loaded, Load const& load) {
    if (std::exchange(loaded, true)) return;
    c10::DeviceGuard const there{device_};
    try {
      load();
    } catch (cuda_error const&) { // what is not loaded is not launched either, of which all ranks hear
    }
  }

  void order(cudaStream_t stream) const {
    if (last_ && *last_ != stream)
      syncnorm::detail::require_cuda(cudaStreamWaitEvent(stream, done_, 0), "cudaStreamWaitEvent");
  }

  at::Device device_;
  std::optional<c10::DeviceGuard> there_; // while the rest is made
  cuda::device_limits limits_;
  cuda::batch_norm_workspace workspace_;
  cuda::batch_norm_saved spare_;
  kept_room room_;
  cudaEvent_t done_ = nullptr;
  std::optional<cudaStream_t> last_{};
  std::array<bool, 4> loaded_{}, double_loaded_{}; // by value_kind
};

/// What a forward pass leaves on a device, in memory of libtorch's.
struct cuda_record final : device_record {
  std::shared_ptr<cuda_buffers> buffers;
  at::Tensor memory;
  std::optional<cuda::batch_norm_saved> own;

  explicit cuda_record(std::shared_ptr<cuda_buffers> of) : buffers{std::move(of)} {}
  void allocate(std::int64_t channels, at::Device device) {
    auto const bytes = static_cast<std::int64_t>(cuda::batch_norm_saved::bytes(channels));
    memory = at::empty({bytes}, at::TensorOptions{}.dtype(at::kByte).device(device));
    own.emplace(channels, static_cast<std::byte*>(memory.data_ptr()));
  }
  [[nodiscard]] cuda::batch_norm_saved& saved() { return own ? *own : buffers->spare(); }
};

} // namespace syncnorm::torch::detail
