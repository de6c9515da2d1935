#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda::detail {

/// Throws what is wrong with the operands of a launch, whose name is `call`.
class operand_check {
public:
  explicit operand_check(char const* call) : call_{call} {}

  /// `name` and `message` are put together only where something is wrong.
  void require(bool holds, char const* name, char const* message) const {
    if (!holds) throw invalid_argument_error{std::string{call_} + ": " + name + message};
  }
  void require(bool holds, char const* message) const { require(holds, "", message); }

  template <class T>
  void tensor(tensor_view<T> const& x, char const* name) const {
    require(x.samples >= 0 && x.channels >= 0 && x.spatial >= 0, name, " has a negative extent");
    require(x.channels < std::int64_t{1} << 31, name, " has more than 2^31 - 1 channels");
    require(x.data != nullptr || x.size() == 0, name, " is null");
    require(x.size() == 0 || reinterpret_cast<std::uintptr_t>(x.data) % alignof(T) == 0, name,
            " is not aligned to its elements");
  }
  template <class T, class X>
  void like(tensor_view<T> const& y, char const* name, tensor_view<X> const& x) const {
    tensor(y, name);
    require(y.samples == x.samples && y.channels == x.channels && y.spatial == x.spatial, name,
            " has other extents than x");
  }
  template <class T, class X>
  void optional(tensor_view<T> const& y, char const* name, tensor_view<X> const& x) const {
    if (y.data != nullptr) like(y, name, x);
  }
  template <class T>
  void apart(tensor_view<T> const& a, tensor_view<T> const& b, char const* message) const {
    require(a.data == nullptr || a.data != b.data || a.size() == 0, message);
  }
  template <class T>
  void epilogue(batch_norm_epilogue<T> const& of, tensor_view<T const> const& x) const {
    if (of.has_residual()) like(of.residual, "the residual", x);
    mask(of.mask, x);
  }
  template <class T>
  void mask(mask_view const& of, tensor_view<T> const& x) const {
    if (!of) return;
    require(of.samples == x.samples && of.spatial == x.spatial, "the mask has other extents than x");
    require(of.data != nullptr || x.count() == 0, "the mask is null");
  }
  void kept(kept_channels const& of) const {
    require(of.list != nullptr && of.state != nullptr, "there is no memory for the list of kept channels");
    require(of.elements != nullptr || of.room == 0, "there is no memory for kept channels");
  }
  void packet(std::byte const* data) const {
    require(data != nullptr && reinterpret_cast<std::uintptr_t>(data) % 8 == 0,
            "a packet is null or not aligned to 8 bytes");
  }
  void packet(packet_place const& of) const { packet(of.data); }
  void packets(gathered_packets const& of) const {
    packet(of.data);
    require(of.ranks > 0, "there are no packets");
  }
  void saved(saved_statistics const& of, std::int64_t channels) const {
    require((of.mean != nullptr && of.inv_std != nullptr) || channels == 0, "the saved statistics are null");
    require(of.count != nullptr, "the saved count is null");
  }
  void work(workspace const& of, std::size_t needed) const {
    require(of.data != nullptr && reinterpret_cast<std::uintptr_t>(of.data) % 16 == 0,
            "the workspace is null or not aligned to 16 bytes");
    if (of.bytes < needed)
      require(false,
              ("the workspace has " + std::to_string(of.bytes) + " bytes, of " + std::to_string(needed)).c_str());
  }

private:
  char const* call_;
};

template <class T>
void require_backward_operands(char const* call, tensor_view<T const> const& dy, tensor_view<T const> const& x,
                               tensor_view<T> const& dx, tensor_view<T> const& dresidual,
                               batch_norm_epilogue<T> const& epilogue, saved_statistics const& saved) {
  operand_check const check{call};
  check.tensor(x, "x");
  check.like(dy, "dy", x);
  check.optional(dx, "dx", x);
  check.optional(dresidual, "dresidual", x);
  check.require(dresidual.data == nullptr || epilogue.has_residual() || x.size() == 0,
                "the gradient of a residual is asked for, but there is no residual");
  check.apart(dx, dresidual, "dx and dresidual are the same memory");
  check.epilogue(epilogue, x);
  check.saved(saved, x.channels);
}

} // namespace syncnorm::cuda::detail
