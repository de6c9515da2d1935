#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <cuda_runtime_api.h>

#include <syncnorm/cuda/detail/pack.hpp>

namespace syncnorm::cuda::detail {

/// The GPU as kernels see it; tests/simt has its counterpart on the CPU.
struct hardware {
  [[nodiscard]] static __device__ int thread() { return static_cast<int>(threadIdx.x); }
  [[nodiscard]] static __device__ int threads() { return static_cast<int>(blockDim.x); }
  [[nodiscard]] static __device__ std::uint32_t block() { return blockIdx.x; }
  [[nodiscard]] static __device__ std::uint32_t blocks() { return gridDim.x; }

  /// What was read from memory is read again: keeps a loop from holding it in registers.
  static __device__ void forget() { asm volatile("" ::: "memory"); }

  static __device__ void barrier() { __syncthreads(); }
  [[nodiscard]] static __device__ bool barrier_or(bool value) { return __syncthreads_or(value ? 1 : 0) != 0; }
  /// A barrier of all threads of the blocks of a cluster, which there is from architecture 9.0 on: `cluster_wait` waits until all have
  /// arrived. What a warp that `publishes` wrote is then seen by all; it has to wait for that, so others do not.
  static __device__ void cluster_arrive([[maybe_unused]] bool publishes) {
#if SYNCNORM_HAS_CLUSTERS
    if (publishes)
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }
  static __device__ void cluster_wait() {
#if SYNCNORM_HAS_CLUSTERS
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  /// What is at the same place in the shared memory of block number `block` of the cluster.
  [[nodiscard]] static __device__ double load_from([[maybe_unused]] int block, double const* at) {
#if SYNCNORM_HAS_CLUSTERS
    unsigned there = 0;
    double value = 0;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there)
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(at))), "r"(block));
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(there) : "memory");
    return value;
#else
    return *at;
#endif
  }
  /// Lets the kernel after begin, if it was launched `early`, once all blocks of this one have said so or ended.
  static __device__ void let_next_begin() {
#if SYNCNORM_HAS_CLUSTERS
    asm volatile("griddepcontrol.launch_dependents;");
#endif
  }
  /// Waits until the kernel before has ended and what it wrote is there, where this one was launched `early`.
  static __device__ void wait_for_previous() {
#if SYNCNORM_HAS_CLUSTERS
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  }
  template <class V>
  [[nodiscard]] static __device__ V shuffle_xor(V value, int lanes) {
    return __shfl_xor_sync(~0u, value, lanes);
  }
  template <class V>
  [[nodiscard]] static __device__ V shuffle(V value, int lane) {
    return __shfl_sync(~0u, value, lane);
  }
  [[nodiscard]] static __device__ unsigned ballot(unsigned among, bool value) { return __ballot_sync(among, value); }
  [[nodiscard]] static __device__ int population(unsigned bits) { return __popc(bits); }

  template <class S>
  [[nodiscard]] static __device__ S& shared() {
    __shared__ alignas(16) std::byte room[sizeof(S)];
    return *reinterpret_cast<S*>(room);
  }
  [[nodiscard]] static __device__ std::byte* dynamic_shared() {
    extern __shared__ uint4 syncnorm_dynamic_shared[];
    return reinterpret_cast<std::byte*>(syncnorm_dynamic_shared);
  }

  template <class T>
  [[nodiscard]] static __device__ T load(T const* at) {
    return *at;
  }
  template <class T, class V>
  static __device__ void store(T* at, V const& value) {
    *at = value;
  }
  /// What is not needed again goes first when the cache wants room.
  template <int Bytes = 16, class T>
  [[nodiscard]] static __device__ pack<T, Bytes> load_pack(T const* at, cached use) {
    auto const* const from = reinterpret_cast<word<Bytes> const*>(at);
    word<Bytes> const bits = use == cached::last ? __ldcs(from) : *from;
    pack<T, Bytes> some;
    memcpy(&some, &bits, sizeof bits);
    return some;
  }
  /// A pack of which the elements of `part` alone are asked for, and the others may be another thread's to write. Its 16 bytes are
  /// all memory of the tensor.
  template <class T>
  [[nodiscard]] static __device__ pack<T> load_part(T const* at, extent_of_pack const&, cached use) {
    return load_pack(at, use);
  }
  template <class T, int Bytes>
  static __device__ void store_pack(T* at, pack<T, Bytes> const& some, cached use) {
    word<Bytes> bits;
    memcpy(&bits, &some, sizeof bits);
    if (use == cached::last)
      __stcs(reinterpret_cast<word<Bytes>*>(at), bits);
    else if constexpr (Bytes == 16) // an assignment may become four
      asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
                   : "memory");
    else
      *reinterpret_cast<word<Bytes>*>(at) = bits;
  }

  /// Begins to copy 4, 8 or 16 bytes to shared memory. They are there for the thread once it has waited, for others after a barrier.
  template <int Bytes, class T>
  static __device__ void copy(T* to, T const* from) {
#if SYNCNORM_HAS_COPIES_TO_SHARED
    auto const there = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if constexpr (Bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(there), "l"(from) : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(there), "l"(from), "n"(Bytes) : "memory");
#else
    *reinterpret_cast<word<Bytes>*>(to) = *reinterpret_cast<word<Bytes> const*>(from);
#endif
  }
  /// Ends a group of copies.
  static __device__ void commit_copies() {
#if SYNCNORM_HAS_COPIES_TO_SHARED
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }
  /// Waits for all groups of the thread but the latest ones.
  template <int Latest>
  static __device__ void wait_for_copies_but() {
#if SYNCNORM_HAS_COPIES_TO_SHARED
    asm volatile("cp.async.wait_group %0;" ::"n"(Latest) : "memory");
#else
    forget();
#endif
  }
  static __device__ void wait_for_copies() {
#if SYNCNORM_HAS_COPIES_TO_SHARED
    asm volatile("cp.async.wait_all;" ::: "memory");
#else
    forget();
#endif
  }

  /// Adds 1, or after `most` begins again at 0, and returns what was there: releases what the thread knows of, and acquires what those
  /// did who came before.
  static __device__ std::uint32_t atomic_increment(std::uint32_t* at, std::uint32_t most) {
    std::uint32_t before;
    asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(at), "r"(most) : "memory");
    return before;
  }
  static __device__ void fence_system() { __threadfence_system(); }

private:
  template <int Bytes>
  using word = std::conditional_t<
      Bytes == 16, uint4,
      std::conditional_t<Bytes == 8, uint2, std::conditional_t<Bytes == 4, unsigned, unsigned short>>>;
};

} // namespace syncnorm::cuda::detail
