#include "cuda/fake_nccl.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include <pthread.h>

#include "cuda/fake_runtime.hpp"

namespace {

struct meeting {
  std::vector<std::vector<std::byte>> parts;
  std::size_t arrived = 0;
};

/// A collective by its name and the bytes of a rank.
using kind = std::pair<std::string, std::size_t>;

/// What the ranks of a communicator share.
struct world {
  explicit world(int ranks) : size{static_cast<std::size_t>(ranks)} {}
  std::size_t size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<long, meeting> meetings, splits;
  std::map<kind, std::size_t> connecting; // ranks that have called it
};

struct member {
  std::shared_ptr<world> group;
  std::size_t rank = 0;
  long next = 0, next_split = 0;
  std::atomic<bool> aborted = false;
  std::atomic<ncclResult_t> async_error = ncclSuccess;
  std::atomic<int> polls_of_a_call = 0, polls_left = 0;
  std::atomic<std::chrono::milliseconds> time_of_a_poll = std::chrono::milliseconds::zero();
  std::atomic<bool> freed = false;
  bool connects_lazily = false, blocks = true;
  std::set<kind> called; // the group's mutex
  ncclComm** split_into = nullptr;
  ncclComm* split = nullptr;
  long held = 0; // collectives that are yet to be enqueued, or may be by a graph; the group's mutex
};

} // namespace

struct ncclComm {
  std::shared_ptr<member> self;
};

namespace {

std::atomic<int> made = 0;
thread_local int group_depth = 0;
thread_local std::vector<std::function<void()>> grouped;
thread_local std::vector<std::pair<std::shared_ptr<member>, kind>> called_first; // and are to be connected

std::size_t size_of(ncclDataType_t type) {
  return type == ncclUint8 ? 1 : type == ncclFloat64 || type == ncclInt64 ? 8 : 4;
}

/// The parts of all ranks; none where the communicator is aborted while waiting.
std::vector<std::vector<std::byte>> meet(member& self, std::map<long, meeting> world::*where, long number,
                                         std::vector<std::byte> own) {
  auto& group = *self.group;
  std::unique_lock lock{group.mutex};
  auto& all = (group.*where)[number];
  all.parts.resize(group.size);
  all.parts[self.rank] = std::move(own);
  ++all.arrived;
  group.changed.notify_all();
  group.changed.wait(lock, [&] { return all.arrived == group.size || self.aborted; });
  if (self.aborted) return {};
  return all.parts;
}

/// Keeps the communicator from being freed for as long as a copy of it exists.
std::shared_ptr<void> hold(std::shared_ptr<member> const& self) {
  std::lock_guard const lock{self->group->mutex};
  ++self->held;
  return {nullptr, [self](void*) {
            std::lock_guard const lock_of_end{self->group->mutex};
            --self->held;
            self->group->changed.notify_all();
          }};
}

[[nodiscard]] bool is_connected(member& self) {
  return std::ranges::all_of(self.called,
                             [&](kind const& of) { return self.group->connecting[of] == self.group->size; });
}

[[nodiscard]] bool is_known(member& self, kind const& of) {
  std::lock_guard const lock{self.group->mutex};
  return self.called.contains(of) ||
         std::ranges::count(called_first, of, &std::pair<std::shared_ptr<member>, kind>::second) > 0;
}

/// Connects what was called first in a group, or by itself.
ncclResult_t connect() {
  auto code = ncclSuccess;
  for (auto const& first : std::exchange(called_first, {})) {
    auto const& self = first.first;
    auto const of = first.second;
    auto& group = *self->group;
    std::unique_lock lock{group.mutex};
    self->called.insert(of);
    ++group.connecting[of];
    group.changed.notify_all();
    if (self->blocks)
      group.changed.wait(lock, [&] { return group.connecting[of] == group.size || self->aborted; });
    else if (!is_connected(*self))
      code = ncclInProgress;
  }
  return code;
}

[[nodiscard]] bool is_on_own_stack(void const* pointer) {
  pthread_attr_t attributes;
  void* lowest = nullptr;
  std::size_t bytes = 0;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &lowest, &bytes);
  pthread_attr_destroy(&attributes);
  auto const* const first = static_cast<char const*>(lowest);
  return pointer >= first && pointer < first + bytes;
}

