#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <sched.h>

#include "shares.hpp"

namespace train_cifar {

/// The cores that this thread, and what it starts, may run on; none where there are more than a `cpu_set_t` holds.
[[nodiscard]] inline std::vector<int> usable_cores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(static_cast<std::size_t>(core), &set)) cores.push_back(core);
  return cores;
}

/// While this lives, what this thread starts as a rank has that rank's share of the cores for itself, if there is one for each.
class core_shares {
public:
  core_shares() = default;
  core_shares(core_shares const&) = delete;
  core_shares& operator=(core_shares const&) = delete;
  ~core_shares() { allow(cores_); }

  void enter(int rank, int ranks) const {
    if (cores_.size() >= static_cast<std::size_t>(ranks)) allow(share_of(std::span{cores_}, rank, ranks));
  }

private:
  static void allow(std::span<int const> cores) {
    if (cores.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int const core : cores) CPU_SET(static_cast<std::size_t>(core), &set);
    static_cast<void>(::sched_setaffinity(0, sizeof set, &set)); // without, ranks are only slower
  }

  std::vector<int> cores_ = usable_cores();
};

} // namespace train_cifar
