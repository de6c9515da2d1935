#pragma once

#include <cstddef>
#include <span>

#include <syncnorm/core/element.hpp>

namespace syncnorm::host {

/// running = (1 − weight)·running + weight·value, computed in double. Shapes `[C]`. Local.
template <class P>
void update_running(std::span<P> running, std::span<double const> value, double weight) {
  for (std::size_t c = 0; c < running.size(); ++c)
    running[c] = from_double<P>((1 - weight) * as_double(running[c]) + weight * value[c]);
}

} // namespace syncnorm::host
