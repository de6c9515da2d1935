#include "ops/cuda_support.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>

#include <support/sanitized.hpp>

using test::layer_over;

TEST_CASE("a layer's passes agree with the oracle over NCCL, enqueued and replayed from a graph") {
  test::unload_kernels();
  for (bool const captured : {true, false}) {
    if (test::sanitized && !captured) continue;
    for (auto const& of : layer_cases::cases())
      test::over_nccl(3, [&](auto const& comm) {
        layer_cases::check_steps<layer_over<test::nccl_communicator>>(comm, of, captured);
      });
  }
  test::check_no_first_launches();
  test::check_no_violations();
}

TEST_CASE("a layer's passes agree with the oracle over a communicator of the host, and of one rank") {
  test::unload_kernels();
  for (auto const& of : layer_cases::cases()) {
    for (bool const captured : {true, false}) {
      if (test::sanitized && !captured) continue;
      layer_cases::check_steps<layer_over<syncnorm::self_communicator>>(syncnorm::self_communicator{}, of, captured);
    }
    test::over_threads(
        2, [&](auto const& comm) { layer_cases::check_steps<layer_over<test::staged_threads>>(comm, of, false); });
  }
  test::check_no_first_launches();
  test::check_no_violations();
}

TEST_CASE_TEMPLATE("passes of one rank agree with the oracle in the other element types", T,
                   __nv_bfloat16 AND_UNSANITIZED(double, __half)) {
  using layer =
      syncnorm::cuda::basic_batch_norm<T, syncnorm::self_communicator, syncnorm::accumulate_t<T>, test::simt_kernels>;
  layer_cases::check_cases<layer, T>(syncnorm::self_communicator{}, false);
  test::check_no_violations();
}

TEST_CASE_TEMPLATE("equal elements have exactly their mean on a device, and no spread", T, float,
                   __nv_bfloat16 AND_UNSANITIZED(double)) {
  using syncnorm::self_communicator;
  using alone = syncnorm::cuda::basic_batch_norm<T, self_communicator, syncnorm::accumulate_t<T>, test::simt_kernels>;
  layer_cases::check_equal_elements<alone, T>(self_communicator{}, false);
  if constexpr (std::is_same_v<T, double>)
    test::over_nccl(2, [](auto const& comm) {
      using layer = syncnorm::cuda::basic_batch_norm<double, test::nccl_communicator, double, test::simt_kernels>;
      layer_cases::check_equal_elements<layer, double>(comm, true);
      layer_cases::check_equal_elements<layer, double>(comm, true, syncnorm::exchange_policy::reduce);
    });
  test::check_no_violations();
}

TEST_CASE("a result that is no number is no agreement") {
  std::vector<float> const expected{1, 2, 3};
  float const nan = std::numeric_limits<float>::quiet_NaN(), infinite = std::numeric_limits<float>::infinity();
  for (auto const none : {nan, infinite, -infinite})
    CHECK_FALSE(layer_cases::error_of(std::vector<float>{1, none, 3}, expected) < 1);
}

