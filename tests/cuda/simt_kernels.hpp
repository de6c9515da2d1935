#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include <syncnorm/cuda/agreement.hpp>
#include <syncnorm/cuda/backward.hpp>
#include <syncnorm/cuda/complex_passes.hpp>
#include <syncnorm/cuda/detail/launch.hpp>
#include <syncnorm/cuda/double_backward.hpp>
#include <syncnorm/cuda/forward.hpp>
#include <syncnorm/cuda/in_place.hpp>
#include <syncnorm/cuda/load.hpp>

#include "cuda/fake_runtime.hpp"
#include "simt/machine.hpp"

namespace test {

/// Launches kernels on the interpreter of tests/simt, in the order of a stream of `fake_cuda`: the kernels' own source, over all
/// memory that the stand-in for the CUDA runtime has allocated.
struct simt_kernels {
  static constexpr int block = 64;
  static constexpr bool has_clusters(int architecture) { return architecture >= 900; }
  static constexpr int threads(int) { return block; }

  /// Unloads all kernels: a launch of one that has not been loaded since is counted as a call of "first launch".
  static void unload() { ++unloaded_; }

  template <class Entry>
  static cudaError_t load() {
    loaded_after<Entry>() = unloaded_.load();
    return fake_cuda::enter("cudaFuncGetAttributes");
  }

  template <class Entry>
  static cudaError_t launch(syncnorm::cuda::detail::launch_shape const& shape, typename Entry::arguments const& a,
                            cudaStream_t stream) {
    if (auto const code = fake_cuda::enter("kernel"); code != cudaSuccess) return code;
    if (loaded_after<Entry>().exchange(unloaded_) != unloaded_) (void)fake_cuda::enter("first launch");
    if (shape.blocks == 0 || shape.dynamic_shared > shape.most_dynamic_shared) return cudaErrorInvalidConfiguration;
    int current = 0;
    cudaGetDevice(&current);
    if (fake_cuda::device_of(stream) != current) return cudaErrorInvalidResourceHandle;
    return fake_cuda::enqueue(stream, [shape, a] {
      borrowed_machine const borrowed;
      auto& machine = *borrowed;
      machine.memory.clear();
      auto const device = fake_cuda::addresses();
      machine.memory.find_at(device.begin, device.end, device.shift);
      fake_cuda::for_each_allocation([&](void* data, std::size_t bytes) {
        if (bytes < 4096 || bytes % 2 != 0) // which may be a mask
          machine.memory.add("device memory", static_cast<std::uint8_t*>(data), bytes);
        else
          machine.memory.add("device memory", static_cast<std::uint16_t*>(data), bytes / 2);
      });
      try {
        machine.launch({shape.blocks, shape.threads, static_cast<std::size_t>(shape.dynamic_shared), 0, shape.cluster,
                        shape.early},
                       [&](auto const& hw) { Entry::template run<block>(hw, a); });
      } catch (simt::violation const& what) {
        fake_cuda::note(what.what());
      }
    });
  }

private:
  /// A machine for one launch, of those that streams have used before, whose fibers have their stacks.
  class borrowed_machine {
  public:
    borrowed_machine() {
      std::lock_guard const hold{mutex_};
      if (idle_.empty()) idle_.push_back(std::make_unique<simt::machine>());
      machine_ = std::move(idle_.back());
      idle_.pop_back();
    }
    ~borrowed_machine() {
      std::lock_guard const hold{mutex_};
      idle_.push_back(std::move(machine_));
    }
    borrowed_machine(borrowed_machine const&) = delete;
    borrowed_machine& operator=(borrowed_machine const&) = delete;

    [[nodiscard]] simt::machine& operator*() const { return *machine_; }

  private:
    inline static std::mutex mutex_;
    inline static std::vector<std::unique_ptr<simt::machine>> idle_;
    std::unique_ptr<simt::machine> machine_;
  };

  inline static std::atomic<int> unloaded_ = 1;
  /// On the current device.
  template <class Entry>
  static std::atomic<int>& loaded_after() {
    static std::array<std::atomic<int>, 16> on{};
    int current = 0;
    cudaGetDevice(&current);
    return on.at(static_cast<std::size_t>(current));
  }
};

} // namespace test
