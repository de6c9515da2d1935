#pragma once

namespace test {

/// Whether sanitizers watch this program, which makes it many times slower: then grids are thinner, with sizes and choices
/// left out whose neighbours take the same paths through the code.
#ifdef SYNCNORM_TEST_SANITIZED
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

} // namespace test
