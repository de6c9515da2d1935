#pragma once

namespace test {

/// Whether calls of `operator new` on the calling thread count.
void count_allocations(bool on);

/// Those counted, on all threads, since the last call.
[[nodiscard]] int take_allocations();

} // namespace test
