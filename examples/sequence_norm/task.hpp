#pragma once

#include <algorithm>
#include <cstdint>
#include <random>

#include <torch/torch.h>

namespace sequence_norm {

inline constexpr std::int64_t vocabulary = 8, longest = 20;

/// Sequences of random tokens and of random lengths; at each position the greatest of the last three tokens is to be told.
struct batch {
  torch::Tensor tokens, targets; ///< `[T, B]`
  torch::Tensor padding;         ///< `[B, T]`, true after the end of a sequence

  /// Positions that are not padding.
  [[nodiscard]] std::int64_t positions() const { return padding.logical_not().sum().item<std::int64_t>(); }

  /// The share of a rank: more the higher its number.
  [[nodiscard]] batch share(int rank, int ranks) const {
    auto const all = padding.size(0), weights = std::int64_t{ranks} * (ranks + 1) / 2;
    auto const end = [&](std::int64_t r) { return all * (r * (r + 1) / 2) / weights; };
    return {tokens.slice(1, end(rank), end(rank + 1)), targets.slice(1, end(rank), end(rank + 1)),
            padding.slice(0, end(rank), end(rank + 1))};
  }
};

/// The batch that `seed` stands for.
inline batch make_batch(std::int64_t sequences, std::uint64_t seed) {
  std::mt19937_64 random{seed};
  auto const draw = [&](std::uint64_t below) { return static_cast<std::int64_t>(random() % below); };
  batch made{torch::zeros({longest, sequences}, torch::kLong), torch::zeros({longest, sequences}, torch::kLong),
             torch::ones({sequences, longest}, torch::kBool)};
  auto tokens = made.tokens.accessor<std::int64_t, 2>(), targets = made.targets.accessor<std::int64_t, 2>();
  auto padding = made.padding.accessor<bool, 2>();
  for (std::int64_t b = 0; b < sequences; ++b) {
    std::int64_t const length = 3 + draw(static_cast<std::uint64_t>(longest) - 2);
    for (std::int64_t t = 0; t < length; ++t) {
      padding[b][t] = false;
      tokens[t][b] = draw(static_cast<std::uint64_t>(vocabulary));
      for (std::int64_t back = 0; back < 3 && back <= t; ++back)
        targets[t][b] = std::max(targets[t][b], tokens[t - back][b]);
    }
  }
  return made;
}

} // namespace sequence_norm
