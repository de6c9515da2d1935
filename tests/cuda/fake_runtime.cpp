#include "cuda/fake_runtime.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include <sys/mman.h>

namespace {

/// Where SYNCNORM_TEST_JITTER is a number of microseconds, lets a thread wait now and then, up to as long: streams and hosts then
/// get ahead of each other as they never do on an idle machine.
void jitter() {
  static char const* const longest = std::getenv("SYNCNORM_TEST_JITTER");
  if (longest == nullptr) return;
  thread_local std::minstd_rand draw{std::random_device{}()};
  auto const kind = draw() % 200;
  if (kind == 0)
    std::this_thread::sleep_for(std::chrono::microseconds{draw() % (std::strtoul(longest, nullptr, 10) + 1)});
  if (kind < 60) std::this_thread::yield();
}

} // namespace

struct CUgraph_st {
  std::vector<std::function<std::function<void()>()>> work;
};
struct CUgraphExec_st {
  std::vector<std::function<std::function<void()>()>> work;
};

struct CUevent_st {
  int device;
  struct point {
    std::mutex mutex;
    std::condition_variable reached;
    long recorded = 0, completed = 0;
  };
  std::shared_ptr<point> latest = std::make_shared<point>();  // streams may outlast the event
  CUstream_st *recorded_on = nullptr, *captured_by = nullptr; // of a record in a capture
};

struct CUstream_st {
  explicit CUstream_st(int on) : device{on} {
    thread = std::jthread{[this](std::stop_token const& stop) { run(stop); }};
  }

  void push(std::function<void()> work) {
    {
      std::lock_guard const lock{mutex};
      queue.push_back(std::move(work));
      ++pushed;
    }
    changed.notify_all();
  }
  void drain() {
    std::unique_lock lock{mutex};
    changed.wait(lock, [&] { return done == pushed; });
  }
  [[nodiscard]] bool idle() {
    std::lock_guard const lock{mutex};
    return done == pushed;
  }

