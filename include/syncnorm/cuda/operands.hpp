#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <syncnorm/config.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::cuda {

/// The type of the numbers of a per-channel array, which kernels look at as they run.
enum class value_kind : std::uint8_t { float32, float64, float16, bfloat16 };

/// The kind of `P`: float, double, or an element type whose traits give a 16-bit format.
template <class P>
inline constexpr value_kind kind_of = [] {
  if constexpr (std::is_same_v<P, float>)
    return value_kind::float32;
  else if constexpr (std::is_same_v<P, double>)
    return value_kind::float64;
  else {
    static_assert(format_of<P> != element_format::other, "CUDA kernels know float, double, binary16 and bfloat16");
    return format_of<P> == element_format::binary16 ? value_kind::float16 : value_kind::bfloat16;
  }
}();

/// `[C]` numbers in device memory that kernels write. No data: absent.
struct channel_outputs {
  void* data = nullptr;
  value_kind kind = value_kind::float32;

  channel_outputs() = default;
  template <class P>
  explicit channel_outputs(P* values) : data{values}, kind{kind_of<P>} {}
};

/// `[C]` numbers in device memory. No data: absent.
struct channel_values {
  void const* data = nullptr;
  value_kind kind = value_kind::float32;

  channel_values() = default;
  template <class P>
  explicit channel_values(P const* values) : data{values}, kind{kind_of<P>} {}
  SYNCNORM_HOST_DEVICE channel_values(channel_outputs const& values) : data{values.data}, kind{values.kind} {}
};

/// gamma and beta; absent ones stand for 1 and 0.
struct affine_values {
  channel_values gamma{}, beta{};
};

/// Where the gradients of gamma and beta are added; absent ones are not needed.
struct affine_outputs {
  channel_outputs gamma{}, beta{};
};

/// The running statistics and their counter, all in device memory. Absent mean and var: not tracked. A negative counter, which the host
/// would refuse, counts as 0.
struct running_outputs {
  channel_outputs mean{}, var{};
  std::int64_t* num_batches_tracked = nullptr;
};

/// What a forward pass leaves in device memory for its backward pass: mean and inv_std `[C]`, and in `count[0]` the
/// elements of a channel over all ranks; 0 where the statistics are constant, −1 where the pass failed. A forward pass normalizes
/// by the variance of its options, and its backward passes have to be told.
struct saved_statistics {
  double *mean = nullptr, *inv_std = nullptr;
  std::int64_t* count = nullptr;
  batch_variance normalized_by = batch_variance::biased;
};

/// What a pass in place keeps of x, in device memory: the numbers of up to `room` channels in `list` `[C]`, in order, their
/// elements, and in `state[0]` how many they are, −1 where they are more than `room`; in `state[1]` whether x is in the memory of y
/// again.
struct kept_channels {
  std::int32_t* list = nullptr;
  std::int64_t* state = nullptr;
  void* elements = nullptr;
  std::int64_t room = 0;
  bool by_channels = false; ///< elements of one position follow each other, else those of one channel
  bool once = true;         ///< x is recovered where it is not there yet; else of each y that is given
};

/// The gradients with respect to what a backward pass gave: dx and dresidual `[N, C, S]`, and this rank's gradients of gamma
/// and beta. Absent ones stand for 0.
template <class T>
struct second_order {
  tensor_view<T const> dx{};
  channel_values gamma_gradient{}, beta_gradient{};
  tensor_view<T const> dresidual{};
};

/// Bytes of what a rank exchanges, [packet_header][values × C doubles]: two values forward (mean and m2) and backward
/// (sum_dy and sum_dy_xmu), seven in double backward.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr std::size_t packet_bytes(std::int64_t channels, int values = 2) {
  return sizeof(syncnorm::detail::packet_header) +
         sizeof(double) * static_cast<std::size_t>(values) * static_cast<std::size_t>(channels > 0 ? channels : 0);
}

