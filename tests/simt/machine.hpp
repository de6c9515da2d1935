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
#include <span>
#include <string>
#include <utility>
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
  /// `thread`: of a cluster.
  hardware(machine& on, int thread) : machine_{&on}, thread_{thread} {}

  [[nodiscard]] int thread() const;
  [[nodiscard]] int threads() const;
  [[nodiscard]] std::uint32_t block() const;
  [[nodiscard]] std::uint32_t blocks() const;

  void forget() const {} // nothing here is held in registers
  void barrier() const;
  [[nodiscard]] bool barrier_or(bool value) const;
  /// A barrier of all threads of the blocks of a cluster. Who has arrived reads nothing of other blocks before it has waited. All lanes of
  /// a warp publish, or none.
  void cluster_arrive(bool publishes) const;
  void cluster_wait() const;
  template <class V>
  [[nodiscard]] V shuffle_xor(V value, int lanes) const {
    return shuffle(value, thread() % 32 ^ lanes);
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
  /// What is at the same place in the shared memory of block number `block` of the cluster.
  template <class T>
  [[nodiscard]] T load_from(int block, T const* at) const;
  template <class T>
  void store(T* at, std::type_identity_t<T> value) const;
  template <int Bytes = 16, class T>
  [[nodiscard]] syncnorm::cuda::detail::pack<T, Bytes> load_pack(T const* at, syncnorm::cuda::detail::cached) const;
  /// All 16 bytes have to be of one buffer; what is read are the elements of the part, and the others come out as bytes 0xa5.
  template <class T>
  [[nodiscard]] syncnorm::cuda::detail::pack<T> load_part(T const* at, syncnorm::cuda::detail::extent_of_pack const&,
                                                          syncnorm::cuda::detail::cached) const;
  template <class T, int Bytes>
  void store_pack(T* at, syncnorm::cuda::detail::pack<T, Bytes> const& some, syncnorm::cuda::detail::cached) const;

  /// What is copied comes when the thread waits for it, and is not to be read before.
  template <int Bytes, class T>
  void copy(T* to, T const* from) const;
  void wait_for_copies() const;
  /// Ends a group of copies, and waits for those of all groups but the latest ones.
  void commit_copies() const;
  template <int Latest>
  void wait_for_copies_but() const;

  void let_next_begin() const {} // launches run one after the other
  /// An early launch writes nothing before that, and reads nothing that the launch before wrote.
  void wait_for_previous() const;

  std::uint32_t atomic_increment(std::uint32_t* at, std::uint32_t most) const;
  void fence_system() const {}

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
  int cluster = 1;    ///< blocks that run at a time
  bool early = false; ///< the launch before may not have ended
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
    auto const together = static_cast<std::uint32_t>(shape.cluster);
    if (shape.blocks % together != 0) throw violation{"blocks are no multiple of those of a cluster"};
    std::vector<std::uint32_t> order(shape.blocks / together);
    std::iota(order.begin(), order.end(), 0u);
    if (shape.order != 0) std::shuffle(order.begin(), order.end(), std::mt19937{shape.order});
    for (auto const cluster : order) run_cluster(cluster * together, kernel);
  }

