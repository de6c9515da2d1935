#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace syncnorm::host::detail {

/// Memory that the calling thread keeps from call to call, so that repeated calls allocate nothing. It is the lease's
/// alone while that lives: leases nest, and an executor may run another operation on a thread that waits for its own. A lease
/// may end on another thread, which then keeps the memory, up to that of some leases.
template <class T>
class scratch_lease {
public:
  explicit scratch_lease(std::int64_t size) {
    if (auto& kept = pool(); !kept.empty()) {
      memory_ = std::move(kept.back());
      kept.pop_back();
    }
    if (memory_.size() < static_cast<std::size_t>(size)) memory_.resize(static_cast<std::size_t>(size));
  }
  ~scratch_lease() {
    if (auto& kept = pool(); kept.size() < most) kept.push_back(std::move(memory_));
  }
  scratch_lease(scratch_lease const&) = delete;
  scratch_lease& operator=(scratch_lease const&) = delete;

  [[nodiscard]] T* data() { return memory_.data(); }
  [[nodiscard]] T const* data() const { return memory_.data(); }

private:
  static constexpr std::size_t most = 64;

  static std::vector<std::vector<T>>& pool() {
    thread_local auto kept = [] {
      std::vector<std::vector<T>> none;
      none.reserve(most);
      return none;
    }();
    return kept;
  }

  std::vector<T> memory_;
};

} // namespace syncnorm::host::detail