/// Where the headers of all ranks are to come, `stride` bytes from rank to rank, and the sums of their values.
struct awaited_packets {
  std::byte* data = nullptr; ///< the layer's header of rank 0
  int ranks = 0;
  std::size_t stride = 0;
  double* arrivals = nullptr; ///< `reduced_packets::arrivals`; null: none, or it is not there that they come
};

/// Where the packet of a layer is made, in device memory, aligned to 8 bytes: its header, and its values `values_at` bytes
/// after that.
struct packet_place {
  std::byte* data = nullptr;
  std::size_t values_at = sizeof(syncnorm::detail::packet_header);
  std::byte const* before = nullptr;        ///< a packet without gaps of the micro-batches before, which is added
  std::int64_t const* kept_state = nullptr; ///< of `kept_channels`: where it is −1, the packet gets a fault
  double* weighted = nullptr;               ///< `[C + 1]`, of moments: count·mean, and the count; null: not needed
  double* arrival = nullptr;                ///< gets 1, to be summed with the values; null: not needed
  awaited_packets awaited{};                ///< get a fault and 0, which what comes in their place writes over

  constexpr packet_place() = default;
  SYNCNORM_HOST_DEVICE constexpr packet_place(std::byte* at) : data{at} {}
};

/// The packets of a layer of all ranks in device memory, in rank order, as an allgather of bytes leaves them. Aligned to 8
/// bytes. Where packets of several layers travel together, the headers of all of a rank follow each other.
struct gathered_packets {
  std::byte const* data = nullptr; ///< the layer's header of rank 0
  int ranks = 1;
  std::size_t stride = 0; ///< bytes from rank to rank; 0: packets of this layer alone, without gaps
  std::size_t values_at = sizeof(syncnorm::detail::packet_header);
  double const* arrivals = nullptr; ///< of a sum: of how many ranks, which should be `summed`; null: it is none
  int summed = 0;
};

/// The headers of all layers of a group as an allgather leaves them, `stride` bytes from rank to rank.
struct gathered_headers {
  std::byte const* data = nullptr;
  /// Headers of the layers' packets that the second kernels look at: rank 0's, or those of all ranks.
  std::byte* faults = nullptr;
  int ranks = 1, layers = 1;
  std::size_t stride = 0;
};

/// A layer's packets where ranks exchange sums, all in device memory, aligned to 8 bytes.
struct reduced_packets {
  gathered_packets headers{};       ///< of all ranks, alone
  packet_place own{}, merged{};     ///< this rank's packet, and that of all ranks
  double const* weighted = nullptr; ///< of moments: `packet_place::weighted`, summed; null: the merged values are there
  double const* arrivals = nullptr; ///< `packet_place::arrival`, summed; null: not known
  std::int64_t channels = 0;
};

/// This rank's packet alone.
[[nodiscard]] SYNCNORM_HOST_DEVICE constexpr gathered_packets own_packet(packet_place const& of) {
  return {of.data, 1, 0, of.values_at};
}

/// Why the second kernel of a pass wrote nothing.
enum class pass_fault : std::uint32_t {
  none,
  disagreement, ///< a header has a fault, or headers disagree: `require_agreement` says which
  one_value,    ///< training with one value per channel over all ranks
  no_room,      ///< in place by constant statistics, more channels are to be kept than there is room for
  lost,         ///< sums have not come from all ranks
};

/// Where a pass that failed leaves word: the first fault stays until the host resets it. Both in device memory or mapped
/// pinned host memory; `headers`, of as many as there are ranks, may be null.
struct fault_report {
  pass_fault* fault = nullptr;
  syncnorm::detail::packet_header* headers = nullptr;
};

/// Device memory in which the blocks of a launch put their results together; `workspace_bytes` says how much. All zero before
/// its first use, and between launches again what kernels need it to be. Of one stream at a time; aligned to 16 bytes.
struct workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// What a kernel may use of the device that it runs on.
struct device_limits {
  int multiprocessors = 132;
  int shared_per_block = 48 * 1024; ///< bytes of shared memory that a block may have
  int cluster_blocks = 1;           ///< blocks of a cluster at most
  int architecture = 0;             ///< 900 of compute capability 9.0
};

} // namespace syncnorm::cuda
