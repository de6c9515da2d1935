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

/// Further types of a test case for each of several, which the sanitizers do without: they instantiate the same templates.
#ifdef SYNCNORM_TEST_SANITIZED
#define AND_UNSANITIZED(...)
#else
#define AND_UNSANITIZED(...) , __VA_ARGS__
#endif
