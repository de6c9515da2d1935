#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/cuda/kernels.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>
#include <syncnorm/ops/cuda_pending_passes.hpp>
#include <syncnorm/torch/detail/begun_passes.hpp>
#include <syncnorm/torch/detail/cuda_backward_call.hpp>
#include <syncnorm/torch/detail/cuda_begun_passes.hpp>
#include <syncnorm/torch/detail/cuda_buffers.hpp>
#include <syncnorm/torch/detail/cuda_double_backward.hpp>
#include <syncnorm/torch/detail/cuda_forward_pass.hpp>
#include <syncnorm/torch/detail/forward_inputs.hpp>
#include <syncnorm/torch/sync_batch_norm.hpp>

namespace syncnorm::torch {

namespace detail {

/// The passes of a module over CUDA tensors, which exchange over `C`.
template <class Kernels, communicator C>
class cuda_passes final : public device_passes {
public:
  explicit cuda_passes(C comm) : comm_{std::move(comm)} {}

  [[nodiscard]] std::shared_ptr<device_passes> renewed() const override { return std::make_shared<cuda_passes>(comm_); }
  [[nodiscard]] int rank() const override { return syncnorm::rank(comm_); }
  [[nodiscard]] int size() const override { return syncnorm::size(comm_); }

  [[nodiscard]] at::Device place_of(forward_inputs const& in) const override {
    for (auto const& tensor : {in.weight, in.bias, in.running_mean, in.running_var, in.first()})
      if (tensor.defined() && tensor.is_cuda()) return tensor.device();
    return c10::impl::VirtualGuardImpl{at::kCUDA}.getDevice();
  }

  [[nodiscard]] std::unique_ptr<forward_pass> make_forward_pass(forward_inputs in, backward_pass backward,
                                                                std::string fault, at::Device on) override {
    if (fault.empty()) fault = find_fault(in, backward, on);
    if (fault.empty() && backward == backward_pass::possible) in.make_savable();
    auto const type = fault.empty() ? in.first().scalar_type() : at::kFloat;
    auto const parameters = in.type_of_parameters();
    auto shared = buffers(on, in.channels, in.options.exchange);
    return with_types(type, parameters, [&]<class Types>(Types) -> std::unique_ptr<forward_pass> {
      return std::make_unique<cuda_forward_pass<Kernels, C, typename Types::element, typename Types::parameter>>(
          std::move(in), shared_from_this(), std::move(shared), on, comm_, type, parameters, std::move(fault),
          backward);
    });
  }

  [[nodiscard]] std::unique_ptr<backward_call> make_backward_call(c10::intrusive_ptr<recorded_pass> pass,
                                                                  forward_tensors of, tensors dy,
                                                                  wanted_gradients wants,
                                                                  std::string fault) const override {
    auto const element = pass->element, parameters = pass->parameters;
    return with_types(element, parameters, [&]<class Types>(Types) -> std::unique_ptr<backward_call> {
      return std::make_unique<cuda_backward_call<Kernels, C, typename Types::element, typename Types::parameter>>(
          std::move(pass), std::move(of), std::move(dy), std::move(wants), comm_, std::move(fault));
    });
  }

  [[nodiscard]] std::unique_ptr<begun_passes> begin(std::vector<std::unique_ptr<device_plan>> plans,
                                                    bool grouped) override {
    std::vector<cuda_buffers*> buffers;
    std::vector<cuda::batch_norm_pass> passes;
    cuda_begun_passes::watches watched;
    for (auto const& plan : plans) {
      auto& each = static_cast<cuda_plan&>(*plan);
      buffers.push_back(each.buffers);
      passes.push_back(std::move(each.pass));
      watched.push_back(std::move(each.watched));
    }
    auto& first = *buffers.front();
    return std::make_unique<cuda_begun_passes>(std::move(buffers), std::move(watched), [&](cudaStream_t stream) {
      if (grouped)
        return groups_.try_emplace(first.device().index(), comm_).first->second.begin(std::move(passes), stream);
      auto& workspace = first.workspace();
      bool agreed = workspace.agreed();
      return cuda::pending_passes::begin(comm_, passes, workspace.pool(), workspace.passes_report(), agreed, stream,
                                         syncnorm::detail::pass_form::two_phases);
    });
  }

  [[nodiscard]] tensors double_backward(::torch::autograd::AutogradContext const& recorded, recorded_pass const& pass,
                                        tensors const& gradients, tensors const& saved,
                                        std::string fault) const override {
    using function = batch_norm_backward_function;
    return with_types(function::type_of(saved, fault), pass.parameters, [&]<class Types>(Types) {
      using T = typename Types::element;
      using P = typename Types::parameter;
      return function::run<T, P>(
          recorded, pass, gradients, saved, std::move(fault),
          [&](double_backward_views<T, P> const& of) { run_double_backward<Kernels>(comm_, pass, of); });
    });
  }

