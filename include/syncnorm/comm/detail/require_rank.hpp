#pragma once

#include <string>

#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

/// Throws invalid_argument_error where `root` is no rank of so many.
inline void require_rank(int root, int size) {
  if (root < 0 || root >= size)
    throw invalid_argument_error{"root " + std::to_string(root) + " is not a rank of a communicator of " +
                                 std::to_string(size)};
}

} // namespace syncnorm::detail