private:
  friend class hardware;
  enum class state : std::uint8_t { ready, at_barrier, at_cluster, at_warp, done };
  struct copy_in_flight {
    std::size_t bytes;
    int group;
    std::function<void()> come;
  };
  struct thread {
    std::unique_ptr<fiber> runner = std::make_unique<fiber>();
    simt::machine::state state = state::ready;
    bool arrived = false;                            ///< at the cluster's barrier
    bool early = false;                              ///< has not waited for the launch before
    int groups = 0;                                  ///< of copies
    std::vector<unsigned> seen;                      ///< learned by atomics
    std::map<std::uintptr_t, copy_in_flight> copies; ///< by where they go
  };
  struct block_state {
    unsigned epoch = 0;
    std::vector<unsigned> seen;
  };
  struct warp {
    unsigned named = 0, arrived = 0;
    char const* what = "";
    std::array<std::uint64_t, 32> given{}, taken{};
    int arrived_at_cluster = 0; ///< lanes, at the next barrier
    bool publishes = false;
  };

  /// A block of the cluster that runs.
  struct running_block {
    std::uint32_t number = 0;
    std::vector<std::max_align_t> arena, dynamic_arena;
    std::optional<buffer> shared, dynamic;
    std::vector<warp> warps;
    bool or_given = false, or_taken = false;

    running_block(std::uint32_t n, launch_shape const& shape)
        : number{n}, arena(shared_room / sizeof(std::max_align_t)),
          dynamic_arena(shape.dynamic_shared / sizeof(std::max_align_t) + 1),
          warps(static_cast<std::size_t>(shape.threads / 32)) {
      if (shape.dynamic_shared > 0)
        dynamic.emplace("dynamic shared memory", dynamic_arena.data(), shape.dynamic_shared, 2, true, false);
    }
  };

  template <class Kernel>
  void run_cluster(std::uint32_t first, Kernel const& kernel) {
    running_.clear();
    for (int b = 0; b < shape_.cluster; ++b) running_.emplace_back(first + static_cast<std::uint32_t>(b), shape_);
    auto const count = static_cast<std::size_t>(shape_.threads * shape_.cluster);
    while (threads_.size() < count) threads_.emplace_back();
    failure_.reset();
    for (std::size_t t = 0; t < count; ++t) {
      auto& each = threads_[t];
      each.state = state::ready;
      each.arrived = false;
      each.early = shape_.early;
      each.groups = 0;
      each.seen.assign(shape_.blocks, 0);
      each.copies.clear();
      each.runner->start([this, t, &kernel] {
        try {
          kernel(hardware{*this, static_cast<int>(t)});
          if (!threads_[t].copies.empty())
            throw violation{"copies that thread " + std::to_string(t) + " does not wait for"};
          if (threads_[t].early)
            throw violation{"end of thread " + std::to_string(t) + ", which has not waited for the launch before"};
        } catch (violation const& what) {
          if (!failure_) failure_ = what;
        }
      });
    }
    while (run_ready()) release_barriers();
  }

  /// The block of a thread of the cluster, and the thread's number there.
  [[nodiscard]] running_block& running(int t) { return running_[static_cast<std::size_t>(t / shape_.threads)]; }
  [[nodiscard]] block_state& state_of(running_block const& of) { return blocks_[of.number]; }
  /// The threads of block number b of the cluster.
  [[nodiscard]] std::span<thread> threads_of(std::size_t b) {
    auto const count = static_cast<std::size_t>(shape_.threads);
    return std::span{threads_}.subspan(b * count, count);
  }

  /// Runs threads until all wait or are done. Returns whether some wait.
  bool run_ready() {
    auto const all = threads_.begin(), end = all + shape_.threads * shape_.cluster;
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

  /// Lets go on who waits at barriers of blocks, or else at one of the cluster.
  void release_barriers() {
    bool some = false;
    for (std::size_t b = 0; b < running_.size(); ++b) some = release_barrier(b) || some;
    if (!some) release_cluster();
  }

  /// Returns whether threads of the block wait at its barrier.
  bool release_barrier(std::size_t b) {
    auto& of = running_[b];
    auto const threads = threads_of(b);
    std::string const where = " of block " + std::to_string(of.number);
    for (std::size_t t = 0; t < threads.size(); ++t)
      if (threads[t].state == state::at_warp)
        throw violation{std::string{of.warps[t / 32].what} + " that lanes do not reach: warp " +
                        std::to_string(t / 32) + where};
    auto const waits = [](thread const& each) { return each.state == state::at_barrier; };
    if (std::ranges::none_of(threads, waits)) return false;
    for (std::size_t t = 0; t < threads.size(); ++t)
      if (!waits(threads[t])) throw violation{"barrier that threads do not reach: thread " + std::to_string(t) + where};
    auto& block = state_of(of);
    ++block.epoch;
    of.or_taken = of.or_given;
    of.or_given = false;
    for (auto& each : threads) {
      each.state = state::ready;
      join(block.seen, each.seen);
    }
    return true;
  }

  void release_cluster() {
    for (std::size_t b = 0; b < running_.size(); ++b)
      for (std::size_t t = 0; t < threads_of(b).size(); ++t)
        if (threads_of(b)[t].state != state::at_cluster)
          throw violation{"barrier of a cluster that threads do not reach: thread " + std::to_string(t) + " of block " +
                          std::to_string(running_[b].number)};
    for (std::size_t b = 0; b < running_.size(); ++b) {
      auto& block = state_of(running_[b]);
      ++block.epoch;
      for (auto& each : threads_of(b)) {
        each.state = state::ready;
        join(block.seen, each.seen);
      }
    }
    std::vector<unsigned> all(shape_.blocks, 0);
    for (auto const& each : running_) {
      join(all, state_of(each).seen);
      all[each.number] = std::max(all[each.number], state_of(each).epoch);
    }
    for (auto const& each : running_) join(state_of(each).seen, all);
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
    auto& of = running(t).warps[static_cast<std::size_t>(t % shape_.threads / 32)];
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
    auto const number = running_[static_cast<std::size_t>(t / shape_.threads)].number;
    auto const& own = threads_[static_cast<std::size_t>(t)];
    return {static_cast<int>(number), t % shape_.threads, blocks_[number].epoch,
            &blocks_[number].seen,    &own.seen,          own.early};
  }
  void touch(int t, void const* at, std::size_t bytes, access how) {
    auto const by = accessor_of(t);
    auto const address = reinterpret_cast<std::uintptr_t>(at);
    auto& own = running(t);
    if (own.shared && own.shared->contains(address)) return own.shared->check(address, bytes, how, by);
    auto const& copies = threads_[static_cast<std::size_t>(t)].copies;
    if (auto const next = copies.upper_bound(address); next != copies.begin())
      if (auto const& [begin, copy] = *std::prev(next); address < begin + copy.bytes)
        throw violation{"access to what a copy has not put there yet by " + by.name()};
    if (own.dynamic && own.dynamic->contains(address)) return own.dynamic->check(address, bytes, how, by);
    if (by.early && how != access::read) throw violation{"write before the launch before has ended by " + by.name()};
    memory.check(at, bytes, how, by);
  }

  /// What a thread knows of becomes known by the atomic, and what became known by it before reaches the thread.
  void synchronize(int t, void const* at) {
    auto& seen = threads_[static_cast<std::size_t>(t)].seen;
    auto& sync = syncs_[at];
    sync.resize(shape_.blocks);
    join(seen, sync);
    join(sync, seen);
    auto const number = running(t).number;
    join(sync, blocks_[number].seen);
    sync[number] = std::max(sync[number], blocks_[number].epoch);
  }

  static constexpr std::size_t shared_room = 64 * 1024;

  launch_shape shape_;
  std::vector<thread> threads_;
  std::vector<running_block> running_;
  std::vector<block_state> blocks_;
  std::map<void const*, std::vector<unsigned>> syncs_;
  std::optional<violation> failure_;
};

