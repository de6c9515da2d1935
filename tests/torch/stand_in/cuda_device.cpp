#include "torch/stand_in/cuda_device.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/fake_runtime.hpp"

namespace fake_torch {

namespace {

struct registry {
  std::mutex mutex;
  std::vector<cudaStream_t> streams; // of all devices; a stream's id is its place, plus one
  std::array<cudaStream_t, devices> defaults{};
};
registry& known() {
  static auto* const all = new registry; // as long as any stream
  return *all;
}

class device_scope {
public:
  explicit device_scope(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~device_scope() { cudaSetDevice(before_); }
  device_scope(device_scope const&) = delete;
  device_scope& operator=(device_scope const&) = delete;

private:
  int before_ = 0;
};

cudaStream_t create_stream(int device) {
  device_scope const there{device};
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

thread_local std::array<c10::StreamId, devices> current_streams{};

int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

} // namespace

cudaStream_t default_stream(int device) {
  std::lock_guard const lock{known().mutex};
  auto& stream = known().defaults.at(static_cast<std::size_t>(device));
  if (stream == nullptr) stream = create_stream(device);
  return stream;
}
c10::StreamId make_stream(int device) {
  std::lock_guard const lock{known().mutex};
  known().streams.push_back(create_stream(device));
  return static_cast<c10::StreamId>(known().streams.size());
}
cudaStream_t handle_of(c10::StreamId id, int device) {
  if (id == 0) return default_stream(device);
  std::lock_guard const lock{known().mutex};
  return known().streams.at(static_cast<std::size_t>(id - 1));
}

namespace {

cudaStream_t current_stream(int device) {
  return handle_of(current_streams.at(static_cast<std::size_t>(device)), device);
}

std::atomic<int> operations_on_host;

/// What autograd and guards need of a device.
struct guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto const before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return {type(), static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device to) const override { cudaSetDevice(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { cudaSetDevice(to.index()); }
  c10::Stream getStream(c10::Device of) const noexcept override {
    auto const index = of.has_index() ? of.index() : static_cast<c10::DeviceIndex>(current_device());
    return c10::Stream{c10::Stream::UNSAFE, {type(), index}, current_streams[static_cast<std::size_t>(index)]};
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return c10::Stream{c10::Stream::UNSAFE, of, 0}; }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    auto& current = current_streams[static_cast<std::size_t>(to.device_index())];
    return c10::Stream{c10::Stream::UNSAFE, to.device(), std::exchange(current, to.id())};
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }

