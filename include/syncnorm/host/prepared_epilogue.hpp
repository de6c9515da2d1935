#pragma once

#include <cstdint>
#include <memory>

#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>
#include <syncnorm/host/detail/prepared_mask.hpp>

namespace syncnorm::host {

/// An epilogue made ready for the primitives of a pass: its mask, if some position does not count, is read once, of tensors like
/// T×B×C in the order of their memory, `[S, N]`; residual and, by the primitives, other tensors are then transposed like the mask.
template <class T>
class prepared_epilogue {
public:
  prepared_epilogue() = default;
  /// Of a pass over `x`.
  prepared_epilogue(batch_norm_epilogue<T> const& epilogue, tensor_view<T const> const& x)
      : prepared_epilogue{epilogue.mask && detail::are_position_major(x) ? transposed(epilogue) : epilogue} {
    transposed_ = mask_ != nullptr && detail::are_position_major(x);
    if (mask_ == nullptr) residual_ = epilogue.residual;
  }
  /// For tensors of any order.
  prepared_epilogue(batch_norm_epilogue<T> const& epilogue)
      : activation_{epilogue.activation}, residual_{epilogue.residual},
        has_residual_{epilogue.has_residual()}, zeroes_{epilogue.masked == masked_outputs::zero} {
    if (!epilogue.mask) return;
    using allocator = syncnorm::detail::kept_allocator<detail::prepared_mask>;
    auto const mask =
        std::allocate_shared<detail::prepared_mask>(allocator{}, epilogue.mask, detail::row_cut::longest<T>);
    if (mask->count() != epilogue.mask.samples * epilogue.mask.spatial) mask_ = mask;
  }

  /// Whether outputs are anything but normalized inputs of positions that all count.
  [[nodiscard]] bool does_something() const { return !activation_.is_identity() || has_residual_ || mask_ != nullptr; }
  /// How many positions of `x` count.
  template <class X>
  [[nodiscard]] std::int64_t count(tensor_view<X> const& x) const {
    return mask_ == nullptr ? x.count() : mask_->count();
  }
  /// Of channels [first, first + length).
  [[nodiscard]] prepared_epilogue channel_range(std::int64_t first, std::int64_t length) const {
    auto part = *this;
    part.residual_ = residual_.channel_range(first, length);
    return part;
  }

  /// Whether mask and residual are `[S, N]` and `[S, C, N]`.
  [[nodiscard]] bool is_transposed() const { return transposed_; }
  /// The same for tensors that are transposed themselves.
  [[nodiscard]] prepared_epilogue of_transposed() const {
    auto same = *this;
    same.transposed_ = false;
    return same;
  }

  /// Whether the gradient of what was activated depends on the residual.
  [[nodiscard]] bool activates_residual() const { return !activation_.is_identity() && has_residual_; }
  /// The residual, or `x` where there is none.
  [[nodiscard]] tensor_view<T const> const& residual_or(tensor_view<T const> const& x) const {
    return has_residual_ ? residual_ : x;
  }
  /// The residual where it matters to a gradient, else `x`, which is read in any case.
  [[nodiscard]] tensor_view<T const> const& activated_residual(tensor_view<T const> const& x) const {
    return activates_residual() ? residual_ : x;
  }

  [[nodiscard]] syncnorm::activation const& activation() const { return activation_; }
  [[nodiscard]] bool has_residual() const { return has_residual_; }
  [[nodiscard]] tensor_view<T const> const& residual() const { return residual_; }
  /// Null where all positions count.
  [[nodiscard]] detail::prepared_mask const* counted() const { return mask_.get(); }
  /// Null where all outputs have a value and a gradient.
  [[nodiscard]] detail::prepared_mask const* written() const { return zeroes_ ? mask_.get() : nullptr; }

private:
  [[nodiscard]] static batch_norm_epilogue<T> transposed(batch_norm_epilogue<T> epilogue) {
    epilogue.residual = detail::transposed(epilogue.residual);
    epilogue.mask = detail::transposed(epilogue.mask);
    return epilogue;
  }

  syncnorm::activation activation_;
  tensor_view<T const> residual_{};
  bool has_residual_ = false, zeroes_ = false, transposed_ = false;
  std::shared_ptr<detail::prepared_mask const> mask_;
};

} // namespace syncnorm::host
