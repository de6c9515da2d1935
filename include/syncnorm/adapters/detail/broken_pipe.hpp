#pragma once

#include <csignal>

namespace syncnorm::detail {

/// Lets a process whose SIGPIPE has the default action ignore it from here on. Writing to the socket of a dead peer is then an
/// error of the write, of which a collective tells, and does not end the process.
inline void ignore_broken_pipes() noexcept {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL)
    static_cast<void>(std::signal(SIGPIPE, SIG_IGN));
}

} // namespace syncnorm::detail
