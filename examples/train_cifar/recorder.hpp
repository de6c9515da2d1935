#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "agree.hpp"
#include "exchange.hpp"
#include "options.hpp"
#include "record.hpp"

namespace train_cifar {

/// Keeps what the first steps computed, for `--record`. All members are to be called on every rank alike.
class recorder {
public:
  /// Of training with so many images.
  recorder(syncnorm::any_communicator comm, options const& opts, std::size_t images)
      : comm_{std::move(comm)}, path_{opts.record}, steps_{opts.record.empty() ? 0 : opts.record_steps} {
    record_.roundoff = opts.dtype == number_kind::float64 ? 0x1p-53 : 0x1p-24;
    record_.longest_sum = opts.step_samples(images) * image_side * image_side;
  }

  [[nodiscard]] bool active() const { return step_ < steps_; }

  /// The scores of the samples [first, first + scores.size(0)) of the `total` samples of the current batch. Collective.
  void add_outputs(torch::Tensor const& scores, std::int64_t first, std::int64_t total) {
    if (!active()) return;
    torch::Tensor const all = torch::zeros({total, scores.size(1)}, scores.options().requires_grad(false));
    all.narrow(0, first, scores.size(0)).copy_(scores.detach());
    // Adding the zeros of the other ranks changes no bit.
    sum_over_ranks(comm_, all);
    keep("outputs", all);
  }

  /// Ends the current step; the last one that is kept writes the record.
  void end_step(gradient_bucket const& bucket, torch::nn::Module const& network) {
    if (!active()) return;
    keep("loss", torch::tensor({bucket.loss()}, torch::kDouble));
    keep("gradients", bucket.gradients());
    keep("parameters", flat(network.parameters()));
    keep("buffers", flat(network.buffers()));
    ++step_;
    if (!active()) write();
  }

  /// Writes what there is where the run has ended before enough steps were made.
  void finish() {
    if (active()) write();
    steps_ = 0;
  }

private:
  /// Rank 0 writes; where that fails, every rank throws.
  void write() const {
    std::string failure;
    try {
      if (syncnorm::rank(comm_) == 0) write_record(path_, record_);
    } catch (syncnorm::error const& error) {
      failure = error.what();
    }
    throw_text_of_rank_0(comm_, std::move(failure));
  }

  static torch::Tensor flat(std::vector<torch::Tensor> const& tensors) {
    std::vector<torch::Tensor> pieces;
    for (auto const& tensor : tensors) pieces.push_back(tensor.detach().reshape({-1}).to(torch::kDouble));
    return torch::cat(pieces);
  }

  void keep(std::string quantity, torch::Tensor const& tensor) {
    torch::Tensor const values = tensor.to(torch::kCPU, torch::kDouble).contiguous();
    auto const* const first = values.data_ptr<double>();
    record_.entries.push_back({step_ + 1, std::move(quantity), {first, first + values.numel()}});
  }

  syncnorm::any_communicator comm_;
  std::filesystem::path path_;
  std::size_t steps_, step_ = 0;
  run_record record_;
};

} // namespace train_cifar
