#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <simt/fiber.hpp>
#include <simt/memory.hpp>
#include <syncnorm/cuda/detail/pack.hpp>

// Runs a kernel's own source on the CPU, a fiber to a thread, block after block, and reports what a GPU would not: barriers and
// warp operations that not all threads reach, accesses out of bounds or misaligned, and races.
namespace simt {

class machine;

/// The hardware as a kernel sees it; its GPU counterpart is cuda/detail/hardware.cuh.
class hardware {
public:
  hardware(machine& on, int thread) : machine_{&on}, thread_{thread} {}

  [[nodiscard]] int thread() const { return thread_; }
  [[nodiscard]] int threads() const;
  [[nodiscard]] std::uint32_t block() const;
  [[nodiscard]] std::uint32_t blocks() const;

  void forget() const {} // nothing here is held in registers
  void barrier() const;
  [[nodiscard]] bool barrier_or(bool value) const;
  template <class V>
  [[nodiscard]] V shuffle_xor(V value, int lanes) const {
    return shuffle(value, thread_ % 32 ^ lanes);
  }
  /// The value of a lane.
  template <class V>
  [[nodiscard]] V shuffle(V value, int lane) const;
  /// The lanes of `among` whose `value` is true.
  [[nodiscard]] unsigned ballot(unsigned among, bool value) const;
  [[nodiscard]] static int population(unsigned bits) { return std::popcount(bits); }

  template <class S>
  [[nodiscard]] S& shared() const;
  /// What the launch asked for.
  [[nodiscard]] std::byte* dynamic_shared() const;

  template <class T>
  [[nodiscard]] T load(T const* at) const;
  template <class T>
  void store(T* at, std::type_identity_t<T> value) const;
  template <class T>
  [[nodiscard]] syncnorm::cuda::detail::pack<T> load_pack(T const* at, syncnorm::cuda::detail::cached) const;
  /// All 16 bytes have to be of one buffer; what is read are the elements of the part, and the others come out as bytes 0xa5.
  template <class T>
  [[nodiscard]] syncnorm::cuda::detail::pack<T> load_part(T const* at, syncnorm::cuda::detail::extent_of_pack const&,
                                                          syncnorm::cuda::detail::cached) const;
  template <class T>
  void store_pack(T* at, syncnorm::cuda::detail::pack<T> const& some, syncnorm::cuda::detail::cached) const;

  template <class T>
  T atomic_add(T* at, T value) const;
  template <class T>
  T atomic_exchange(T* at, T value) const;
  void fence() const;
  void fence_system() const { fence(); }

private:
  void touch(void const* at, std::size_t bytes, access how) const;

  machine* machine_;
  int thread_;
};

struct launch_shape {
  std::uint32_t blocks = 1;
  int threads = 64;
  std::size_t dynamic_shared = 0;
  unsigned order = 0; ///< 0: blocks run in their order; others: in an order drawn from this
};

class machine {
public:
  simt::memory memory;

  /// Runs `kernel(hardware)` in every thread. Throws violation.
  template <class Kernel>
  void launch(launch_shape const& shape, Kernel const& kernel) {
    shape_ = shape;
    memory.settle();
    syncs_.clear();
    blocks_.assign(shape.blocks, {});
    for (auto& each : blocks_) each.seen.assign(shape.blocks, 0);
    std::vector<std::uint32_t> order(shape.blocks);
    std::iota(order.begin(), order.end(), 0u);
    if (shape.order != 0) std::shuffle(order.begin(), order.end(), std::mt19937{shape.order});
    for (auto const b : order) run_block(b, kernel);
  }

private:
  friend class hardware;
  enum class state : std::uint8_t { ready, at_barrier, at_warp, done };
  struct thread {
    std::unique_ptr<fiber> runner = std::make_unique<fiber>();
    simt::machine::state state = state::ready;
    unsigned fenced = 0;                 ///< the epoch of its last fence
    std::vector<unsigned> pending, seen; ///< learned by atomics, before and after a fence
  };
  struct block_state {
    unsigned epoch = 0;
    std::vector<unsigned> seen;
  };
  struct warp {
    unsigned named = 0, arrived = 0;
    char const* what = "";
    std::array<std::uint64_t, 32> given{}, taken{};
  };

