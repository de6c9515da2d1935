#pragma once

#include <syncnorm/comm/thread_group.hpp>

namespace test {

/// One whose exchanges are said to cost so little of a rank's time that passes are cut into parts.
struct quick_communicator : syncnorm::thread_communicator {
  double overhead;

  quick_communicator(syncnorm::thread_communicator const& comm, double seconds)
      : thread_communicator{comm}, overhead{seconds} {}
  [[nodiscard]] double exchange_overhead() const { return overhead; }
};

} // namespace test
