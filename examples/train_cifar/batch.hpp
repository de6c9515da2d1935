#pragma once

#include <cstdint>
#include <span>

#include <torch/torch.h>

#include "data_set.hpp"

namespace train_cifar {

struct batch {
  torch::Tensor images; ///< [N, 3, 32, 32], roughly in [-2, 2]
  torch::Tensor labels; ///< [N]
};

/// The samples `indices` of `set`, of the type and on the device of `like`; there may be none.
[[nodiscard]] inline batch make_batch(image_set const& set, std::span<std::int64_t const> indices,
                                      torch::TensorOptions const& like) {
  auto const count = static_cast<std::int64_t>(indices.size());
  auto const side = static_cast<std::int64_t>(image_side);
  torch::Tensor const pixels = torch::empty({count, 3, side, side}, torch::kUInt8);
  torch::Tensor const labels = torch::empty({count}, torch::kLong);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    auto const sample = static_cast<std::size_t>(indices[i]);
    std::copy_n(&set.pixels[sample * image_bytes], image_bytes, pixels.data_ptr<std::uint8_t>() + i * image_bytes);
    labels.data_ptr<std::int64_t>()[i] = set.labels[sample];
  }
  return {pixels.to(like).div_(64).sub_(2), labels.to(like.device())};
}

} // namespace train_cifar