TEST_CASE("a pass is two launches and one allgather, allocates nothing, and the host waits for nothing") {
  auto const raw = fake_nccl::make_group(2);
  struct rank {
    test::nccl_communicator comm;
    layer_over<test::nccl_communicator> layer;
    test::stream on{};
    layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 20}, y{test::layout::nhwc, 2, 3, 20},
        second{test::layout::nhwc, 2, 3, 20}, third{test::layout::nhwc, 2, 3, 20};

    explicit rank(ncclComm_t of) : comm{test::nccl_communicator::adopt(of)}, layer{comm, 3} {
      x.put(std::vector<long double>(120, 1), 0);
    }
  };
  std::array<std::unique_ptr<rank>, 2> ranks;
  for (std::size_t r = 0; r < 2; ++r) ranks[r] = std::make_unique<rank>(raw[r]);
  using kernels = syncnorm::cuda::kernels_of<float, test::simt_kernels>;
  auto const loads = [](auto const& f) {
    fake_cuda::reset();
    f();
    return fake_cuda::calls("cudaFuncGetAttributes");
  };
  CHECK(loads([&] { // lest a first launch wait for the device
          std::jthread const other{[&] { ranks[1]->layer.prepare(ranks[1]->on); }};
          ranks[0]->layer.prepare(ranks[0]->on);
        }) == 2 * loads(kernels::load_kernels));
  fake_cuda::reset();
  for (int step = 0; step < 3; ++step)
    for (auto const& each : ranks) { // one thread for both: neither waits for the other
      each->layer.forward(each->x.view, each->y.view, each->on);
      each->layer.backward(each->x.view, each->x.view, each->y.view, each->on);
    }
  for (auto const* const function :
       {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaStreamSynchronize", "cudaStreamQuery",
        "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync", "cudaHostGetDevicePointer"}) {
    CAPTURE(std::string{function});
    CHECK(fake_cuda::calls(function) == 0);
  }
  CHECK(fake_cuda::calls("kernel") == 3 * 2 * 4);
  CHECK(fake_cuda::calls("ncclAllGather") == 3 * 2 * 2);

  CHECK(loads([&] {
          for (auto const& each : ranks) each->layer.reserve_double_backward();
        }) == 2 * loads(kernels::load_double_backward_kernels));
  auto const for_batches = [&](auto const& pass) {
    for (auto const& each : ranks) {
      std::array<syncnorm::tensor_view<float const>, 3> const x{each->x.view, each->x.view, each->x.view};
      std::array const out{each->y.view, each->second.view, each->third.view};
      pass(*each, x, out);
    }
  };
  for_batches([](rank& of, auto const& x, auto const& out) { of.layer.forward(x, out, {}, of.on); });
  fake_cuda::reset();
  for_batches(
      [](rank& of, auto const& x, auto const& out) { of.layer.double_backward({}, x, x, out, {}, {}, {}, of.on); });
  for (auto const* const function : {"cudaMalloc", "cudaStreamSynchronize", "cudaMemcpyAsync"})
    CHECK(fake_cuda::calls(function) == 0);
  CHECK(fake_cuda::calls("kernel") == 2 * 6);
  CHECK(fake_cuda::calls("ncclAllGather") == 2);
  for (auto const& each : ranks) each->layer.synchronize(each->on);

  layer_over<syncnorm::self_communicator> alone{{}, 3};
  auto& of = *ranks[0];
  layer_cases::device_tensor<float> dx{test::layout::nchw, 2, 3, 20};
  fake_cuda::reset();
  alone.forward(of.x.view, dx.view, of.on);
  alone.backward(of.x.view, of.x.view, dx.view, of.on);
  CHECK(fake_cuda::calls("kernel") == 2); // whose channels stay on the chip
  alone.synchronize(of.on);
  test::check_no_violations();
}

TEST_CASE("one rank exchanges nothing, and neither do constant statistics and backward passes without exchange") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 2};
    layer_cases::device_tensor<float> x{test::layout::nchw, 3, 2, 5}, dy{test::layout::nchw, 3, 2, 5},
        y{test::layout::nchw, 3, 2, 5};
    std::vector<long double> values(30);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(test::noise(static_cast<std::uint64_t>(comm.rank()), i));
    x.put(values, 0), dy.put(values, 0);
    test::stream const on;
    layer.forward(x.view, y.view, on);
    layer.synchronize(on);
    if (comm.rank() == 0) { // alone
      layer.backward(x.view, dy.view, y.view, {.exchange = false}, on);
      layer.eval();
      layer.forward(x.view, y.view, on);
      layer.backward(x.view, dy.view, y.view, on);
      layer.train();
      layer.freeze_statistics();
      layer.forward(x.view, y.view, on);
      layer.synchronize(on);
      layer.freeze_statistics(false);
    }
    std::vector<long double> sums(2);
    for (std::size_t i = 0; i < values.size(); ++i) sums[i / 5 % 2] += values[i];
    auto const times = comm.rank() == 0 ? 2.0L : 0.0L;
    CHECK(layer_cases::error_of(layer_cases::get(layer.beta_grad()),
                                std::vector<long double>{times * sums[0], times * sums[1]}) < 1e-5);
    layer.zero_grad(on);
    on.wait();
    CHECK((layer_cases::get(layer.beta_grad()) == std::vector<float>{0, 0}));
    layer.forward(x.view, y.view, on);
    layer.synchronize(on);
  });
  test::check_no_violations();
}

