#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/any.hpp>

#include "options.hpp"

namespace train_cifar {

/// Throws mismatch_error on every rank where the ranks were not given the same work. Collective.
inline void require_agreement(syncnorm::any_communicator const& comm, options const& opts, data_set const& data) {
  auto const number = [](auto value) { return static_cast<std::int64_t>(value); };
  std::array const named{
      std::pair{"--batch-norm", number(opts.batch_norm)},
      std::pair{"--batch-size", number(opts.batch_size)},
      std::pair{"--grad-accumulation", number(opts.grad_accumulation)},
      std::pair{"--epochs", number(opts.epochs)},
      std::pair{"--steps", number(opts.steps)},
      std::pair{"--learning-rate", std::bit_cast<std::int64_t>(opts.learning_rate)},
      std::pair{"--seed", number(opts.seed)},
      std::pair{"--dtype", number(opts.dtype)},
      std::pair{"--record", opts.record.empty() ? 0 : number(opts.record_steps)},
      std::pair{"--no-test", number(opts.evaluate)},
      std::pair{"the number of classes", number(data.classes)},
      std::pair{"the number of training images", number(data.train.size())},
      std::pair{"the number of test images", number(data.test.size())},
  };
  std::array<std::int64_t, named.size()> own{};
  for (std::size_t i = 0; i < own.size(); ++i) own[i] = named[i].second;
  std::vector<std::int64_t> all(own.size() * static_cast<std::size_t>(syncnorm::size(comm)));
  syncnorm::allgather(comm, own, std::span{all});
  for (std::size_t i = own.size(); i < all.size(); ++i)
    if (all[i] != all[i % own.size()])
      throw syncnorm::mismatch_error{"rank " + std::to_string(i / own.size()) + " and rank 0 disagree on " +
                                     named[i % own.size()].first};
}

} // namespace train_cifar