  void record(void** event, c10::Stream const& on, c10::DeviceIndex, c10::EventFlag) const override {
    auto& made = reinterpret_cast<cudaEvent_t&>(*event);
    if (made == nullptr) cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    cudaEventRecord(made, handle_of(on.id(), on.device_index()));
  }
  void block(void* event, c10::Stream const& on) const override {
    cudaStreamWaitEvent(handle_of(on.id(), on.device_index()), static_cast<cudaEvent_t>(event), 0);
  }
  bool queryEvent(void* event) const override { return cudaEventQuery(static_cast<cudaEvent_t>(event)) == cudaSuccess; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  bool queryStream(c10::Stream const& of) const override {
    return cudaStreamQuery(handle_of(of.id(), of.device_index())) == cudaSuccess;
  }
  void synchronizeStream(c10::Stream const& of) const override {
    cudaStreamSynchronize(handle_of(of.id(), of.device_index()));
  }
  void recordDataPtrOnStream(c10::DataPtr const& data, c10::Stream const&) const override;
};
C10_REGISTER_GUARD_IMPL(CUDA, guard);

struct hooks final : at::CUDAHooksInterface {
  explicit hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; } // lest autograd take no notice of streams
  bool hasPrimaryContext(std::int64_t) const override { return true; }
  std::int64_t current_device() const override { return fake_torch::current_device(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, hooks);

/// Gives out again what was freed, to work of the same stream, whether or not that is done with it; but never what another stream has
/// used, too, as nobody waits for that one here.
class caching_allocator final : public c10::Allocator {
public:
  c10::DataPtr allocate(std::size_t n) const override {
    auto const device = current_device();
    c10::Device const on{c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)};
    if (n == 0) return {nullptr, on};
    block const made{(n + 511) / 512 * 512, device, current_streams.at(static_cast<std::size_t>(device))};
    std::lock_guard const lock{mutex()};
    auto& free = free_blocks()[made];
    void* data = nullptr;
    if (free.empty()) {
      cudaMalloc(&data, made.bytes);
    } else {
      data = free.back();
      free.pop_back();
    }
    blocks()[data] = made;
    return {data, data, &give_back, on};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  static void keep(void* data) {
    std::lock_guard const lock{mutex()};
    if (auto const found = blocks().find(data); found != blocks().end()) found->second.kept = true;
  }

private:
  struct block {
    std::size_t bytes = 0;
    int device = 0;
    c10::StreamId stream = 0;
    bool kept = false;
    auto operator<=>(block const&) const = default;
  };
  static std::mutex& mutex() {
    static auto* const one = new std::mutex;
    return *one;
  }
  static std::map<void*, block>& blocks() {
    static auto* const all = new std::map<void*, block>;
    return *all;
  }
  static std::map<block, std::vector<void*>>& free_blocks() {
    static auto* const all = new std::map<block, std::vector<void*>>;
    return *all;
  }
  static void give_back(void* data) {
    std::lock_guard const lock{mutex()};
    auto const found = blocks().find(data);
    if (!found->second.kept) free_blocks()[found->second].push_back(data);
    blocks().erase(found);
  }
};
caching_allocator allocator;

void guard::recordDataPtrOnStream(c10::DataPtr const& data, c10::Stream const&) const {
  caching_allocator::keep(data.get());
}

at::Tensor empty(at::IntArrayRef sizes, c10::optional<at::ScalarType> type, c10::optional<at::Layout>,
                 c10::optional<at::Device> device, c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  c10::DeviceGuard const there{device.value_or(c10::Device{c10::DeviceType::CUDA})};
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet{c10::DispatchKey::CUDA},
                                   at::dtype_or_default(type), format);
}
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, c10::optional<at::ScalarType> type,
                         c10::optional<at::Layout>, c10::optional<at::Device> device, c10::optional<bool>) {
  c10::DeviceGuard const there{device.value_or(c10::Device{c10::DeviceType::CUDA})};
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet{c10::DispatchKey::CUDA},
                                           at::dtype_or_default(type));
}

int index_of(at::Tensor const& tensor) { return tensor.device().index(); }

/// The same memory as a tensor of the host, which stays there as the allocator never gives it back.
at::Tensor on_host(at::Tensor const& of) {
  if (!of.is_cuda()) return of;
  auto const type = at::TensorOptions{}.dtype(of.scalar_type());
  return at::from_blob(fake_cuda::on_host(of.data_ptr()), of.sizes(), of.strides(), type);
}

at::Tensor& copy_(at::Tensor& self, at::Tensor const& from, bool) {
  auto const device = index_of(self.is_cuda() ? self : from);
  auto const stream = current_stream(device);
  auto const run = [to = on_host(self), source = on_host(from)] {
    at::AutoDispatchBelowADInplaceOrView const below;
    at::Tensor{to}.copy_(source);
  };
  if (self.is_cuda() && from.is_cuda()) {
    fake_cuda::enqueue(stream, run);
  } else {
    ++operations_on_host;
    cudaStreamSynchronize(stream);
    run();
  }
  return self;
}
at::Tensor& fill_with(at::Tensor& self, at::Scalar const& value) {
  fake_cuda::enqueue(current_stream(index_of(self)), [to = on_host(self), value] {
    at::AutoDispatchBelowADInplaceOrView const below;
    at::Tensor{to}.fill_(value);
  });
  return self;
}
at::Tensor& fill_with_zero(at::Tensor& self) { return fill_with(self, 0); }
/// How the fallback gives back what an operation has written on the host.
at::Tensor copy_from_and_resize(at::Tensor const& from, at::Tensor const& to) {
  if (to.sizes() != from.sizes()) {
    auto const fresh = at::empty(from.sizes(), to.options());
    to.unsafeGetTensorImpl()->set_storage_and_dtype(fresh.storage(), fresh.dtype());
    to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
  }
  to.copy_(from);
  return to;
}
at::Scalar local_scalar_dense(at::Tensor const& self) {
  ++operations_on_host;
  cudaStreamSynchronize(current_stream(index_of(self)));
  return on_host(self).item();
}
void elsewhere(c10::OperatorHandle const& op, torch::jit::Stack* stack) {
  ++operations_on_host;
  at::native::cpu_fallback(op, stack);
}

} // namespace

int host_operations() { return operations_on_host.exchange(0); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("fill_.Scalar", &fill_with);
  m.impl("zero_", &fill_with_zero);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>()); }

} // namespace fake_torch

namespace c10::cuda {

CUDAStream getCurrentCUDAStream(DeviceIndex device) {
  auto const index = device < 0 ? static_cast<DeviceIndex>(fake_torch::current_device()) : device;
  return CUDAStream{c10::impl::VirtualGuardImpl{DeviceType::CUDA}.getStream({DeviceType::CUDA, index})};
}
cudaStream_t CUDAStream::stream() const { return fake_torch::handle_of(id(), device_index()); }

} // namespace c10::cuda