TEST_CASE("what a rank without a batch gives a device as tensors of no elements may be anywhere") {
  for (bool const trains : {true, false})
    test::over_nccl(2, [&](auto const& comm) {
      layer_over<test::nccl_communicator> layer{comm, 3};
      layer.train(trains);
      auto const n = comm.rank() == 1 ? 0 : 2;
      auto const nchw = test::layout::nchw;
      layer_cases::device_tensor<float> x{nchw, n, 3, 5}, dy{nchw, n, 3, 5}, y{nchw, n, 3, 5}, dx{nchw, n, 3, 5},
          residual{nchw, n, 3, 5}, dresidual{nchw, n, 3, 5};
      test::device_buffer<float> elsewhere{2};
      syncnorm::batch_norm_epilogue<float> epilogue;
      if (n != 0) {
        epilogue.residual = residual.view;
      } else { // without a residual, and its gradient beside dx
        auto* const misaligned = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(elsewhere.data()) + 1);
        x.view.data = dy.view.data = y.view.data = misaligned;
        dx.view.data = dresidual.view.data = elsewhere.data();
      }
      test::stream const on;
      layer.forward(x.view, y.view, epilogue, on);
      layer.backward(x.view, dy.view, dx.view, epilogue, dresidual.view, {}, on);
      layer.double_backward({.dx = x.view, .dresidual = y.view}, x.view, dy.view, dx.view, dresidual.view, epilogue, {},
                            on);
      layer.begin_backward(x.view, dy.view, dx.view, epilogue, dresidual.view, {}, on).finish(on);
      layer.synchronize(on);
    });
  test::check_no_violations();
}

TEST_CASE("one element far from the rest costs a pass on a device no accuracy") {
  for (auto const order : {test::layout::nchw, test::layout::nhwc})
    // Of all, or of the far one and those that follow what a thread takes at a time.
    for (std::int64_t const gap : {1, 1100}) {
      constexpr std::int64_t channels = 8, spatial = 12'000;
      constexpr std::size_t size = channels * spatial;
      std::vector<std::uint8_t> counts(spatial, 1);
      std::fill(counts.begin() + 1, counts.begin() + gap, std::uint8_t{0});
      std::vector<long double> values(size), expected(size);
      for (std::size_t i = 0; i < size; ++i)
        values[i] = static_cast<float>(test::noise(1, i) + (i % spatial == 0 ? 1e5 : 0));
      for (std::size_t c = 0; c < channels; ++c) {
        auto const each_counted = [&](auto const& f) {
          for (std::size_t s = 0; s < spatial; ++s)
            if (counts[s] != 0) f(c * spatial + s);
        };
        long double const n = spatial + 1 - gap;
        long double mean = 0, var = 0;
        each_counted([&](std::size_t i) { mean += values[i] / n; });
        each_counted([&](std::size_t i) { var += (values[i] - mean) * (values[i] - mean) / n; });
        each_counted([&](std::size_t i) { expected[i] = (values[i] - mean) / std::sqrt(var + 1e-5L); });
      }
      layer_cases::device_tensor<float> x{order, 1, channels, spatial}, y{order, 1, channels, spatial};
      x.put(values, 0), y.put(values, 0);
      test::device_buffer<std::uint8_t> const mask{counts};
      syncnorm::batch_norm_epilogue<float> epilogue;
      if (gap > 1) epilogue.mask = syncnorm::mask_of(mask.data(), 1, spatial);
      epilogue.masked = syncnorm::masked_outputs::zero;
      layer_over<syncnorm::self_communicator> layer{syncnorm::self_communicator{}, channels};
      test::stream const on;
      layer.forward(x.view, y.view, epilogue, on);
      layer.synchronize(on);
      CHECK(layer_cases::error_of(y.get(), expected) < 1e-5);
    }
  test::check_no_violations();
}

