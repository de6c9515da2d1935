#include "ops/cuda_support.hpp"

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>

#include <support/sanitized.hpp>

namespace {

using test::layer_over;

/// The tensors of a step on one rank.
struct step_memory {
  layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 5}, y{test::layout::nchw, 2, 3, 5},
      dy{test::layout::nchw, 2, 3, 5}, dx{test::layout::nchw, 2, 3, 5};
  std::vector<float> on_host = std::vector<float>(30, 1);
  test::device_buffer<std::uint8_t> mask{std::vector<std::uint8_t>(10, 1)};
  syncnorm::batch_norm_epilogue<float> epilogue;

  step_memory() {
    std::vector<long double> values(30);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7);
    x.put(values, 0), dy.put(values, 0);
    y.put(std::vector<long double>(30, -5), 0), dx.put(std::vector<long double>(30, -6), 0);
  }
  template <class Layer>
  void forward(Layer& layer, test::stream const& on) {
    layer.forward(x.view, y.view, epilogue, on);
  }
  template <class Layer>
  void backward(Layer& layer, test::stream const& on) {
    layer.backward(x.view, dy.view, dx.view, epilogue, {}, {}, on);
  }
};

/// What a communicator may fail to deliver: anything, what it sums up, or, of the moments of 3 channels, the means or m2 alone.
enum class silence : std::uint8_t { all, sums, means, m2 };

/// NCCL, which delivers nothing where `silent`, or only `less` than that.
struct falling_silent {
  test::nccl_communicator const* comm;
  bool const* silent;
  silence less = silence::all;

  [[nodiscard]] int rank() const { return comm->rank(); }
  [[nodiscard]] int size() const { return comm->size(); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out, CUstream_st* stream) const {
    if (!*silent || less != silence::all) comm->allgather(in, out, stream);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op, CUstream_st* stream) const {
    bool const delivers = less == silence::means ? in.size() % (3 + 2) != 0 : less == silence::m2 && in.size() != 3 + 1;
    if (!*silent || delivers) comm->allreduce(in, out, op, stream);
  }
};

