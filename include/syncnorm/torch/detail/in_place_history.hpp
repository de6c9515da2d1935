#pragma once

#include <memory>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

namespace syncnorm::torch::detail {

/// y, which a pass has written over x, with the history that x had before: that which x comes to have leads to the node that saves y.
[[nodiscard]] inline at::Tensor output_to_save(at::Tensor const& y, at::Tensor const& x) {
  auto saved = y.detach(); // whose version is that of y
  if (x.grad_fn() != nullptr)
    ::torch::autograd::impl::set_gradient_edge(saved, ::torch::autograd::impl::gradient_edge(x));
  return saved;
}

/// Of a view that was written over: nothing depends on what it was, and everything on what wrote to it.
class overwritten_view : public ::torch::autograd::Node {
public:
  explicit overwritten_view(::torch::autograd::Edge writer)
      : Node{{::torch::autograd::Edge{}, std::move(writer)}} {} // libtorch has the first lead to what it is a view of

private:
  ::torch::autograd::variable_list apply(::torch::autograd::variable_list&& dy) override {
    return {at::zeros_like(dy.at(0)), dy.at(0)};
  }
};

/// x, in whose memory y is, an output of a recorded function, with the history of y. x was written to, and its version counts that,
/// before the function was recorded, which saves y: of several outputs `mark_dirty` lets none be a view, and each would be a change
/// of what was saved of others in the same memory.
[[nodiscard]] inline at::Tensor const& with_history_of(at::Tensor const& y, at::Tensor const& x) {
  namespace impl = ::torch::autograd::impl;
  if (!y.requires_grad()) return x;
  auto edge = impl::gradient_edge(y);
  if (x.is_view()) {
    auto const node = std::make_shared<overwritten_view>(std::move(edge));
    edge = {node, node->add_input_metadata(x)};
    // The history that the view has had since then is out of date, too.
    impl::get_view_autograd_meta(x)->set_attr_version(x.unsafeGetTensorImpl()->version_counter().current_version() - 1);
  }
  impl::rebase_history(x, std::move(edge));
  return x;
}

} // namespace syncnorm::torch::detail