TEST_CASE("where statistics are constant on a device, dx is what dy is, whatever x is") {
  constexpr std::int64_t n = 2, c = 9, s = 70;
  constexpr std::size_t size = n * c * s;
  std::vector<long double> values(size), gradients(size), expected(size);
  for (std::size_t i = 0; i < size; ++i) {
    values[i] = i % 3 == 0 ? 1 : i % 3 == 1 ? std::numeric_limits<long double>::quiet_NaN() : INFINITY;
    gradients[i] = i % 3 == 0 ? 2 + static_cast<long double>(i % 11) : 0;
    expected[i] = gradients[i] / std::sqrt(1 + 1e-5L);
  }
  test::stream const on;
  for (auto const order : {test::layout::nchw, test::layout::nhwc})
    for (auto const& kind : {syncnorm::activation::identity(), syncnorm::activation::relu()})
      for (bool const with_residual : {false, true})
        for (bool const affine : {true, false}) { // without, nobody needs the sums
          CAPTURE(affine);
          layer_cases::device_tensor<float> x{order, n, c, s}, dy{order, n, c, s}, y{order, n, c, s},
              dx{order, n, c, s}, residual{order, n, c, s}, dresidual{order, n, c, s};
          x.put(values, 0), dy.put(gradients, 0), residual.put(std::vector<long double>(size, 0.5L), 0);
          layer_over<syncnorm::self_communicator> layer{{}, c, {.affine = affine}};
          layer.eval();
          syncnorm::batch_norm_epilogue<float> epilogue{.activation = kind};
          if (with_residual) epilogue.residual = residual.view;
          layer.forward(x.view, y.view, epilogue, on);
          layer.prepare(on);
          on.wait();
          fake_cuda::reset();
          layer.backward(x.view, dy.view, dx.view, epilogue,
                         with_residual ? dresidual.view : decltype(dresidual.view){}, {}, on);
          layer.synchronize(on);
          if (!affine) CHECK(fake_cuda::calls("kernel") == 1);
          CHECK(layer_cases::error_of(dx.get(), expected) < 1e-5);
          if (with_residual) CHECK(layer_cases::error_of(dresidual.get(), gradients) == 0);
        }
  test::check_no_violations();
}

TEST_CASE("a backward pass of a device by constant statistics takes no sums that nobody wants") {
  constexpr std::int64_t n = 3, c = 4, s = 7;
  constexpr std::size_t size = n * c * s;
  std::vector<long double> const var{1, 4, 0.25L, 9};
  std::vector<long double> values(size), gradients(size), expected(size);
  for (std::size_t i = 0; i < size; ++i) {
    values[i] = static_cast<long double>(i * 5 % 13), gradients[i] = static_cast<long double>(i * 7 % 11) - 5;
    expected[i] = gradients[i] / std::sqrt(var[i / s % c] + 1e-5L);
  }
  struct batches {
    layer_cases::device_tensor<float> of[2]{{test::layout::nchw, n, c, s}, {test::layout::nhwc, n, c, s}};

    [[nodiscard]] std::array<syncnorm::tensor_view<float>, 2> views() const { return {of[0].view, of[1].view}; }
    [[nodiscard]] std::array<syncnorm::tensor_view<float const>, 2> inputs() const { return {of[0].view, of[1].view}; }
    void put(std::vector<long double> const& values) {
      for (auto& each : of) each.put(values, 0);
    }
  };
  batches x, dy, dx;
  layer_over<syncnorm::self_communicator> layer{{}, c, {.affine = false}};
  layer_cases::put(layer.running_var(), var);
  layer.eval();
  test::stream const on;
  auto const check = [&](std::size_t kernels, auto const& backward) {
    fake_cuda::reset();
    backward();
    CHECK(fake_cuda::calls("kernel") == kernels);
    layer.synchronize(on);
    for (auto& each : dx.of) CHECK(layer_cases::error_of(each.get(), expected) < 1e-5);
    dx.put(std::vector<long double>(size, -7));
  };
  x.put(values), dy.put(gradients);
  layer.forward(x.inputs(), dx.views(), {}, on);
  check(2, [&] { layer.backward(x.inputs(), dy.inputs(), dx.views(), {}, {}, {}, on); });
  layer.forward_in_place(x.views(), {}, on);
  // x comes back, if it can, by two kernels of each, and a header says whether it could.
  check(7, [&] { layer.backward_in_place(x.views(), dy.inputs(), dx.views(), {}, {}, {}, on); });
  for (auto& each : x.of) CHECK(layer_cases::error_of(each.get(), values) < 1e-5);
  test::check_no_violations();
}

