#pragma once

#include <cstdint>

#include <torch/torch.h>

#include <syncnorm/torch/power_norm.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

#include "task.hpp"

namespace sequence_norm {

enum class norm_kind { layer, batch, power };

/// One of the three normalizations of `[T, B, C]`, of which batch and power norm know nothing of the padding.
struct NormImpl : torch::nn::Module {
  NormImpl(norm_kind kind, std::int64_t channels, std::int64_t warmup, syncnorm::any_communicator const& comm) {
    switch (kind) {
    case norm_kind::layer:
      layer = register_module("layer", torch::nn::LayerNorm{torch::nn::LayerNormOptions({channels})});
      break;
    case norm_kind::batch:
      batch = register_module("batch", syncnorm::torch::SyncBatchNorm{torch::nn::BatchNormOptions(channels), comm});
      break;
    case norm_kind::power:
      auto const options = syncnorm::torch::PowerNormOptions{channels}.warmup_iters(warmup).group_num(4);
      power = register_module("power", syncnorm::torch::SyncPowerNorm{options, comm});
    }
  }

  torch::Tensor forward(torch::Tensor const& x, torch::Tensor const& padding) {
    if (!layer.is_empty()) return layer->forward(x);
    if (!power.is_empty()) return power->forward(x, padding);
    // Batch norm takes the positions that count as the rows of a matrix, however many this rank has.
    auto const counts = padding.t().logical_not();
    return torch::zeros_like(x).index_put({counts}, batch->forward(x.index({counts})));
  }

  torch::nn::LayerNorm layer{nullptr};
  syncnorm::torch::SyncBatchNorm batch{nullptr};
  syncnorm::torch::SyncPowerNorm power{nullptr};
};
TORCH_MODULE(Norm);

/// A transformer's block with a window of three positions in the place of attention:
///
///     x += mix(norm(x) at t, t − 1, t − 2);  x += contract(relu(expand(norm(x))))
struct BlockImpl : torch::nn::Module {
  BlockImpl(norm_kind kind, std::int64_t channels, std::int64_t warmup, syncnorm::any_communicator const& comm)
      : before_mix{kind, channels, warmup, comm}, before_network{kind, channels, warmup, comm},
        mix{3 * channels, channels}, expand{channels, 2 * channels}, contract{2 * channels, channels} {
    register_module("before_mix", before_mix);
    register_module("mix", mix);
    register_module("before_network", before_network);
    register_module("expand", expand);
    register_module("contract", contract);
  }

  torch::Tensor forward(torch::Tensor x, torch::Tensor const& padding) {
    auto const normal = before_mix->forward(x, padding);
    auto const earlier = [&](std::int64_t by) { // the positions that many steps ago, none before the first
      return torch::cat({torch::zeros_like(normal.slice(0, 0, by)), normal.slice(0, 0, normal.size(0) - by)}, 0);
    };
    x = x + mix->forward(torch::cat({normal, earlier(1), earlier(2)}, 2));
    return x + contract->forward(torch::relu(expand->forward(before_network->forward(x, padding))));
  }

  Norm before_mix, before_network;
  torch::nn::Linear mix, expand, contract;
};
TORCH_MODULE(Block);

/// Tokens `[T, B]` to scores `[T, B, vocabulary]`.
struct ModelImpl : torch::nn::Module {
  ModelImpl(norm_kind kind, std::int64_t warmup, syncnorm::any_communicator const& comm)
      : embedding{vocabulary, channels}, first{kind, channels, warmup, comm}, second{kind, channels, warmup, comm},
        norm{kind, channels, warmup, comm}, head{channels, vocabulary} {
    register_module("embedding", embedding);
    register_module("first", first);
    register_module("second", second);
    register_module("norm", norm);
    register_module("head", head);
  }

  torch::Tensor forward(torch::Tensor const& tokens, torch::Tensor const& padding) {
    auto const x = second->forward(first->forward(embedding->forward(tokens), padding), padding);
    return head->forward(norm->forward(x, padding));
  }

  static constexpr std::int64_t channels = 32;
  torch::nn::Embedding embedding;
  Block first, second;
  Norm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Model);

} // namespace sequence_norm