template <class Layer>
std::vector<float> state_of(Layer& layer) {
  std::vector<float> all{static_cast<float>(layer_cases::get(std::span{layer.num_batches_tracked(), 1})[0])};
  for (auto const values : {layer.running_mean(), layer.running_var(), layer.gamma_grad(), layer.beta_grad()}) {
    auto const some = layer_cases::get(values);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

/// A good step, one that `spoil` spoils on rank 1, and a good one again. Every rank throws the same, keeps its state and its
/// outputs, and goes on. The pass is the forward pass, or, where the message says so, the backward pass.
template <class C>
void check_spoiled(C const& comm, std::function<void(step_memory&)> const& spoil, std::string const& message,
                   bool first_step_good, bool captured,
                   syncnorm::exchange_policy policy = syncnorm::exchange_policy::gather) {
  layer_over<C> layer{comm, 3, {.norm = {.exchange = policy}}};
  test::stream const on;
  step_memory good, bad;
  if (first_step_good) {
    good.forward(layer, on);
    good.backward(layer, on);
    layer.synchronize(on);
  }
  bool const in_backward = message.find("backward") != std::string::npos;
  if (in_backward) {
    bad.forward(layer, on);
    layer.synchronize(on);
  }
  auto const before = state_of(layer);
  auto const y = bad.y.get(), dx = bad.dx.get();
  if (comm.rank() == 1) spoil(bad);
  auto const said = test::thrown<syncnorm::invalid_argument_error>([&] {
    test::run_on(on, captured, [&](cudaStream_t) { in_backward ? bad.backward(layer, on) : bad.forward(layer, on); });
    layer.synchronize(on);
  });
  CHECK(said == message);
  layer.synchronize(on); // said once
  CHECK(state_of(layer) == before);
  CHECK(bad.y.get() == y);
  CHECK(bad.dx.get() == dx);

  good.forward(layer, on);
  good.backward(layer, on);
  layer.synchronize(on);
  CHECK(state_of(layer)[0] == before[0] + 1);
}

void check_everywhere(std::function<void(step_memory&)> const& spoil, std::string const& message) {
  INFO(message);
  test::over_nccl(3, [&](auto const& comm) { check_spoiled(comm, spoil, message, true, true); });
  if (!test::sanitized) {
    test::over_nccl(3, [&](auto const& comm) {
      check_spoiled(comm, spoil, message, true, true, syncnorm::exchange_policy::reduce);
    });
    for (bool const first_step_good : {true, false})
      test::over_nccl(3, [&](auto const& comm) { check_spoiled(comm, spoil, message, first_step_good, false); });
    test::over_threads(2, [&](auto const& comm) { check_spoiled(comm, spoil, message, true, false); });
  }
  test::check_no_violations();
}

} // namespace

TEST_CASE("what is wrong with a pass on a device on one rank is an error on every rank, and nothing is written") {
  std::string const forward = "batch_norm forward: rank 1: ", backward = "batch_norm backward: rank 1: ";
  check_everywhere([](auto& in) { in.x.view.data = in.on_host.data(); },
                   forward + "x is memory of the host, expected of device 0");
  check_everywhere([](auto& in) { in.x.view.data = nullptr; }, forward + "x is null, its extents are [2, 3, 5]");
  check_everywhere([](auto& in) { in.x.view.channels = 2; }, forward + "x has 2 channels, expected 3");
  check_everywhere([](auto& in) { in.y.view.data = in.on_host.data(); },
                   forward + "y is memory of the host, expected of device 0");
  check_everywhere(
      [](auto& in) { in.x.view.data = reinterpret_cast<float*>(reinterpret_cast<char*>(in.x.view.data) + 2); },
      forward + "x is misaligned: its address is no multiple of 4");
  check_everywhere(
      [](auto& in) {
        static std::vector<std::uint8_t> const on_host(10, 1);
        in.epilogue.mask = syncnorm::mask_of(on_host.data(), 2, 5);
      },
      forward + "the mask is memory of the host, expected of device 0");
  check_everywhere([](auto& in) { in.dy.view.samples = 1; }, backward + "dy is [1, 3, 5], expected [2, 3, 5] as x");
  check_everywhere([](auto& in) { in.dx.view.data = in.on_host.data(); },
                   backward + "dx is memory of the host, expected of device 0");
}

TEST_CASE("a backward pass after a forward pass that failed adds nothing, and says nothing else") {
  auto const check = [](auto const& comm, syncnorm::exchange_policy policy) {
    layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.exchange = policy}}};
    test::stream const on;
    layer.prepare(on);
    step_memory step;
    if (comm.rank() == 1) step.x.view.data = nullptr;
    std::vector<std::string> said;
    auto const note = [&](auto const& f) {
      if (auto const what = test::thrown<syncnorm::invalid_argument_error>(f); !what.empty()) said.push_back(what);
    };
    note([&] { step.forward(layer, on); });
    step.x.view.data = step.x.memory.data();
    on.wait();
    note([&] { step.backward(layer, on); });
    CHECK(said.size() == 1); // by the next call, as it was known
    note([&] { layer.synchronize(on); });
    note([&] { layer.synchronize(on); });
    CHECK((said == std::vector<std::string>{"batch_norm forward: rank 1: x is null, its extents are [2, 3, 5]"}));
    CHECK(state_of(layer) == std::vector<float>{0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0});
  };
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    test::over_nccl(2, [&](auto const& comm) { check(comm, policy); });
  test::check_no_violations();
}

TEST_CASE("ranks that differ in options or channels all get the error of the host, from the first pass") {
  test::over_nccl(3, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.eps = comm.rank() == 2 ? 1e-3 : 1e-5}}};
    test::stream const on;
    step_memory step;
    CHECK(test::thrown<syncnorm::mismatch_error>([&] {
            step.forward(layer, on);
          }).find("ranks disagree on eps: rank 0 has 1.0000000000000001e-05, rank 2 has 0.001") != std::string::npos);
    CHECK_THROWS_AS(layer.prepare(on), syncnorm::mismatch_error);
  });
  test::over_threads(2, [](auto const& comm) {
    layer_over<test::staged_threads> layer{comm, 3 + comm.rank()};
    test::stream const on;
    CHECK(test::thrown<syncnorm::mismatch_error>([&] { layer.prepare(on); }).find("the number of channels") !=
          std::string::npos);
  });
}

