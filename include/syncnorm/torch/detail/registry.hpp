#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>

namespace syncnorm::torch::detail {
struct registry;
}

namespace torch::nn {

/// Module lets every Cloneable at its tables of parameters, buffers and children, and offers no other way to have one module
/// register the very tensors of another, which optimizers hold.
template <>
class Cloneable<::syncnorm::torch::detail::registry> {
public:
  static void copy(Module const& from, Module& to) {
    to.parameters_ = from.parameters_;
    to.buffers_ = from.buffers_;
    to.children_ = from.children_;
  }
};

} // namespace torch::nn

namespace syncnorm::torch::detail {

/// A tag of a module that does not exist, whose Cloneable reaches the tables of others.
struct registry {};

/// Makes the batch norm `to` one of the same tensors, in the same mode, as the batch norm `from`.
template <class From, class To>
void share_state(From const& from, To& to) {
  ::torch::nn::Cloneable<registry>::copy(from, to);
  to.weight = from.weight;
  to.bias = from.bias;
  to.running_mean = from.running_mean;
  to.running_var = from.running_var;
  to.num_batches_tracked = from.num_batches_tracked;
  to.train(from.is_training());
}

} // namespace syncnorm::torch::detail
