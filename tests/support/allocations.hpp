#pragma once

namespace test {

/// Whether calls of `operator new` on the calling thread count.
void count_allocations(bool on);

/// Those counted, on all threads, since the last call.
[[nodiscard]] int take_allocations();

/// Allocations of `operator new`, of all threads, whether counted or not, that have not been given back.
[[nodiscard]] int live_allocations();

/// The allocation after `n` more of the calling thread throws std::bad_alloc, once; −1: none.
void fail_allocation(int n);

} // namespace test
