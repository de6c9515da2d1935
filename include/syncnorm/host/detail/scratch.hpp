#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace syncnorm::host::detail {

/// Memory that the calling thread keeps from call to call, so that repeated calls allocate nothing. It is the lease's
/// alone while that lives: leases nest, and an executor may run another operation on a thread that waits for its own.
template <class T>
class scratch_lease {
public:
  explicit scratch_lease(std::int64_t size) {
    auto& kept = pool();
    if (kept.empty()) {
      kept.reserve(8);
    } else {
      memory_ = std::move(kept.back());
      kept.pop_back();
    }
    if (memory_.size() < static_cast<std::size_t>(size)) memory_.resize(static_cast<std::size_t>(size));
  }
  ~scratch_lease() { pool().push_back(std::move(memory_)); }
  scratch_lease(scratch_lease const&) = delete;
  scratch_lease& operator=(scratch_lease const&) = delete;

  [[nodiscard]] T* data() { return memory_.data(); }
  [[nodiscard]] T const* data() const { return memory_.data(); }

private:
  static std::vector<std::vector<T>>& pool() {
    thread_local std::vector<std::vector<T>> kept;
    return kept;
  }

  std::vector<T> memory_;
};

} // namespace syncnorm::host::detail
