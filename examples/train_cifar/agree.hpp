#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/collectives.hpp>

#include "data_set.hpp"
#include "files.hpp"
#include "options.hpp"

namespace train_cifar {

/// The same of equal images and labels.
[[nodiscard]] inline std::int64_t digest_of(image_set const& images) {
  auto const hash_of = [](auto const& values) {
    auto const bytes = std::as_bytes(std::span{values});
    return std::hash<std::string_view>{}({reinterpret_cast<char const*>(bytes.data()), bytes.size()});
  };
  return static_cast<std::int64_t>(hash_of(images.pixels) ^ hash_of(images.labels));
}

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
      std::pair{"--device", number(opts.device)},
      std::pair{"--backend", number(opts.backend == backend_kind::nccl)},
      std::pair{"--record", opts.record.empty() ? 0 : number(opts.record_steps)},
      std::pair{"--no-test", number(opts.evaluate)},
      std::pair{"the number of classes", number(data.classes)},
      std::pair{"the number of training images", number(data.train.size())},
      std::pair{"the number of test images", number(data.test.size())},
      std::pair{"a digest of the training images", digest_of(data.train)},
      std::pair{"a digest of the test images", digest_of(data.test)},
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

/// Throws syncnorm::error with the text of rank 0 on every rank, unless it is empty. Collective.
inline void throw_text_of_rank_0(syncnorm::any_communicator const& comm, std::string text) {
  auto length = static_cast<std::int64_t>(text.size());
  syncnorm::broadcast(comm, std::span{&length, 1}, 0);
  if (length == 0) return;
  text.resize(static_cast<std::size_t>(length));
  syncnorm::broadcast(comm, std::as_writable_bytes(std::span{text}), 0);
  throw syncnorm::error{text};
}

/// Throws on every rank where rank 0 could not write the files that the options name. Collective.
inline void require_writable(syncnorm::any_communicator const& comm, options const& opts) {
  std::string text;
  if (syncnorm::rank(comm) == 0) text = obstacle_to_writing(opts.record);
  if (syncnorm::rank(comm) == 0 && text.empty()) text = obstacle_to_writing(opts.result);
  throw_text_of_rank_0(comm, std::move(text));
}

} // namespace train_cifar