TEST_CASE("another current device than that of the layer on one rank is an error on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    step.forward(layer, on);
    step.backward(layer, on);
    layer.synchronize(on);
    if (comm.rank() == 1) cudaSetDevice(1);
    for (bool const in_two_phases : {false, true})
      CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
              if (in_two_phases)
                layer.begin_forward(step.x.view, step.y.view, {}, on).finish(on);
              else
                step.forward(layer, on);
              layer.synchronize(on);
            }) == "batch_norm forward: rank 1: the current device is 1, the memory of the layer is on 0");
    int current = -1;
    cudaGetDevice(&current);
    CHECK(current == comm.rank());
    cudaSetDevice(0);
    step.forward(layer, on);
    layer.synchronize(on);
  });
  test::check_no_violations();
}

TEST_CASE("one value per channel over all ranks is too few") {
  std::string const message = "batch_norm forward: training needs more than 1 value per channel over all ranks, got 1";
  auto const check = [&](auto const& comm, syncnorm::exchange_policy policy) {
    layer_over<test::nccl_communicator> layer{comm, 2, {.norm = {.exchange = policy}}};
    layer_cases::device_tensor<float> x{test::layout::nc, comm.rank(), 2, 1};
    test::stream const on;
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            layer.forward(x.view, x.view, on);
            layer.synchronize(on);
          }) == message);
    CHECK(state_of(layer)[0] == 0);
  };
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    test::over_nccl(2, [&](auto const& comm) { check(comm, policy); });
  layer_over<syncnorm::self_communicator> layer{{}, 2};
  layer_cases::device_tensor<float> x{test::layout::nc, 1, 2, 1};
  test::stream const on;
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { layer.forward(x.view, x.view, on); }) == message);
}

TEST_CASE("what cannot be captured is an error before anything is") {
  auto const captured = [](test::stream const& on, auto const& pass) {
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    auto const said = test::thrown<syncnorm::invalid_argument_error>(pass);
    CHECK(cudaStreamEndCapture(on, &graph) == cudaSuccess);
    cudaGraphDestroy(graph);
    pass();
    return said;
  };
  test::over_nccl(2, [&](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    CHECK(captured(on, [&] { step.forward(layer, on); }).find("call prepare(stream) on every rank first") !=
          std::string::npos);
    auto const second = [&] { layer.double_backward({}, step.x.view, step.dy.view, step.dx.view, {}, {}, {}, on); };
    CHECK(captured(on, second).find("call reserve_double_backward() first") != std::string::npos);
    layer.synchronize(on);
  });
  test::over_threads(2, [&](auto const& comm) {
    layer_over<test::staged_threads> layer{comm, 3};
    test::stream const on;
    step_memory step;
    layer.prepare(on);
    CHECK(captured(on, [&] { step.forward(layer, on); }).find("the exchange of this communicator cannot be") !=
          std::string::npos);
    layer.synchronize(on);
  });
}

TEST_CASE("another device than that of the layer, and a device that fails") {
  layer_over<syncnorm::self_communicator> layer{{}, 3};
  step_memory step;
  test::stream const on;
  cudaSetDevice(1);
  test::stream const elsewhere;
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          step.forward(layer, on);
        }).find("the current device is 1, the memory of the layer is on 0") != std::string::npos);
  layer_cases::device_tensor<float> other{test::layout::nchw, 2, 3, 5};
  cudaSetDevice(0);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          step.forward(layer, elsewhere);
        }).find("the stream is of device 1, the memory of the layer is on 0") != std::string::npos);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          layer.forward(other.view, step.y.view, on);
        }).find("x is memory of device 1, expected of 0") != std::string::npos);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
          step.backward(layer, on);
        }).find("there was no forward pass") != std::string::npos);
  fake_cuda::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
  CHECK_THROWS_AS((layer_over<syncnorm::self_communicator>{{}, 3}), syncnorm::cuda_error);
  CHECK(cudaGetLastError() == cudaSuccess); // it was thrown
  fake_cuda::fail_next("cudaStreamGetDevice", cudaErrorCallRequiresNewerDriver);
  step.forward(layer, on);
  layer.synchronize(on);
}

