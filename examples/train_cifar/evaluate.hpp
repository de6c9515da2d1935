#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include <torch/torch.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/collectives.hpp>

#include "batch.hpp"
#include "shares.hpp"

namespace train_cifar {

/// The share of `set` that the network tells right, on rank 0; elsewhere 0. Collective: rank 0 scatters the indices of
/// the samples, and what the ranks count is reduced to it.
[[nodiscard]] inline double evaluate(syncnorm::any_communicator const& comm, torch::nn::SequentialImpl& network,
                                     image_set const& set, torch::TensorOptions const& like) {
  torch::NoGradGuard const no_gradient;
  network.eval();
  int const ranks = syncnorm::size(comm);
  std::vector<std::int64_t> all;
  if (syncnorm::rank(comm) == 0) all = padded_indices(set.size(), ranks);
  std::vector<std::int64_t> own((set.size() + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks));
  syncnorm::scatter(comm, all, std::span{own}, 0);
  std::erase(own, no_sample);

  constexpr std::size_t at_once = 250;
  std::array<std::int64_t, 2> right_and_seen{};
  for (std::size_t first = 0; first < own.size(); first += at_once) {
    auto const samples = std::span{own}.subspan(first, std::min(at_once, own.size() - first));
    batch const part = make_batch(set, samples, like);
    right_and_seen[0] += network.forward(part.images).argmax(1).eq(part.labels).sum().item<std::int64_t>();
    right_and_seen[1] += static_cast<std::int64_t>(samples.size());
  }
  std::array<std::int64_t, 2> total{};
  syncnorm::reduce(comm, right_and_seen, std::span<std::int64_t>{total}, 0);
  network.train();
  if (syncnorm::rank(comm) != 0) return 0;
  if (total[1] != static_cast<std::int64_t>(set.size()))
    throw syncnorm::error{"the ranks have looked at " + std::to_string(total[1]) + " of " + std::to_string(set.size()) +
                          " test images"};
  return static_cast<double>(total[0]) / static_cast<double>(total[1]);
}

} // namespace train_cifar
