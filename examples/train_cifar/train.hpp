#pragma once

#include <optional>

#include <syncnorm/comm/any.hpp>

#include "data_set.hpp"
#include "membership.hpp"
#include "options.hpp"
#include "result.hpp"

namespace train_cifar {

/// Trains as one rank of `comm`, from the same initial parameters on every rank, and evaluates. Every rank takes its share
/// of each batch, the loss is the mean over the whole batch, and gradients are summed: with synchronized batch
/// norm, any number of ranks takes the steps that one would take on the whole batch. Collective. Returns the result on
/// rank 0. Throws mismatch_error where the ranks were not given the same work.
[[nodiscard]] std::optional<run_result> train(syncnorm::any_communicator const& comm, membership const& member,
                                              options const& opts, data_set const& data);

} // namespace train_cifar