  template <class Kernel>
  void run_block(std::uint32_t number, Kernel const& kernel) {
    block_ = number;
    arena_.assign(shared_room / sizeof(std::max_align_t), {});
    shared_.reset();
    dynamic_.reset();
    dynamic_arena_.assign(shape_.dynamic_shared / sizeof(std::max_align_t) + 1, {});
    if (shape_.dynamic_shared > 0)
      dynamic_.emplace("dynamic shared memory", dynamic_arena_.data(), shape_.dynamic_shared, 2, true, false);
    auto const count = static_cast<std::size_t>(shape_.threads);
    while (threads_.size() < count) threads_.emplace_back();
    warps_.assign(count / 32, {});
    or_given_ = or_taken_ = false;
    failure_.reset();
    for (std::size_t t = 0; t < count; ++t) {
      auto& each = threads_[t];
      each.state = state::ready;
      each.fenced = 0;
      each.pending.assign(shape_.blocks, 0);
      each.seen.assign(shape_.blocks, 0);
      each.runner->start([this, t, &kernel] {
        try {
          kernel(hardware{*this, static_cast<int>(t)});
        } catch (violation const& what) {
          if (!failure_) failure_ = what;
        }
      });
    }
    while (run_ready()) release_barrier();
  }

  /// Runs threads until all wait or are done. Returns whether some wait.
  bool run_ready() {
    auto const all = threads_.begin(), end = all + shape_.threads;
    for (bool some = true; some;) {
      some = false;
      for (auto each = all; each != end; ++each) {
        if (each->state != state::ready) continue;
        some = true;
        each->runner->resume();
        if (failure_) throw *failure_;
        if (each->runner->done()) each->state = state::done;
      }
    }
    return std::any_of(all, end, [](thread const& each) { return each.state != state::done; });
  }

  void release_barrier() {
    std::string const where = " of block " + std::to_string(block_);
    for (int t = 0; t < shape_.threads; ++t)
      if (threads_[static_cast<std::size_t>(t)].state == state::at_warp) {
        auto const& of = warps_[static_cast<std::size_t>(t / 32)];
        throw violation{std::string{of.what} + " that lanes do not reach: warp " + std::to_string(t / 32) + where};
      }
    for (int t = 0; t < shape_.threads; ++t)
      if (threads_[static_cast<std::size_t>(t)].state == state::done)
        throw violation{"barrier that threads do not reach: thread " + std::to_string(t) + where};
    auto& block = blocks_[block_];
    ++block.epoch;
    or_taken_ = or_given_;
    or_given_ = false;
    for (int t = 0; t < shape_.threads; ++t) {
      auto& each = threads_[static_cast<std::size_t>(t)];
      each.state = state::ready;
      join(block.seen, each.seen);
    }
  }

  static void join(std::vector<unsigned>& to, std::vector<unsigned> const& more) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], more[i]);
  }

  void wait(int t, state how) {
    auto& each = threads_[static_cast<std::size_t>(t)];
    each.state = how;
    each.runner->leave();
  }

  void exchange(int t, unsigned named, char const* what, std::uint64_t value) {
    auto& of = warps_[static_cast<std::size_t>(t / 32)];
    unsigned const self = 1u << t % 32;
    if ((named & self) == 0) throw violation{std::string{what} + " by a lane that it does not name"};
    if (of.arrived != 0 && (of.named != named || std::strcmp(of.what, what) != 0))
      throw violation{std::string{what} + " while other lanes of the warp are at another warp operation"};
    of.named = named;
    of.what = what;
    of.given[static_cast<std::size_t>(t % 32)] = value;
    of.arrived |= self;
    if (of.arrived != named) return wait(t, state::at_warp);
    of.taken = of.given;
    of.arrived = 0;
    for (int lane = 0; lane < 32; ++lane)
      if ((named >> lane & 1u) != 0) threads_[static_cast<std::size_t>(t / 32 * 32 + lane)].state = state::ready;
  }

  [[nodiscard]] accessor accessor_of(int t) const {
    return {static_cast<int>(block_), t, blocks_[block_].epoch, &blocks_[block_].seen,
            &threads_[static_cast<std::size_t>(t)].seen};
  }
  void touch(int t, void const* at, std::size_t bytes, access how) {
    auto const by = accessor_of(t);
    auto const address = reinterpret_cast<std::uintptr_t>(at);
    if (shared_ && shared_->contains(address)) return shared_->check(address, bytes, how, by);
    if (dynamic_ && dynamic_->contains(address)) return dynamic_->check(address, bytes, how, by);
    memory.check(at, bytes, how, by);
  }

  /// What a thread fenced becomes known by the atomic, and what became known by it before reaches the thread.
  void synchronize(int t, void const* at) {
    auto& each = threads_[static_cast<std::size_t>(t)];
    auto& sync = syncs_[at];
    sync.resize(shape_.blocks);
    join(each.pending, sync);
    join(sync, each.seen);
    join(sync, blocks_[block_].seen);
    sync[block_] = std::max(sync[block_], each.fenced);
  }

  void fence(int t) {
    auto& each = threads_[static_cast<std::size_t>(t)];
    each.fenced = blocks_[block_].epoch;
    join(each.seen, each.pending);
  }

  static constexpr std::size_t shared_room = 64 * 1024;

  launch_shape shape_;
  std::uint32_t block_ = 0;
  std::vector<thread> threads_;
  std::vector<warp> warps_;
  std::vector<block_state> blocks_;
  std::map<void const*, std::vector<unsigned>> syncs_;
  std::vector<std::max_align_t> arena_, dynamic_arena_;
  std::optional<buffer> shared_, dynamic_;
  std::optional<violation> failure_;
  bool or_given_ = false, or_taken_ = false;
};