TEST_CASE("an error of NCCL comes up in the layer, too") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    step_memory step;
    step.forward(layer, on);
    layer.synchronize(on);
    fake_nccl::set_async_error(comm.native_handle(), ncclRemoteError);
    CHECK_THROWS_AS(layer.check(), syncnorm::nccl_error);
    CHECK_THROWS_AS(step.forward(layer, on), syncnorm::nccl_error);
    on.wait();
  });
}

TEST_CASE("an exchange on a device that delivers nothing is an error, and nothing is written by what came before") {
  using enum syncnorm::exchange_policy;
  std::string const message =
      "exchange: nothing has come from rank 0: the communicator was aborted, or does not deliver";
  for (auto const policy : {gather, reduce})
    for (bool const in_two_phases : {false, true})
      test::over_nccl(2, [&](auto const& nccl) {
        CAPTURE(in_two_phases);
        bool silent = false;
        falling_silent const comm{&nccl, &silent};
        layer_over<falling_silent> layer{comm, 3, {.norm = {.exchange = policy}}};
        test::stream const on;
        step_memory good, bad;
        auto const forward = [&](step_memory& step) {
          if (!in_two_phases) return step.forward(layer, on);
          layer.begin_forward(step.x.view, step.y.view, {}, on).finish(on);
        };
        auto const backward = [&](step_memory& step) {
          if (!in_two_phases) return step.backward(layer, on);
          layer.begin_backward(step.x.view, step.dy.view, step.dx.view, {}, {}, {}, on).finish(on);
        };
        auto const said = [&](auto const& pass) {
          return test::thrown<syncnorm::communicator_error>([&] {
            pass(bad);
            layer.synchronize(on);
          });
        };
        for (int step = 0; step < 2; ++step) {
          forward(good), backward(good);
          layer.synchronize(on);
          auto const before = state_of(layer);
          auto const y = bad.y.get(), dx = bad.dx.get();
          silent = true;
          CHECK(said(forward) == message);
          CHECK(state_of(layer) == before);
          CHECK(bad.y.get() == y);
          silent = false;
          forward(good);
          layer.synchronize(on);
          auto const between = state_of(layer);
          CHECK(between[0] == before[0] + 1);
          silent = true;
          CHECK(said(backward) == message);
          CHECK(state_of(layer) == between);
          CHECK(bad.dx.get() == dx);
          silent = false;
        }
        layer.double_backward({}, good.x.view, good.dy.view, good.y.view, {}, {}, {}, on);
        layer.synchronize(on);
        auto const y = bad.y.get();
        silent = true;
        CHECK(said([&](step_memory& step) {
                layer.double_backward({}, step.x.view, step.dy.view, step.y.view, {}, {}, {}, on);
              }) == message);
        CHECK(bad.y.get() == y);
      });
  test::check_no_violations();
}

