#pragma once

namespace syncnorm::detail {

/// Lets the other hardware thread of the core run while this one polls.
inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

} // namespace syncnorm::detail