inline int hardware::threads() const { return machine_->shape_.threads; }
inline std::uint32_t hardware::block() const { return machine_->block_; }
inline std::uint32_t hardware::blocks() const { return machine_->shape_.blocks; }
inline void hardware::barrier() const { machine_->wait(thread_, machine::state::at_barrier); }
inline bool hardware::barrier_or(bool value) const {
  machine_->or_given_ |= value;
  barrier();
  return machine_->or_taken_;
}
template <class V>
V hardware::shuffle(V value, int lane) const {
  static_assert(sizeof(V) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  machine_->exchange(thread_, ~0u, "shuffle", bits);
  auto const& taken = machine_->warps_[static_cast<std::size_t>(thread_ / 32)].taken;
  std::memcpy(&value, &taken[static_cast<std::size_t>(lane)], sizeof value);
  return value;
}
inline unsigned hardware::ballot(unsigned among, bool value) const {
  machine_->exchange(thread_, among, "ballot", value ? 1 : 0);
  auto const& taken = machine_->warps_[static_cast<std::size_t>(thread_ / 32)].taken;
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((among >> lane & 1u) != 0 && taken[lane] != 0) bits |= 1u << lane;
  return bits;
}
template <class S>
S& hardware::shared() const {
  static_assert(sizeof(S) <= 48 * 1024, "a block has 48 KB of static shared memory");
  if (!machine_->shared_)
    machine_->shared_.emplace("shared memory", machine_->arena_.data(), sizeof(S), 1, true, false);
  return *reinterpret_cast<S*>(machine_->arena_.data());
}
inline std::byte* hardware::dynamic_shared() const {
  return reinterpret_cast<std::byte*>(machine_->dynamic_arena_.data());
}
inline void hardware::touch(void const* at, std::size_t bytes, access how) const {
  machine_->touch(thread_, at, bytes, how);
}
template <class T>
T hardware::load(T const* at) const {
  touch(at, sizeof(T), access::read);
  T value;
  std::memcpy(static_cast<void*>(&value), at, sizeof(T));
  return value;
}
template <class T>
void hardware::store(T* at, std::type_identity_t<T> value) const {
  touch(at, sizeof(T), access::write);
  std::memcpy(static_cast<void*>(at), &value, sizeof(T));
}
template <class T>
syncnorm::cuda::detail::pack<T> hardware::load_pack(T const* at, syncnorm::cuda::detail::cached) const {
  touch(at, 16, access::read);
  syncnorm::cuda::detail::pack<T> some;
  std::memcpy(static_cast<void*>(&some), at, 16);
  return some;
}
template <class T>
syncnorm::cuda::detail::pack<T> hardware::load_part(T const* at, syncnorm::cuda::detail::extent_of_pack const& part,
                                                    syncnorm::cuda::detail::cached) const {
  machine_->memory.check_place(at, 16, machine_->accessor_of(thread_));
  syncnorm::cuda::detail::pack<T> some;
  std::memset(static_cast<void*>(&some), 0xa5, sizeof some);
  for (int e = part.first; e < part.last; ++e) some.of[e] = load(at + e);
  return some;
}
template <class T>
void hardware::store_pack(T* at, syncnorm::cuda::detail::pack<T> const& some, syncnorm::cuda::detail::cached) const {
  touch(at, 16, access::write);
  std::memcpy(static_cast<void*>(at), &some, 16);
}
template <class T>
T hardware::atomic_add(T* at, T value) const {
  touch(at, sizeof(T), access::atomic);
  machine_->synchronize(thread_, at);
  T const before = *at;
  *at = before + value;
  return before;
}
template <class T>
T hardware::atomic_exchange(T* at, T value) const {
  touch(at, sizeof(T), access::atomic);
  machine_->synchronize(thread_, at);
  T const before = *at;
  *at = value;
  return before;
}
inline void hardware::fence() const { machine_->fence(thread_); }

} // namespace simt