void finish_split(member& self) {
  if (auto** const into = std::exchange(self.split_into, nullptr)) *into = std::exchange(self.split, nullptr);
}

ncclResult_t destroy(ncclComm_t comm) {
  auto const self = comm->self;
  if (self->split != nullptr) --made;
  delete std::exchange(self->split, nullptr); // of which nobody has heard
  finish_split(*self);
  {
    std::unique_lock lock{self->group->mutex};
    self->group->changed.wait(lock, [&] { return self->held == 0; });
  }
  self->freed = true;
  delete comm;
  --made;
  return ncclSuccess;
}

template <class T>
void fold(std::vector<std::byte>& into, std::vector<std::byte> const& from, ncclRedOp_t op) {
  for (std::size_t i = 0; i < into.size(); i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, &into[i], sizeof a);
    std::memcpy(&b, &from[i], sizeof b);
    T const result = op == ncclSum ? static_cast<T>(a + b) : op == ncclMin ? std::min(a, b) : std::max(a, b);
    std::memcpy(&into[i], &result, sizeof result);
  }
}

void fold(std::vector<std::byte>& into, std::vector<std::byte> const& from, ncclDataType_t type, ncclRedOp_t op) {
  if (type == ncclFloat32) return fold<float>(into, from, op);
  if (type == ncclFloat64) return fold<double>(into, from, op);
  if (type == ncclInt32) return fold<std::int32_t>(into, from, op);
  fold<std::int64_t>(into, from, op);
}

ncclResult_t collective(char const* name, void const* in, std::size_t bytes, ncclComm_t comm, cudaStream_t stream,
                        std::function<void(std::vector<std::vector<std::byte>>)> finish) {
  if (auto const code = fake_cuda::enter(name); code != cudaSuccess) return ncclSystemError;
  // Collectives meet in the order in which they are called, or replayed, on whatever streams.
  auto issue = [self = comm->self, in, bytes, finish = std::move(finish), held = hold(comm->self)] {
    return [self, in, bytes, finish, number = self->next++] {
      if (self->aborted) return;
      auto const* const first = fake_cuda::on_host(static_cast<std::byte const*>(in));
      auto parts = meet(*self, &world::meetings, number, {first, first + bytes});
      if (parts.empty()) return;
      for (auto const& part : parts)
        if (part.size() != bytes) {
          self->async_error = ncclInvalidUsage;
          return;
        }
      finish(std::move(parts));
    };
  };
  auto enqueue = [stream, issue = std::move(issue)] { fake_cuda::enqueue_issued(stream, issue); };
  if (group_depth > 0)
    grouped.emplace_back(std::move(enqueue));
  else
    enqueue();
  if (kind const of{name, bytes}; comm->self->connects_lazily && !is_known(*comm->self, of)) {
    auto capturing = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream, &capturing);
    if (capturing != cudaStreamCaptureStatusNone)
      fake_cuda::note(std::string{name} + " of " + std::to_string(bytes) + " bytes connects ranks in a capture");
    called_first.emplace_back(comm->self, of);
    if (group_depth == 0) return connect();
  }
  comm->self->polls_left = comm->self->polls_of_a_call.load();
  return comm->self->polls_left > 0 ? ncclInProgress : ncclSuccess;
}

} // namespace

namespace fake_nccl {

std::vector<ncclComm_t> make_group(int size) {
  auto const group = std::make_shared<world>(size);
  std::vector<ncclComm_t> all;
  for (int r = 0; r < size; ++r) {
    auto self = std::make_shared<member>();
    self->group = group;
    self->rank = static_cast<std::size_t>(r);
    all.emplace_back(new ncclComm{std::move(self)});
    ++made;
  }
  return all;
}
void set_async_error(ncclComm_t comm, ncclResult_t code) { comm->self->async_error = code; }
void set_in_progress(ncclComm_t comm, int polls) { comm->self->polls_of_a_call = polls; }
void set_being_made(ncclComm_t comm, int polls) { comm->self->polls_left = polls; }
void set_connecting_lazily(ncclComm_t comm, bool blocks) {
  comm->self->connects_lazily = true;
  comm->self->blocks = blocks;
}
void set_slow_polls(ncclComm_t comm, std::chrono::milliseconds time) { comm->self->time_of_a_poll = time; }
int alive() { return made; }

} // namespace fake_nccl

