#pragma once

#include <cstdint>
#include <functional>
#include <string>

// Other implementations of what is measured. Each function gives one step.
namespace bench {

/// A pass of batch norm in training, with gamma, beta and running statistics.
struct peer_problem {
  std::int64_t samples = 0, channels = 0, spatial = 0;
  bool channels_last = false, is_double = false, backward = false;
  void *x = nullptr, *dy = nullptr, *out = nullptr; ///< [N, C, S] in the layout given
};

using peer_step = std::function<void()>;

/// libtorch, by its native_batch_norm and native_batch_norm_backward, with so many threads from here on.
[[nodiscard]] peer_step torch_batch_norm(peer_problem const& problem, int threads);

/// oneDNN, float alone, in one of its layouts nc, nchw, nhwc or nChw16c, on data that are in that layout already.
[[nodiscard]] peer_step onednn_batch_norm(peer_problem const& problem, std::string const& layout);

/// The synchronized batch norm of a course's homework, forward and backward of a matrix [N, C], in the operations of
/// libtorch: sums, sums of squares and counts by one allreduce of c10d's Gloo, and the sums of the gradients by another.
class homework {
public:
  /// Collective; the ranks meet in the file.
  homework(int rank, int size, std::string const& file);
  [[nodiscard]] peer_step step(float const* x, float const* dy, std::int64_t samples, std::int64_t channels) const;

private:
  std::function<peer_step(float const*, float const*, std::int64_t, std::int64_t)> make_;
};

} // namespace bench
