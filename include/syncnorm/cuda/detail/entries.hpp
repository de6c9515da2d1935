#pragma once

#include <syncnorm/config.hpp>
#include <syncnorm/cuda/detail/accept_kernel.hpp>
#include <syncnorm/cuda/detail/fused_kernel.hpp>
#include <syncnorm/cuda/detail/group_kernel.hpp>
#include <syncnorm/cuda/detail/kept_kernels.hpp>
#include <syncnorm/cuda/detail/map_kernel.hpp>
#include <syncnorm/cuda/detail/reduce_kernel.hpp>

// What is launched: a kernel with its arguments, the threads of a block on a GPU at most, of how many resident blocks the compiler
// limits its registers to (0: it does not), and its body, for blocks of at most `Threads` of any hardware.
namespace syncnorm::cuda::detail {

/// Bytes of static shared memory.
template <class Storage>
inline constexpr int shared_bytes = (static_cast<int>(sizeof(Storage)) + 15) / 16 * 16;

template <class Op, axis Axis>
struct reduce_entry {
  using arguments = reduce_arguments<Op>;
  static constexpr int threads = Op::threads, resident = Op::resident[static_cast<int>(Axis)];
  static constexpr int static_shared = shared_bytes<reduce_storage<Op, Axis, threads>>;

  template <int Threads, class Hw>
  static SYNCNORM_DEVICE void run(Hw const& hw, arguments const& a) {
    reduce_kernel<Op, Axis, Threads>(hw, a);
  }
};

template <class Op, axis Axis>
struct map_entry {
  using arguments = map_arguments<Op>;
  static constexpr int threads = Op::threads, resident = Op::resident[static_cast<int>(Axis)];
  static constexpr int static_shared = shared_bytes<map_storage<Op, Axis, most_map_lanes>>;

  template <int Threads, class Hw>
  static SYNCNORM_DEVICE void run(Hw const& hw, arguments const& a) {
    map_kernel<Op, Axis>(hw, a);
  }
};

inline constexpr int fused_threads = 256;

/// Several blocks to a multiprocessor, as shared memory allows, so that one reads while another sums.
template <class Sums, class Map, axis Axis>
struct fused_entry {
  using arguments = fused_arguments<Sums, Map>;
  using T = typename Sums::element_type;
  static constexpr int threads = fused_threads;
  static constexpr int resident = Axis == axis::positions ? (sizeof(T) == 8 ? 2 : 3) : sizeof(T) == 2 ? 1 : 2;
  static constexpr int static_shared = shared_bytes<fused_storage<Sums, Map, Axis, fused_threads>>;

  template <int Threads, class Hw>
  static SYNCNORM_DEVICE void run(Hw const& hw, arguments const& a) {
    fused_kernel<Sums, Map, Axis, Threads>(hw, a);
  }
};

struct accept_entry {
  using arguments = accept_arguments;
  static constexpr int threads = 256, resident = 0;

  template <int Threads, class Hw>
  static SYNCNORM_DEVICE void run(Hw const& hw, arguments const& a) {
    accept_kernel(hw, a);
  }
};

struct group_entry {
  using arguments = group_arguments;
  static constexpr int threads = 128, resident = 0;

  template <int Threads, class Hw>
  static SYNCNORM_DEVICE void run(Hw const& hw, arguments const& a) {
    group_kernel(hw, a);
  }
};

struct choose_entry {
  using arguments = choose_arguments;
  static constexpr int threads = 256, resident = 0;

  template <int Threads, class Hw>
  static SYNCNORM_DEVICE void run(Hw const& hw, arguments const& a) {
    choose_kernel<Threads>(hw, a);
  }
};

template <class Word>
struct copy_entry {
  using arguments = copy_arguments<Word>;
  static constexpr int threads = 256, resident = 0;

  template <int Threads, class Hw>
  static SYNCNORM_DEVICE void run(Hw const& hw, arguments const& a) {
    copy_kernel(hw, a);
  }
};

} // namespace syncnorm::cuda::detail