  int device;
  std::unique_ptr<CUgraph_st> captured; // while capturing
  std::atomic<bool> capture_failed = false;
  CUstream_st* captured_by = nullptr;      // the stream whose capture this one has joined
  std::map<CUstream_st*, bool> forks = {}; // streams that have joined this one's, and whether it waits for them

private:
  void run(std::stop_token const& stop) {
    std::unique_lock lock{mutex};
    for (;;) {
      changed.wait(lock, stop, [&] { return !queue.empty(); });
      if (queue.empty()) return;
      auto const work = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      jitter();
      work();
      lock.lock();
      ++done;
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable_any changed;
  std::deque<std::function<void()>> queue;
  long pushed = 0, done = 0;
  std::jthread thread; // last, so that it ends first
};

namespace {

struct allocation {
  std::size_t bytes;
  cudaMemoryType type;
  int device;
};

/// Addresses of device memory, and as many of the host's beside. Nothing is at the former, so that a host that takes one for its own
/// ends as it would on a machine with a GPU.
class device_room {
public:
  device_room() : device_{map(PROT_NONE)}, host_{map(PROT_READ | PROT_WRITE)} {}

  [[nodiscard]] fake_cuda::device_addresses addresses() const {
    auto const begin = reinterpret_cast<std::uintptr_t>(device_);
    return {begin, begin + room, reinterpret_cast<std::uintptr_t>(host_) - begin};
  }
  /// Null: there is no room left.
  [[nodiscard]] char* take(std::size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    if (auto& free = free_[bytes]; !free.empty()) {
      auto* const data = free.back();
      free.pop_back();
      return data;
    }
    if (bytes > room - used_) return nullptr;
    return device_ + std::exchange(used_, used_ + bytes);
  }
  void give_back(char* data, std::size_t bytes) { free_[(bytes + 255) / 256 * 256].push_back(data); }

private:
  static constexpr std::size_t room = std::size_t{1} << 34;
  static char* map(int protection) {
    auto* const at = mmap(nullptr, room, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::abort();
    return static_cast<char*>(at);
  }

  char *device_, *host_;
  std::size_t used_ = 0;
  std::map<std::size_t, std::vector<char*>> free_;
};

struct runtime {
  std::mutex mutex;
  device_room room;
  std::map<char const*, allocation> memory;
  std::map<CUstream_st*, std::thread::id> streams; // and who made them
  std::map<std::string, int> calls;
  std::vector<std::string> notes;
};

runtime& state() {
  static runtime all;
  return all;
}

struct failure {
  cudaError_t code;
  int after; ///< so many calls
};
thread_local std::map<std::string, failure> failures;
thread_local int current_device = 0;
thread_local CUstream_st* capturing_stream = nullptr;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::atomic<CUstream_st*> captured_globally = nullptr;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t remembered(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

CUstream_st& at(cudaStream_t stream) {
  static CUstream_st null_stream{0}, per_thread{0};
  return stream == nullptr ? null_stream : stream == cudaStreamPerThread ? per_thread : *stream;
}

bool is_captured(cudaStream_t stream) { return at(stream).captured || at(stream).captured_by != nullptr; }

/// What cudaMemset and cudaMemcpy to the device have still to do when they return, as streams see it that do not wait for the
/// default one: it is done when somebody waits for that.
std::vector<std::function<void()>>& unfinished() {
  static std::vector<std::function<void()>> all;
  return all;
}
void leave_unfinished(std::function<void()> work) {
  std::lock_guard const lock{state().mutex};
  unfinished().push_back(std::move(work));
}
void finish_default_stream() {
  at(nullptr).drain();
  std::lock_guard const lock{state().mutex};
  for (auto const& work : std::exchange(unfinished(), {})) work();
}

/// Waits as a device does before it frees memory; for the streams of this thread, whose device it would be.
void finish_own_streams() {
  std::vector<CUstream_st*> own;
  {
    std::lock_guard const lock{state().mutex};
    for (auto const& [stream, maker] : state().streams)
      if (maker == std::this_thread::get_id()) own.push_back(stream);
  }
  for (auto* const stream : own) stream->drain();
}

using fake_cuda::enter;

/// What `pointer` is in, if that was allocated here.
std::optional<allocation> find_memory(void const* pointer) {
  auto& all = state();
  std::lock_guard const lock{all.mutex};
  auto const after = all.memory.upper_bound(static_cast<char const*>(pointer));
  if (after == all.memory.begin()) return {};
  auto const& [first, memory] = *std::prev(after);
  if (static_cast<char const*>(pointer) >= first + memory.bytes) return {};
  return memory;
}

/// A call that is not allowed on a thread that is capturing, nor while any thread is capturing in global mode, unless in relaxed mode,
/// and spoils the capture.
cudaError_t enter_outside_of_capture(char const* function) {
  if (auto const code = enter(function); code != cudaSuccess) return code;
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  auto* const spoiled = capturing_stream != nullptr                   ? capturing_stream
                        : capture_mode == cudaStreamCaptureModeGlobal ? captured_globally.load()
                                                                      : nullptr;
  if (spoiled == nullptr) return cudaSuccess;
  spoiled->capture_failed = true;
  return remembered(cudaErrorStreamCaptureUnsupported);
}

/// A call that is never allowed of a stream that is being captured, either.
cudaError_t enter_outside_of_capture(char const* function, CUstream_st& of) {
  if (!of.captured && of.captured_by == nullptr) return enter_outside_of_capture(function);
  if (auto const code = enter(function); code != cudaSuccess) return code;
  bool const before = (of.captured ? of : *of.captured_by).capture_failed.exchange(true);
  return remembered(before ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnsupported);
}

cudaError_t allocate(char const* function, void** pointer, std::size_t bytes, cudaMemoryType type) {
  if (auto const code = enter_outside_of_capture(function); code != cudaSuccess) return code;
  auto& all = state();
  std::lock_guard const lock{all.mutex};
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  *pointer = type == cudaMemoryTypeDevice ? all.room.take(bytes) : std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*pointer == nullptr) return remembered(cudaErrorMemoryAllocation);
  std::memset(fake_cuda::on_host(*pointer), 0xc5, bytes); // what has not been written is no number
  all.memory[static_cast<char*>(*pointer)] = {bytes, type, current_device};
  return cudaSuccess;
}

cudaError_t release(char const* function, void* pointer) {
  if (auto const code = enter_outside_of_capture(function); code != cudaSuccess) return code;
  if (pointer == nullptr) return cudaSuccess;
  finish_default_stream();
  finish_own_streams();
  auto& all = state();
  std::lock_guard const lock{all.mutex};
  auto const found = all.memory.find(static_cast<char*>(pointer));
  if (found == all.memory.end()) return cudaErrorInvalidValue;
  auto const freed = found->second;
  all.memory.erase(found);
  if (freed.type == cudaMemoryTypeDevice)
    all.room.give_back(static_cast<char*>(pointer), freed.bytes);
  else
    std::free(pointer);
  return cudaSuccess;
}

} // namespace

namespace fake_cuda {

cudaError_t enter(char const* function) {
  jitter();
  auto& all = state();
  std::lock_guard const lock{all.mutex};
  ++all.calls[function];
  auto const found = failures.find(function);
  if (found == failures.end()) return cudaSuccess;
  if (found->second.after-- > 0) return cudaSuccess;
  auto const code = found->second.code;
  failures.erase(found);
  return std::string{function}.starts_with("cuda") ? remembered(code) : code;
}
int calls(std::string const& function) {
  std::lock_guard const lock{state().mutex};
  return state().calls[function];
}
void fail_next(std::string const& function, cudaError_t code, int after) { failures[function] = {code, after}; }
void reset() {
  std::lock_guard const lock{state().mutex};
  state().calls.clear();
  failures.clear();
}
device_addresses addresses() {
  static auto const all = state().room.addresses();
  return all;
}
std::size_t allocated() {
  std::lock_guard const lock{state().mutex};
  std::size_t bytes = 0;
  for (auto const& [first, memory] : state().memory) bytes += memory.bytes;
  return bytes;
}
void for_each_allocation(std::function<void(void*, std::size_t)> const& f) {
  std::lock_guard const lock{state().mutex};
  for (auto const& [first, memory] : state().memory) f(const_cast<char*>(first), memory.bytes);
}
void note(std::string const& what) {
  std::lock_guard const lock{state().mutex};
  state().notes.push_back(what);
}
std::vector<std::string> noted() {
  std::lock_guard const lock{state().mutex};
  return std::exchange(state().notes, {});
}
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  return enqueue_issued(stream, [work = std::move(work)] { return work; });
}
cudaError_t enqueue_issued(cudaStream_t stream, std::function<std::function<void()>()> issue) {

  auto& from = at(stream);
  if (from.captured_by != nullptr) from.captured_by->forks[&from] = false;
  auto& to =
      from.captured_by != nullptr ? *from.captured_by : from; // in the order of calls, which is one of the graph's

  if (to.captured)
    to.captured->work.push_back(std::move(issue));
  else
    to.push(issue());
  return cudaSuccess;
}
int device_of(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamPerThread ? current_device : stream->device;
}

} // namespace fake_cuda

extern "C" {

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  return allocate("cudaMalloc", pointer, bytes, cudaMemoryTypeDevice);
}
cudaError_t cudaFree(void* pointer) { return release("cudaFree", pointer); }
cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  return allocate("cudaHostAlloc", pointer, bytes, cudaMemoryTypeHost);
}
cudaError_t cudaFreeHost(void* pointer) { return release("cudaFreeHost", pointer); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return enter("cudaHostGetDevicePointer");
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, void const* pointer) {
  if (auto const code = enter("cudaPointerGetAttributes"); code != cudaSuccess) return code;
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  auto const memory = find_memory(pointer);
  if (!memory) return cudaSuccess;
  attributes->type = memory->type;
  attributes->device = memory->device;
  attributes->devicePointer = const_cast<void*>(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (auto const code = enter("cudaMemcpyAsync"); code != cudaSuccess) return code;
  if (kind == cudaMemcpyHostToDevice && !is_captured(stream) &&
      !find_memory(from)) { // pageable memory is copied before the call returns
    auto const* const first = static_cast<char const*>(from);
    return fake_cuda::enqueue(stream, [to, taken = std::vector<char>(first, first + bytes)] {
      std::memcpy(fake_cuda::on_host(to), taken.data(), taken.size());
    });
  }
  return fake_cuda::enqueue(stream, [=] { std::memmove(fake_cuda::on_host(to), fake_cuda::on_host(from), bytes); });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (auto const code = enter("cudaMemsetAsync"); code != cudaSuccess) return code;
  return fake_cuda::enqueue(stream, [=] { std::memset(fake_cuda::on_host(to), value, bytes); });
}
cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (auto const code = enter_outside_of_capture("cudaMemcpy"); code != cudaSuccess) return code;
  auto const* const first = static_cast<char const*>(from);
  if (kind == cudaMemcpyHostToDevice) {
    leave_unfinished([to, taken = std::vector<char>(first, first + bytes)] {
      std::memcpy(fake_cuda::on_host(to), taken.data(), taken.size());
    });
    return cudaSuccess;
  }
  finish_default_stream();
  std::memmove(fake_cuda::on_host(to), fake_cuda::on_host(from), bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  if (auto const code = enter_outside_of_capture("cudaMemset"); code != cudaSuccess) return code;
  leave_unfinished([=] { std::memset(fake_cuda::on_host(to), value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st{current_device};
  {
    std::lock_guard const lock{state().mutex};
    state().streams[*stream] = std::this_thread::get_id();
  }
  return enter("cudaStreamCreateWithFlags");
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream->drain();
  {
    std::lock_guard const lock{state().mutex};
    state().streams.erase(stream);
  }
  delete stream;
  return enter("cudaStreamDestroy");
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (auto const code = enter_outside_of_capture("cudaStreamSynchronize", at(stream)); code != cudaSuccess) return code;
  at(stream).drain();
  if (stream == nullptr) finish_default_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (auto const code = enter_outside_of_capture("cudaStreamQuery", at(stream)); code != cudaSuccess) return code;
  return remembered(at(stream).idle() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return enter("cudaStreamIsCapturing");
}
cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  if (auto const code = enter_outside_of_capture("cudaStreamGetDevice", at(stream)); code != cudaSuccess) return code;
  *device = at(stream).device;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return enter("cudaThreadExchangeStreamCaptureMode");
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  at(stream).captured = std::make_unique<CUgraph_st>();
  at(stream).capture_failed = false;
  capturing_stream = &at(stream);
  if (mode == cudaStreamCaptureModeGlobal) captured_globally = capturing_stream;
  return enter("cudaStreamBeginCapture");
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  capturing_stream = nullptr;
  if (captured_globally == &at(stream)) captured_globally = nullptr;
  auto captured = std::move(at(stream).captured);
  *graph = nullptr;
  bool joined = true;
  for (auto const& [fork, waited_for] : std::exchange(at(stream).forks, {})) {
    fork->captured_by = nullptr;
    joined = joined && waited_for;
  }
  if (!joined) return cudaErrorStreamCaptureUnjoined;
  if (at(stream).capture_failed) return cudaErrorStreamCaptureInvalidated;
  *graph = captured.release();
  return enter("cudaStreamEndCapture");
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = new CUgraphExec_st{graph->work};
  return enter("cudaGraphInstantiate");
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  for (auto const& issue : exec->work) at(stream).push(issue());
  return enter("cudaGraphLaunch");
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st{current_device};
  return enter_outside_of_capture("cudaEventCreateWithFlags");
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (auto const code = enter("cudaEventRecord"); code != cudaSuccess) return code;
  if (fake_cuda::device_of(stream) != event->device) return remembered(cudaErrorInvalidResourceHandle);
  auto& from = at(stream);
  event->recorded_on = &from;
  event->captured_by = from.captured ? &from : from.captured_by;
  if (event->captured_by != nullptr) return cudaSuccess;
  long number = 0;

  {
    std::lock_guard const lock{event->latest->mutex};
    number = ++event->latest->recorded;
  }
  return fake_cuda::enqueue(stream, [number, latest = event->latest] {
    std::lock_guard const lock{latest->mutex};
    latest->completed = std::max(latest->completed, number);
    latest->reached.notify_all();
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (auto const code = enter("cudaStreamWaitEvent"); code != cudaSuccess) return code;
  auto& to = at(stream);
  if (event->captured_by != nullptr) {
    if (event->captured_by == &to)
      to.forks[event->recorded_on] = true;
    else
      (to.captured_by = event->captured_by)->forks[&to] = false;
    return cudaSuccess;
  }
  if (to.captured || to.captured_by != nullptr) {
    to.capture_failed = true;
    return cudaErrorStreamCaptureIsolation;
  }
  std::lock_guard const lock{event->latest->mutex};
  return fake_cuda::enqueue(stream, [number = event->latest->recorded, latest = event->latest] {
    std::unique_lock waiting{latest->mutex};
    latest->reached.wait(waiting, [&] { return latest->completed >= number; });
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (auto const code = enter_outside_of_capture("cudaEventQuery"); code != cudaSuccess) return code;
  std::lock_guard const lock{event->latest->mutex};
  return remembered(event->latest->completed == event->latest->recorded ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto const code = enter_outside_of_capture("cudaEventSynchronize"); code != cudaSuccess) return code;
  auto& latest = *event->latest;
  std::unique_lock lock{latest.mutex};
  latest.reached.wait(lock, [&] { return latest.completed == latest.recorded; });
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return enter("cudaGetDevice");
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return enter("cudaSetDevice");
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return enter("cudaGetDeviceCount");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
  case cudaDevAttrComputeCapabilityMajor:
    *value = 9;
    break;
  case cudaDevAttrMultiProcessorCount:
    *value = 4;
    break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    *value = 227 * 1024;
    break;
  case cudaDevAttrClusterLaunch:
    *value = 1;
    break;
  default:
    *value = 0;
  }
  return enter("cudaDeviceGetAttribute");
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
char const* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing" : "fake error";
}
char const* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }

} // extern "C"
