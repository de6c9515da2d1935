#pragma once

#include <csignal>
#include <span>

namespace train_cifar {

/// Adds to `to` those that this process does not ignore, as it does some under nohup.
inline void add_heeded_signals(sigset_t& to, std::span<int const> signals) {
  for (int const signal : signals) {
    struct sigaction now {};
    sigaction(signal, nullptr, &now);
    if (now.sa_handler != SIG_IGN) sigaddset(&to, signal);
  }
}

} // namespace train_cifar
