#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <syncnorm/host/detail/scratch.hpp>

namespace syncnorm::detail {

/// Buffers of one pass.
struct pass_buffers {
  std::vector<double> first, second; ///< `[C]`: m2; or the sums of the backward pass
};

/// Two values for each of some channels of one micro-batch.
class batch_values {
public:
  explicit batch_values(std::size_t channels) : channels_{channels}, memory_{2 * static_cast<std::int64_t>(channels)} {}

  [[nodiscard]] std::span<double> first() { return {memory_.data(), channels_}; }
  [[nodiscard]] std::span<double> second() { return {memory_.data() + channels_, channels_}; }

private:
  std::size_t channels_;
  host::detail::scratch_lease<double> memory_;
};

} // namespace syncnorm::detail
