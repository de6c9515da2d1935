#pragma once

#include <cstddef>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace syncnorm::cuda {

/// Bytes of the workspace for passes over tensors of these extents, whatever their strides.
template <class T>
[[nodiscard]] std::size_t workspace_bytes(tensor_view<T> const& x, device_limits const& limits);

} // namespace syncnorm::cuda
