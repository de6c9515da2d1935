#pragma once

#include <string>

#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// A failure that Gloo reports, such as a connection that a peer closed.
class gloo_error : public communicator_error {
public:
  explicit gloo_error(std::string const& message, source_location where = source_location::current())
      : communicator_error{"gloo", message, 0, where} {}
};

} // namespace syncnorm