TEST_CASE("sums on a device that do not come are an error, though headers do, and nothing is written by them") {
  std::string const message =
      "exchange: sums have not come from all ranks: the communicator was aborted, or does not deliver";
  for (auto const less : {silence::sums, silence::means, silence::m2})
    for (bool const in_two_phases : {false, true})
      test::over_nccl(2, [&](auto const& nccl) {
        CAPTURE(in_two_phases);
        bool silent = false;
        falling_silent const comm{&nccl, &silent, less};
        layer_over<falling_silent> layer{comm, 3, {.norm = {.exchange = syncnorm::exchange_policy::reduce}}};
        test::stream const on;
        step_memory good, bad;
        auto const forward = [&](step_memory& step) {
          if (!in_two_phases) return step.forward(layer, on);
          layer.begin_forward(step.x.view, step.y.view, {}, on).finish(on);
        };
        auto const backward = [&](step_memory& step) {
          if (!in_two_phases) return step.backward(layer, on);
          layer.begin_backward(step.x.view, step.dy.view, step.dx.view, {}, {}, {}, on).finish(on);
        };
        auto const said = [&](auto const& pass) {
          return test::thrown<syncnorm::communicator_error>([&] {
            pass(bad);
            layer.synchronize(on);
          });
        };
        for (int step = 0; step < 2; ++step) { // the second time, too, though sums of a pass before are there
          forward(good), backward(good);
          layer.synchronize(on);
          auto const before = state_of(layer);
          auto const y = bad.y.get(), dx = bad.dx.get();
          silent = true;
          CHECK(said(forward) == message);
          layer.synchronize(on); // said once
          CHECK(state_of(layer) == before);
          CHECK(bad.y.get() == y);
          silent = false;
          forward(good);
          layer.synchronize(on);
          if (less != silence::sums) continue;
          auto const between = state_of(layer);
          silent = true;
          CHECK(said(backward) == message);
          layer.synchronize(on);
          CHECK(state_of(layer) == between);
          CHECK(bad.dx.get() == dx);
          silent = false;
        }
      });
  test::check_no_violations();
}

TEST_CASE("a group's exchange that delivers nothing leaves every layer as it was") {
  using enum syncnorm::exchange_policy;
  for (auto const& [policy, less] :
       {std::pair{gather, silence::all}, std::pair{reduce, silence::all}, std::pair{reduce, silence::sums},
        std::pair{reduce, silence::means}, std::pair{reduce, silence::m2}})
    test::over_nccl(2, [&, policy = policy, less = less](auto const& nccl) {
      bool silent = false;
      falling_silent const comm{&nccl, &silent, less};
      layer_over<falling_silent> a{comm, 3, {.norm = {.exchange = policy}}}, b{comm, 3, {.norm = {.exchange = policy}}};
      syncnorm::cuda::batch_norm_group<falling_silent> group{comm};
      test::stream const on;
      step_memory of_a, of_b;
      auto const forward = [&] {
        group.run(
            syncnorm::cuda::passes(a.plan_forward(of_a.x.view, of_a.y.view), b.plan_forward(of_b.x.view, of_b.y.view)),
            on);
        group.synchronize(on);
      };
      forward();
      auto const state = state_of(a), state_of_b = state_of(b);
      of_a.y.put(std::vector<long double>(30, -5), 0);
      auto const y = of_a.y.get();
      silent = true;
      CHECK(test::thrown<syncnorm::communicator_error>(forward).find(
                less == silence::all ? "nothing has come from rank 0" : "sums have not come from all ranks") !=
            std::string::npos);
      CHECK(state_of(a) == state);
      CHECK(state_of(b) == state_of_b);
      CHECK(of_a.y.get() == y);
    });
  test::check_no_violations();
}

TEST_CASE("a step that is replayed after its communicator was aborted writes nothing") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    test::over_nccl(2, [&](auto const& comm) {
      layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.exchange = policy}}};
      test::stream const on;
      step_memory step;
      layer.prepare(on);
      test::graph const replayed{on, [&] { step.forward(layer, on), step.backward(layer, on); }};
      for (int i = 0; i < 2; ++i) replayed.launch();
      on.wait();
      auto const before = state_of(layer);
      CHECK(before[0] == 2);
      step.y.put(std::vector<long double>(30, -5), 0), step.dx.put(std::vector<long double>(30, -6), 0);
      auto const y = step.y.get(), dx = step.dx.get();
      comm.abort();
      for (int i = 0; i < 2; ++i) replayed.launch();
      on.wait();
      CHECK(state_of(layer) == before);
      CHECK(step.y.get() == y);
      CHECK(step.dx.get() == dx);
    });
  test::check_no_violations();
}
