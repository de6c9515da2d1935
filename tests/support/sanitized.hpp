#pragma once

#include <type_traits>

namespace test {

/// Whether sanitizers watch this program, which makes it many times slower: then grids are thinner, with sizes and choices
/// left out whose neighbours take the same paths through the code.
#ifdef SYNCNORM_TEST_SANITIZED
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// A type in place of another under the sanitizers: one whose primitives are compiled anyway.
template <class T, class Otherwise>
using if_sanitized = std::conditional_t<sanitized, T, Otherwise>;

} // namespace test

/// Further types of a test case for each of several, which the sanitizers do without: they instantiate the same templates.
#ifdef SYNCNORM_TEST_SANITIZED
#define AND_UNSANITIZED(...)
#else
#define AND_UNSANITIZED(...) , __VA_ARGS__
#endif
