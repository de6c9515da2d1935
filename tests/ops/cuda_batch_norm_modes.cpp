#include "ops/cuda_step.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include <support/sanitized.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/comm/self.hpp>

namespace {

using syncnorm::activation;
using test::step_memory;
using layer_of_one = test::layer_over<syncnorm::self_communicator>;
using float_tensor = layer_cases::device_tensor<float>;

/// Whose costs let forward passes of 100 channels over 3 ranks gather, and backward passes reduce.
struct nccl_between_policies : test::nccl_communicator {
  explicit nccl_between_policies(test::nccl_communicator const& comm) : nccl_communicator{comm} {}
  [[nodiscard]] static syncnorm::exchange_cost cost_of_exchange() {
    using namespace syncnorm::detail;
    using syncnorm::exchange_policy;
    syncnorm::exchange_cost cost{.latency = 1e-9, .bandwidth = 1e6, .handling = 0};
    auto const policy_of = [&](merge_rule rule) {
      return cheaper_policy(cost, 3, rule, 100, 2, 1, sizeof(packet_header));
    };
    for (; cost.latency < 10; cost.latency *= 1.2)
      if (policy_of(merge_rule::moments) == exchange_policy::gather &&
          policy_of(merge_rule::sums) == exchange_policy::reduce)
        return cost;
    throw std::runtime_error{"there is no such cost"};
  }
};

} // namespace

TEST_CASE("the running standard deviation of a device is that of a variance and eps") {
  using syncnorm::running_variance;
  auto const make = [](running_variance kind) {
    return layer_of_one{{}, 3, {.norm = {.eps = 0.5, .momentum = 1.0, .variance = kind}}};
  };
  auto biased = make(running_variance::biased), deviation = make(running_variance::standard_deviation);
  test::stream const on;
  step_memory step;
  step.forward(biased, on), step.forward(deviation, on), on.wait();
  auto const variances = layer_cases::get(biased.running_var()), deviations = layer_cases::get(deviation.running_var());
  for (std::size_t c = 0; c < 3; ++c) CHECK(std::abs(deviations[c] - std::sqrt(variances[c] + 0.5F)) < 1e-5F);
}

TEST_CASE("a backward pass of a device needs nothing of a residual that is not activated") {
  test::stream const on;
  for (bool const masked : {false, true}) {
    CAPTURE(masked);
    layer_of_one layer{{}, 3};
    step_memory step;
    float_tensor residual{test::layout::nchw, 2, 3, 5}, dresidual{test::layout::nchw, 2, 3, 5};
    step.epilogue.residual = residual.view;
    if (masked) step.epilogue.mask = syncnorm::mask_of(step.mask.data(), 2, 5);
    auto const gradient = [&](long double anything) {
      residual.put(std::vector<long double>(30, 3), 0);
      step.forward(layer, on), layer.synchronize(on);
      residual.put(std::vector<long double>(30, anything), 0);
      layer.backward(step.x.view, step.dy.view, step.dx.view, step.epilogue, dresidual.view, {}, on);
      layer.synchronize(on);
      CHECK(dresidual.get() == step.dy.get());
      return step.dx.get();
    };
    CHECK(gradient(3) == gradient(std::numeric_limits<long double>::quiet_NaN()));
  }
}

TEST_CASE("double backward of this rank alone exchanges nothing on a device") {
  test::over_nccl(2, [](auto const& comm) {
    test::layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    float_tensor other{test::layout::nchw, 2, 3, 5};
    step.forward(layer, on), step.backward(layer, on), layer.synchronize(on);
    if (comm.rank() == 1) return;
    auto const before = fake_cuda::calls("ncclAllGather");
    layer.double_backward({.dx = step.dy.view}, step.x.view, step.dy.view, other.view, {}, {}, {.exchange = false}, on);
    layer.synchronize(on);
    CHECK(fake_cuda::calls("ncclAllGather") == before);
  });
}

TEST_CASE("forward passes of a device may gather where backward passes reduce, in one phase and in two") {
  test::over_nccl(3, [](auto const& comm) {
    test::layer_over<nccl_between_policies> whole{nccl_between_policies{comm}, 100},
        two{nccl_between_policies{comm}, 100};
    test::stream const on;
    auto const make = [] { return float_tensor{test::layout::nchw, 2, 100, 5}; };
    auto x = make(), y = make(), dx = make(), y_of_two = make(), dx_of_two = make();
    std::vector<long double> values(1000);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i % 7) + static_cast<float>(comm.rank());
    x.put(values, 0);
    for (int i = 0; i < (test::sanitized ? 1 : 3); ++i) {
      whole.forward(x.view, y.view, on), whole.backward(x.view, x.view, dx.view, on);
      two.begin_forward(x.view, y_of_two.view, on).finish(on);
      two.begin_backward(x.view, x.view, dx_of_two.view, on).finish(on);
    }
    whole.synchronize(on), two.synchronize(on);
    CHECK(test::state_of(whole) == test::state_of(two));
    CHECK(y.get() == y_of_two.get());
    CHECK(dx.get() == dx_of_two.get());
  });
  test::check_no_violations();
}

TEST_CASE(
    "a pass in place has room for a sixteenth of the channels more, and for all where the activation asks for it") {
  layer_of_one layer{{}, 20};
  float_tensor x{test::layout::nchw, 2, 20, 5};
  std::vector<long double> values(200);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7);
  test::stream const on;
  auto const forward = [&](activation const& kind) {
    x.put(values, 0);
    layer.forward_in_place(x.view, {.activation = kind}, on);
    layer.synchronize(on);
  };
  forward(activation::leaky_relu(0.5));
  std::vector<float> const zeros(2);
  test::copy_to_device(layer.gamma().data(), zeros.data(), zeros.size() * sizeof(float));
  CHECK_NOTHROW(forward(activation::leaky_relu(0.5)));
  CHECK_NOTHROW(forward(activation::relu()));
  CHECK(layer.kept().room() == 20);
}

TEST_CASE("a graph of a pass in place keeps its memory though there is larger room since") {
  layer_of_one layer{{}, 3};
  step_memory step;
  test::stream const on;
  syncnorm::batch_norm_epilogue<float> const relu{.activation = activation::relu()};
  auto const pass = [&] {
    layer.forward_in_place(step.x.view, relu, on);
    layer.backward_in_place(step.x.view, step.dy.view, step.dx.view, relu, {}, {}, on);
  };
  layer.reserve_in_place(step.x.view, relu.activation, 0, on);
  test::graph const captured{on, pass};
  pass();
  layer.synchronize(on);
  float_tensor large{test::layout::nchw, 20, 3, 50};
  layer.reserve_in_place(large.view, relu.activation, 0, on);
  auto const before = step.x.get();
  captured.launch();
  on.wait();
  CHECK(step.x.get() == before);
  test::check_no_violations();
}
