#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/detail/line_allocator.hpp>

namespace syncnorm::host::detail {

/// Memory that the calling thread keeps from call to call, so that repeated calls allocate nothing. It is the lease's
/// alone while that lives: leases nest, and an executor may run another operation on a thread that waits for its own. A lease
/// may end on another thread, which then keeps the memory, up to that of some leases.
template <class T>
class scratch_lease {
public:
  explicit scratch_lease(std::int64_t size) {
    if (auto* const kept = syncnorm::detail::kept_by_thread<pool>(); kept != nullptr && kept->count > 0)
      memory_ = std::move(kept->memory[--kept->count]);
    if (memory_.size() < static_cast<std::size_t>(size)) memory_.resize(static_cast<std::size_t>(size));
  }
  ~scratch_lease() {
    auto* const kept = syncnorm::detail::kept_by_thread<pool>();
    if (kept != nullptr && kept->count < most) kept->memory[kept->count++] = std::move(memory_);
  }
  scratch_lease(scratch_lease const&) = delete;
  scratch_lease& operator=(scratch_lease const&) = delete;

  [[nodiscard]] T* data() { return memory_.data(); }
  [[nodiscard]] T const* data() const { return memory_.data(); }

private:
  using array = std::vector<T, syncnorm::detail::line_allocator<T>>;
  static constexpr std::size_t most = 64;

  /// Allocates nothing itself, as a lease may end where nothing may throw.
  struct pool {
    std::array<array, most> memory;
    std::size_t count = 0;
  };

  array memory_;
};

} // namespace syncnorm::host::detail
