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
  explicit batch_values(std::size_t channels)
      : memory_{2 * static_cast<std::int64_t>(channels)}, first_{memory_.data(), channels}, second_{memory_.data() +
                                                                                                        channels,
                                                                                                    channels} {}

  [[nodiscard]] std::span<double> first() const { return first_; }
  [[nodiscard]] std::span<double> second() const { return second_; }

private:
  host::detail::scratch_lease<double> memory_;
  std::span<double> first_, second_;
};

} // namespace syncnorm::detail