inline int hardware::thread() const { return thread_ % machine_->shape_.threads; }
inline int hardware::threads() const { return machine_->shape_.threads; }
inline std::uint32_t hardware::block() const { return machine_->running(thread_).number; }
inline std::uint32_t hardware::blocks() const { return machine_->shape_.blocks; }
inline void hardware::barrier() const { machine_->wait(thread_, machine::state::at_barrier); }
inline void hardware::cluster_arrive(bool publishes) const {
  auto& warp = machine_->running(thread_).warps[static_cast<std::size_t>(thread() / 32)];
  if (warp.arrived_at_cluster == 0) warp.publishes = publishes;
  if (warp.publishes != publishes)
    throw violation{"arrival at a barrier of a cluster by a warp of which some lanes publish"};
  warp.arrived_at_cluster = (warp.arrived_at_cluster + 1) % 32;
  auto& arrived = machine_->threads_[static_cast<std::size_t>(thread_)].arrived;
  if (std::exchange(arrived, true))
    throw violation{"arrival at a barrier of a cluster without a wait for the one before"};
}
inline void hardware::cluster_wait() const {
  auto& arrived = machine_->threads_[static_cast<std::size_t>(thread_)].arrived;
  if (!std::exchange(arrived, false)) throw violation{"wait for a barrier of a cluster without arrival"};
  machine_->wait(thread_, machine::state::at_cluster);
}
inline bool hardware::barrier_or(bool value) const {
  machine_->running(thread_).or_given |= value;
  barrier();
  return machine_->running(thread_).or_taken;
}
template <class V>
V hardware::shuffle(V value, int lane) const {
  static_assert(sizeof(V) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  machine_->exchange(thread_, ~0u, "shuffle", bits);
  auto const& taken = machine_->running(thread_).warps[static_cast<std::size_t>(thread() / 32)].taken;
  std::memcpy(&value, &taken[static_cast<std::size_t>(lane)], sizeof value);
  return value;
}
inline unsigned hardware::ballot(unsigned among, bool value) const {
  machine_->exchange(thread_, among, "ballot", value ? 1 : 0);
  auto const& taken = machine_->running(thread_).warps[static_cast<std::size_t>(thread() / 32)].taken;
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if ((among >> lane & 1u) != 0 && taken[lane] != 0) bits |= 1u << lane;
  return bits;
}
template <class S>
S& hardware::shared() const {
  static_assert(sizeof(S) <= 48 * 1024, "a block has 48 KB of static shared memory");
  auto& own = machine_->running(thread_);
  if (!own.shared) own.shared.emplace("shared memory", own.arena.data(), sizeof(S), 1, true, false);
  return *reinterpret_cast<S*>(own.arena.data());
}
inline std::byte* hardware::dynamic_shared() const {
  return reinterpret_cast<std::byte*>(machine_->running(thread_).dynamic_arena.data());
}
inline void hardware::touch(void const* at, std::size_t bytes, access how) const {
  machine_->touch(thread_, at, bytes, how);
}
template <class T>
T hardware::load(T const* at) const {
  touch(at, sizeof(T), access::read);
  T value;
  std::memcpy(static_cast<void*>(&value), machine_->memory.place(at), sizeof(T));
  return value;
}
template <class T>
T hardware::load_from(int block, T const* at) const {
  auto& own = machine_->running(thread_);
  auto& other = machine_->running_.at(static_cast<std::size_t>(block));
  auto const offset = reinterpret_cast<std::uintptr_t>(at) - reinterpret_cast<std::uintptr_t>(own.arena.data());
  if (machine_->threads_[static_cast<std::size_t>(thread_)].arrived)
    throw violation{"read of another block's memory after arrival at the barrier until which it may be read"};
  if (!other.shared) throw violation{"read of shared memory of a block that has none"};
  auto const* const there = reinterpret_cast<std::byte const*>(other.arena.data()) + offset;
  other.shared->check(reinterpret_cast<std::uintptr_t>(there), sizeof(T), access::read, machine_->accessor_of(thread_));
  T value;
  std::memcpy(static_cast<void*>(&value), there, sizeof(T));
  return value;
}
template <class T>
void hardware::store(T* at, std::type_identity_t<T> value) const {
  touch(at, sizeof(T), access::write);
  std::memcpy(static_cast<void*>(machine_->memory.place(at)), &value, sizeof(T));
}
template <int Bytes, class T>
syncnorm::cuda::detail::pack<T, Bytes> hardware::load_pack(T const* at, syncnorm::cuda::detail::cached) const {
  touch(at, Bytes, access::read);
  syncnorm::cuda::detail::pack<T, Bytes> some;
  std::memcpy(static_cast<void*>(&some), machine_->memory.place(at), Bytes);
  return some;
}
template <class T>
syncnorm::cuda::detail::pack<T> hardware::load_part(T const* at, syncnorm::cuda::detail::extent_of_pack const& part,
                                                    syncnorm::cuda::detail::cached) const {
  machine_->memory.check_place(at, 16, machine_->accessor_of(thread_));
  T some[syncnorm::cuda::detail::pack_length<T>];
  std::memset(static_cast<void*>(some), 0xa5, sizeof some);
  for (int e = part.first; e < part.last; ++e) some[e] = load(at + e);
  return syncnorm::cuda::detail::pack<T>{some};
}
template <class T, int Bytes>
void hardware::store_pack(T* at, syncnorm::cuda::detail::pack<T, Bytes> const& some,
                          syncnorm::cuda::detail::cached) const {
  touch(at, Bytes, access::write);
  std::memcpy(static_cast<void*>(machine_->memory.place(at)), &some, Bytes);
}
template <int Bytes, class T>
void hardware::copy(T* to, T const* from) const {
  touch(to, Bytes, access::write);
  auto const come = [to, some = load_pack<Bytes>(from, {})] { std::memcpy(static_cast<void*>(to), &some, Bytes); };
  auto& thread = machine_->threads_[static_cast<std::size_t>(thread_)];
  thread.copies.emplace(reinterpret_cast<std::uintptr_t>(to), machine::copy_in_flight{Bytes, thread.groups, come});
}
inline void hardware::wait_for_copies() const {
  auto& copies = machine_->threads_[static_cast<std::size_t>(thread_)].copies;
  for (auto const& [place, copy] : std::exchange(copies, {})) copy.come();
}
inline void hardware::commit_copies() const { ++machine_->threads_[static_cast<std::size_t>(thread_)].groups; }
template <int Latest>
void hardware::wait_for_copies_but() const {
  auto& thread = machine_->threads_[static_cast<std::size_t>(thread_)];
  std::erase_if(thread.copies, [&](auto const& each) {
    bool const comes = each.second.group < thread.groups - Latest;
    if (comes) each.second.come();
    return comes;
  });
}
inline void hardware::wait_for_previous() const { machine_->threads_[static_cast<std::size_t>(thread_)].early = false; }
inline std::uint32_t hardware::atomic_increment(std::uint32_t* at, std::uint32_t most) const {
  touch(at, sizeof *at, access::atomic);
  machine_->synchronize(thread_, at);
  auto* const there = machine_->memory.place(at);
  return std::exchange(*there, *there >= most ? 0 : *there + 1);
}

} // namespace simt
