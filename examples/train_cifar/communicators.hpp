#pragma once

#include <functional>

#include <syncnorm/comm/any.hpp>

#include "membership.hpp"

namespace train_cifar {

/// Calls `body` for every rank that lives in this process, with the rank's communicator, and lets no rank of another process
/// wait for one that throws.
void run_as_member(membership const& member, options const& opts,
                   std::function<void(syncnorm::any_communicator const&)> const& body);

} // namespace train_cifar
