#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <torch/torch.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/collectives.hpp>

namespace train_cifar {

namespace detail {

/// Calls `f` with the elements of a contiguous tensor of float or double.
template <class F>
void with_elements(torch::Tensor const& tensor, F&& f) {
  auto const count = static_cast<std::size_t>(tensor.numel());
  if (tensor.scalar_type() == torch::kDouble)
    f(std::span{tensor.data_ptr<double>(), count});
  else
    f(std::span{tensor.data_ptr<float>(), count});
}

} // namespace detail

/// Replaces a contiguous tensor by its sum over the ranks, through memory of the host.
inline void sum_over_ranks(syncnorm::any_communicator const& comm, torch::Tensor const& tensor) {
  torch::Tensor const on_host = tensor.cpu(); // on the CPU the tensor itself
  detail::with_elements(on_host, [&](auto elements) { syncnorm::allreduce(comm, elements, elements); });
  if (!on_host.is_same(tensor)) tensor.copy_(on_host);
}

/// Replaces the tensors by those of rank 0, in one exchange.
inline void copy_from_rank_0(syncnorm::any_communicator const& comm, std::vector<torch::Tensor> const& tensors) {
  torch::NoGradGuard const no_gradient;
  std::vector<torch::Tensor> pieces;
  for (auto const& tensor : tensors) pieces.push_back(tensor.reshape({-1}).to(torch::kCPU, torch::kDouble));
  torch::Tensor const flat = torch::cat(pieces);
  detail::with_elements(flat, [&](auto elements) { syncnorm::broadcast(comm, elements, 0); });
  std::int64_t first = 0;
  for (auto const& tensor : tensors) {
    tensor.copy_(flat.narrow(0, first, tensor.numel()).view(tensor.sizes()));
    first += tensor.numel();
  }
}

/// The gradients of all parameters as one array, which the ranks sum in one exchange, with the loss at its end.
class gradient_bucket {
public:
  /// Makes every parameter accumulate its gradient in the bucket.
  explicit gradient_bucket(std::vector<torch::Tensor> const& parameters) {
    std::int64_t count = 1;
    for (auto const& parameter : parameters) count += parameter.numel();
    flat_ = torch::zeros({count}, parameters.front().options().requires_grad(false));
    std::int64_t first = 0;
    for (auto parameter : parameters) {
      parameter.mutable_grad() = flat_.narrow(0, first, parameter.numel()).view(parameter.sizes());
      first += parameter.numel();
    }
  }

  void clear() { flat_.zero_(); }
  void add_loss(torch::Tensor const& loss) { flat_.narrow(0, flat_.numel() - 1, 1).add_(loss.detach()); }
  void sum_over_ranks(syncnorm::any_communicator const& comm) { train_cifar::sum_over_ranks(comm, flat_); }

  [[nodiscard]] torch::Tensor gradients() const { return flat_.narrow(0, 0, flat_.numel() - 1); }
  [[nodiscard]] double loss() const { return flat_[flat_.numel() - 1].item<double>(); }

private:
  torch::Tensor flat_;
};

} // namespace train_cifar