extern "C" {

ncclResult_t ncclAllGather(void const* in, void* out, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective("ncclAllGather", in, count * size_of(type), comm, stream, [out](auto parts) {
    auto* to = fake_cuda::on_host(static_cast<std::byte*>(out));
    for (auto const& part : parts) to = std::copy(part.begin(), part.end(), to);
  });
}
ncclResult_t ncclAllReduce(void const* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective("ncclAllReduce", in, count * size_of(type), comm, stream, [=](auto parts) {
    for (std::size_t r = 1; r < parts.size(); ++r) fold(parts[0], parts[r], type, op);
    std::copy(parts[0].begin(), parts[0].end(), fake_cuda::on_host(static_cast<std::byte*>(out)));
  });
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--group_depth > 0) return ncclSuccess;
  for (auto const& enqueue : std::exchange(grouped, {})) enqueue();
  if (fake_cuda::enter("ncclGroupEnd") != cudaSuccess) return ncclInternalError;
  return connect();
}

ncclResult_t ncclCommUserRank(ncclComm_t const comm, int* rank) {
  if (comm->self->polls_left > 0) return ncclInvalidArgument;
  *rank = static_cast<int>(comm->self->rank);
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t const comm, int* size) {
  if (comm->self->polls_left > 0) return ncclInvalidArgument;
  *size = static_cast<int>(comm->self->group->size);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* code) {
  auto const self = comm->self;
  std::this_thread::sleep_for(self->time_of_a_poll.load());
  if (self->freed) fake_cuda::note("a communicator was freed while it was asked");
  *code = self->async_error;
  if (*code == ncclSuccess && self->polls_left > 0 && --self->polls_left > 0) *code = ncclInProgress;
  if (*code == ncclSuccess) {
    std::lock_guard const lock{self->group->mutex};
    if (!is_connected(*self)) *code = ncclInProgress;
  }
  if (*code == ncclSuccess) finish_split(*self);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->self->aborted = true;
  { std::lock_guard const lock{comm->self->group->mutex}; }
  comm->self->group->changed.notify_all();
  return destroy(comm);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return destroy(comm); }

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t*) {
  struct wish {
    int color, key;
  };
  auto& self = *comm->self;
  wish const mine{color, key};
  auto const* const bytes = reinterpret_cast<std::byte const*>(&mine);
  auto const number = self.next_split++;
  auto const wishes = meet(self, &world::splits, number, {bytes, bytes + sizeof mine});
  *part = nullptr;
  if (wishes.empty() || color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, std::size_t>> members;
  for (std::size_t r = 0; r < wishes.size(); ++r) {
    wish other;
    std::memcpy(&other, wishes[r].data(), sizeof other);
    if (other.color == color) members.emplace_back(other.key, r);
  }
  std::sort(members.begin(), members.end());
  static std::mutex mutex;
  static std::map<std::tuple<std::shared_ptr<world>, long, int>, std::shared_ptr<world>> worlds;
  std::lock_guard const lock{mutex};
  auto& group = worlds[{self.group, number, color}];
  if (!group) group = std::make_shared<world>(static_cast<int>(members.size()));
  auto joined = std::make_shared<member>();
  joined->group = group;
  joined->rank =
      static_cast<std::size_t>(std::find(members.begin(), members.end(), std::pair{key, self.rank}) - members.begin());
  int const polls = self.polls_of_a_call;
  joined->polls_left = polls; // it does not block either
  self.split_into = part;
  self.split = new ncclComm{std::move(joined)};
  ++made;
  if (polls == 0) {
    finish_split(self);
    return ncclSuccess;
  }
  if (is_on_own_stack(part)) fake_cuda::note("ncclCommSplit is given a place on the stack, which it may write later");
  self.polls_left = polls;
  return ncclInProgress;
}

char const* ncclGetErrorString(ncclResult_t code) {
  return code == ncclRemoteError ? "remote process exited or there was a network error" : "fake failure";
}
char const* ncclGetLastError(ncclComm_t) { return ""; }

} // extern "C"
