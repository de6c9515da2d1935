#pragma once

#include <cstdint>

#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::host {

/// How an output is written: through the cache, past it, or whichever suits the extent of the output.
enum class stores : std::uint8_t { automatic, cached, streaming };

/// Outputs of more bytes than this are streamed past the cache.
inline constexpr std::int64_t streaming_bytes = 1 << 23;

/// What `automatic` means for the whole output `y`. For one written block by block, ask with the whole.
template <class T>
[[nodiscard]] constexpr stores stores_for(tensor_view<T> const& y) {
  return y.size() * static_cast<std::int64_t>(sizeof(T)) > streaming_bytes ? stores::streaming : stores::cached;
}

} // namespace syncnorm::host
