#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace syncnorm::host::detail {

/// Memory that the calling thread keeps from call to call, so that repeated calls allocate nothing. It is the lease's
/// alone while that lives: an executor may run another operation on a thread that waits for its own.
template <class T>
class scratch_lease {
public:
  explicit scratch_lease(std::int64_t size) : memory_{std::exchange(kept(), {})} {
    if (memory_.size() < static_cast<std::size_t>(size)) memory_.resize(static_cast<std::size_t>(size));
  }
  ~scratch_lease() { kept() = std::move(memory_); }
  scratch_lease(scratch_lease const&) = delete;
  scratch_lease& operator=(scratch_lease const&) = delete;

  [[nodiscard]] T* data() { return memory_.data(); }

private:
  static std::vector<T>& kept() {
    thread_local std::vector<T> memory;
    return memory;
  }

  std::vector<T> memory_;
};

} // namespace syncnorm::host::detail