TEST_CASE("parameters and running statistics are optional, and what was allocated is given back") {
  auto const before = fake_cuda::allocated();
  test::over_threads(2, [](auto const& comm) {
    layer_over<test::staged_threads> bare{comm, 2, {.affine = false, .track_running_stats = false}};
    layer_over<test::staged_threads> gamma_alone{comm, 2, {.parts = syncnorm::affine_parts::gamma}};
    CHECK((bare.gamma().empty() && bare.beta_grad().empty() && bare.running_mean().empty()));
    CHECK((gamma_alone.gamma().size() == 2 && gamma_alone.beta().empty()));
    layer_cases::device_tensor<float> x{test::layout::nchw, 1, 2, 2}, y{test::layout::nchw, 1, 2, 2};
    auto const r = static_cast<long double>(comm.rank());
    x.put({1 + r, 3 + r, 10, 30}, 0);
    test::stream const on;
    bare.eval(); // by the batch of this rank alone
    bare.forward(x.view, y.view, on);
    bare.synchronize(on);
    CHECK(layer_cases::error_of(y.get(), std::vector<long double>{-1, 1, -1, 1}) < 1e-5);
    gamma_alone.forward(x.view, y.view, on);
    gamma_alone.backward(x.view, x.view, y.view, on);
    gamma_alone.synchronize(on);
    auto const& state = gamma_alone;
    CHECK((layer_cases::get(state.running_mean()) != std::vector<float>{0, 0} &&
           layer_cases::get(std::span{state.num_batches_tracked(), 1})[0] == 1));
    gamma_alone.reset_running_stats(on);
    bare.reset_running_stats(on);
    CHECK((layer_cases::get(state.running_mean()) == std::vector<float>{0, 0} &&
           layer_cases::get(state.running_var()) == std::vector<float>{1, 1} &&
           layer_cases::get(std::span{state.num_batches_tracked(), 1})[0] == 0));
  });
  CHECK(fake_cuda::allocated() == before);
  test::check_no_violations();
}

TEST_CASE("where ReLU is off, nothing of what comes back is left on a device") {
  constexpr std::int64_t n = 3, c = 5, s = 7;
  syncnorm::batch_norm_epilogue<float> const relu{.activation = syncnorm::activation::relu()};
  for (auto const order : {test::layout::nchw, test::layout::nhwc}) {
    layer_cases::device_tensor<float> x{order, n, c, s}, y{order, n, c, s}, dy{order, n, c, s}, dx{order, n, c, s};
    std::vector<long double> values, off, spoiled;
    for (std::int64_t i = 0; i < n * c * s; ++i) values.push_back(static_cast<long double>(i * 5 % 13));
    x.put(values, 0);
    layer_over<syncnorm::self_communicator> layer{{}, c};
    test::stream const on;
    layer.forward(x.view, y.view, relu, on);
    layer.synchronize(on);
    for (auto const output : y.get()) {
      off.push_back(output > 0 ? 0.5L : 0);
      spoiled.push_back(output > 0 ? 0.5L : std::numeric_limits<long double>::infinity());
    }
    auto const backward = [&](std::vector<long double> const& gradient) {
      dy.put(gradient, 0);
      layer.zero_grad(on);
      layer.backward(x.view, dy.view, dx.view, relu, {}, {}, on);
      layer.synchronize(on);
      auto all = dx.get();
      for (auto const& of_channels : {layer.gamma_grad(), layer.beta_grad()})
        for (auto const value : layer_cases::get(of_channels)) all.push_back(value);
      return all;
    };
    CHECK(backward(spoiled) == backward(off));
  }
  test::check_no_violations();
}