  void synchronize() override {
    for (auto const& [of, shared] : buffers_) shared->synchronize(comm_);
    for (auto& [device, group] : groups_) group.check(); // whose passes are among those that were waited for
  }

private:
  [[nodiscard]] std::shared_ptr<cuda_buffers> buffers(at::Device device, std::int64_t channels,
                                                      exchange_policy policy) {
    auto& found = buffers_[{device.index(), policy}];
    if (found == nullptr) found = std::make_shared<cuda_buffers>(comm_, device, channels, policy);
    return found;
  }

  C comm_;
  std::map<std::pair<at::DeviceIndex, exchange_policy>, std::shared_ptr<cuda_buffers>> buffers_;
  std::map<at::DeviceIndex, cuda::batch_norm_group<C>>
      groups_; // of the passes with others, of which the module's is the first
};

/// Gives modules their passes on a device.
class device_of {
public:
  static void check(SyncBatchNormImpl const& norm, device_passes const& passes) {
    auto const& host = norm.state_->comm;
    if (syncnorm::size(host) == 1) return;
    auto const text = [](int rank, int size) { return "rank " + std::to_string(rank) + " of " + std::to_string(size); };
    if (syncnorm::size(host) != passes.size() || syncnorm::rank(host) != passes.rank())
      throw invalid_argument_error{"use_cuda: a module is on " + text(syncnorm::rank(host), syncnorm::size(host)) +
                                   ", the communicator for CUDA tensors on " + text(passes.rank(), passes.size())};
  }
  static void set(SyncBatchNormImpl& norm, std::shared_ptr<device_passes> passes) {
    norm.set_communicator(norm.state_->comm);
    norm.state_->device = std::move(passes);
  }
};

} // namespace detail

/// Lets every SyncBatchNorm in `root` take CUDA tensors, given that its own tensors are there (`root.to(torch::kCUDA)`, before or
/// after), with `comm` for what ranks exchange: `nccl_communicator`, `staged` over a communicator of the host, or
/// `self_communicator`. Not collective, but the same on every rank.
///
///     net = syncnorm::torch::convert_sync_batchnorm(net, syncnorm::any_communicator{});
///     syncnorm::torch::use_cuda(*net, syncnorm::nccl_communicator{comm});
///     net->to(torch::kCUDA);
///
/// A pass is enqueued on libtorch's current stream of the module's device, by the kernels of a source that nvcc has compiled, which
/// instantiates `kernels_of` for float, double, __half and __nv_bfloat16. After the first of an element type, and of as many as
/// were ever pending at a time, a pass allocates by libtorch's allocator alone, and the host does not wait for the device, unless
/// the communicator does. `clone` gives a module passes of its own; `set_communicator`, and so `convert_sync_batchnorm`, takes
/// them away. CPU tensors go over the module's communicator as before, in modules that are on the CPU; a module without
/// parameters and statistics takes CUDA tensors alone.
///
/// Errors. What is wrong on one rank is an error on every rank. With several ranks, each throws it as soon as it hears of it from its
/// device: in the pass, in a later one of the module, or in `synchronize(root)`, which is where all throw it at the same place. The
/// pass whose fault it is has written nothing then, its output included; a later one that throws it may have been done all the same.
///
/// In training over several ranks, outputs require gradients wherever autograd records, so that every rank joins a backward pass that
/// one of them needs. A backward pass begins at one tensor, the loss: from several, autograd may take them in an order of its own on
/// each rank. Several ranks of one process take a device each, as autograd has one thread for each device.
///
/// In place, a pass makes room for as many channels that cannot be recovered as the latest one has kept that the host knows of, and for
/// a sixteenth of all besides, four at least. It waits for the stream to read weight and bias before the first such pass, and where
/// they are in other memory since. Where they come to need more room from one pass to the next, that is an error on every rank, the
/// inputs stay, and the next pass reads them again. After an error the inputs of the ranks that had not heard of it are recorded as
/// written to; so all begin again with new ones.
///
/// Throws invalid_argument_error where a module's communicator has several ranks, and others than `comm`; nothing has changed then.
template <class Kernels = cuda::compiled_kernels, communicator C>
void use_cuda(::torch::nn::Module& root, C const& comm) {
  static_assert(allgathers_on_stream<C, std::byte> || std::same_as<C, self_communicator>,
                "use_cuda: the communicator is for host memory; syncnorm::staged makes one for device memory of it");
  detail::cuda_passes<Kernels, C> const passes{comm};
  for_each_sync_batch_norm(root, [&](SyncBatchNormImpl const& norm) { detail::device_of::check(norm, passes); });
  for_each_sync_batch_norm(root, [&](SyncBatchNormImpl& norm) { detail::device_of::set(norm, passes.renewed()); });
}

} // namespace syncnorm::torch
