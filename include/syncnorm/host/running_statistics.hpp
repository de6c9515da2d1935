#pragma once

#include <cstddef>
#include <span>

namespace syncnorm::host {

/// running = (1 − weight)·running + weight·value, computed in double. Shapes `[C]`. Local.
template <class P>
void update_running(std::span<P> running, std::span<double const> value, double weight) {
  for (std::size_t c = 0; c < running.size(); ++c)
    running[c] = static_cast<P>((1 - weight) * static_cast<double>(running[c]) + weight * value[c]);
}

} // namespace syncnorm::host
