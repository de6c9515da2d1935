#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>

#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/torch/detail/begun_passes.hpp>

namespace syncnorm::torch::detail {

class backward_call;
class forward_pass;
struct forward_inputs;
struct forward_tensors;
struct recorded_pass;
struct wanted_gradients;

/// What a forward pass on a device leaves there for its backward pass.
class device_record {
public:
  device_record() = default;
  device_record(device_record const&) = delete;
  device_record& operator=(device_record const&) = delete;
  virtual ~device_record() = default;
};

/// A pass on a device, described to begin in two phases.
class device_plan {
public:
  device_plan() = default;
  device_plan(device_plan const&) = delete;
  device_plan& operator=(device_plan const&) = delete;
  virtual ~device_plan() = default;
};

/// The passes of a module over tensors of a device that is not the CPU, and what they share.
class device_passes : public std::enable_shared_from_this<device_passes> {
public:
  using tensors = ::torch::autograd::variable_list;

  device_passes() = default;
  device_passes(device_passes const&) = delete;
  device_passes& operator=(device_passes const&) = delete;
  virtual ~device_passes() = default;

  /// The same for another module, which shares the communicator alone.
  [[nodiscard]] virtual std::shared_ptr<device_passes> renewed() const = 0;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Where the module's tensors are; without any, where the input is, or the current device.
  [[nodiscard]] virtual at::Device place_of(forward_inputs const& in) const = 0;

  /// As the functions of these names do on the CPU; on the device `on`, which is `place_of(in)` unless there is a fault.
  [[nodiscard]] virtual std::unique_ptr<forward_pass> make_forward_pass(forward_inputs in, backward_pass backward,
                                                                        std::string fault, at::Device on) = 0;
  [[nodiscard]] virtual std::unique_ptr<backward_call> make_backward_call(c10::intrusive_ptr<recorded_pass> pass,
                                                                          forward_tensors of, tensors dy,
                                                                          wanted_gradients wants,
                                                                          std::string fault) const = 0;

  /// Begins passes of this module, or, `grouped`, of several of which it is the first. Collective, unless all of them are this rank's
  /// alone.
  [[nodiscard]] virtual std::unique_ptr<begun_passes> begin(std::vector<std::unique_ptr<device_plan>> plans,
                                                            bool grouped) = 0;

  [[nodiscard]] virtual tensors double_backward(::torch::autograd::AutogradContext const& recorded,
                                                recorded_pass const& pass, tensors const& gradients,
                                                tensors const& saved, std::string fault) const = 0;

  /// Waits for the passes so far, and throws what has failed in them, the same on every rank.
  virtual void synchronize() = 0;
};

} // namespace syncnorm::torch::detail
