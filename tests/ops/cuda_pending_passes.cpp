#include "ops/cuda_support.hpp"

#include <array>
#include <string>
#include <thread>
#include <utility>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>

#include "cuda/echo.hpp"
#include "cuda/pending_cases.hpp"
#include "support/message_of.hpp"

void test::double_values(double const* from, double* to, std::size_t n, cudaStream_t stream) {
  fake_cuda::enqueue(stream, [=] {
    for (std::size_t i = 0; i < n; ++i) fake_cuda::on_host(to)[i] = 2 * fake_cuda::on_host(from)[i];
  });
}

namespace {

namespace cuda = syncnorm::cuda;
using test::layer_over;

template <class C>
using pending_data = layer_cases::pending_data<layer_over<C>, C>;

template <class C>
void check_two_phases(C const& comm, bool captured,
                      syncnorm::exchange_policy policy = syncnorm::exchange_policy::automatic) {
  layer_cases::check_two_phases<layer_over<C>>(
      comm, captured, [] { fake_cuda::reset(); }, policy);
}

/// What a rank drops leaves its state as it was, and the ranks in step.
template <class C>
void check_dropped(C const& comm, syncnorm::exchange_policy policy) {
  test::stream const on;
  pending_data<C> a{comm, 3, policy};
  a.step(on);
  on.wait();
  auto const before = a.results();
  bool const drops = syncnorm::rank(comm) == 0;
  {
    auto pending = a.begin_forward(on);
    if (!drops) pending.finish(on);
  }
  on.wait();
  if (drops) CHECK(a.results() == before);
  auto const thrown = test_support::message_of([&] {
    a.layer.backward(a.x.view, a.dy.view, a.dx.view, on);
    a.layer.synchronize(on);
  });
  CHECK_MESSAGE(test_support::contains(thrown, "batch_norm backward: rank 0: there was no forward pass"), thrown);
  a.step(on);
  a.layer.synchronize(on);
}

constexpr std::array policies{syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce};

} // namespace

TEST_CASE("two phases on a device give the bits of one, with the exchange on a stream of its own") {
  for (auto const policy : policies) {
    test::over_nccl(2, [&](auto const& comm) { check_two_phases(comm, true, policy); });
    for (auto const* const function : {"cudaMalloc", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"})
      CHECK(fake_cuda::calls(function) == 0);
    test::over_nccl(3, [&](auto const& comm) { check_dropped(comm, policy); });
  }
  check_two_phases(syncnorm::self_communicator{}, true);
  test::over_threads(2, [](auto const& comm) { check_two_phases(comm, false); });
  test::check_no_violations();
}

TEST_CASE("a pass in two phases waits for nothing, and the exchange for what was enqueued before it") {
  auto const raw = fake_nccl::make_group(2);
  auto const first = test::nccl_communicator::adopt(raw[0]), second = test::nccl_communicator::adopt(raw[1]);
  test::stream const on;
  {
    pending_data<test::nccl_communicator> a{first, 3}, b{second, 3};
    {
      std::jthread const other{[&] { b.layer.prepare(on); }};
      test::stream const of_a;
      a.layer.prepare(of_a);
    }
    // One thread and one stream for both: the exchanges, which wait for each other, are not on it.
    auto of_a = a.begin_forward(on);
    on.wait();
    CHECK_FALSE(of_a.ready());
    CHECK(cudaGetLastError() == cudaSuccess); // that the exchange is not done is no error
    auto of_b = b.begin_forward(on);
    cudaGraph_t graph = nullptr;
    test::stream const other;
    REQUIRE(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal) == cudaSuccess);
    CHECK_NOTHROW((void)of_b.ready());
    CHECK(cudaStreamEndCapture(other, &graph) == cudaSuccess); // of which the question is no part
    cudaGraphDestroy(graph);
    of_a.finish(on), of_b.finish(on);
    CHECK(of_b.ready());
    a.layer.synchronize(on), b.layer.synchronize(on);
  }
  test::check_no_violations();
}

TEST_CASE("a graph that is replayed while a pass is pending leaves what that has exchanged") {
  for (auto const policy : policies)
    test::over_nccl(2, [&](auto const& comm) {
      using C = test::nccl_communicator;
      pending_data<C> a{comm, 3, policy}, expected{comm, 3, policy}, others{comm, 3, policy};
      others.x.put(others.dy.get(), 0);
      test::stream const on;
      auto const step = [&] { a.layer.begin_forward(others.x.view, others.y.view, {}, on).finish(on); };
      step();
      test::graph const captured{on, step};
      auto pending = a.begin_forward(on);
      captured.launch();
      pending.finish(on);
      a.layer.synchronize(on);
      expected.step(on);
      expected.layer.synchronize(on);
      CHECK(a.y.get() == expected.y.get());
    });
  test::check_no_violations();
}

TEST_CASE("a group of layers on a device is one collective, and gives the bits of each alone") {
  test::unload_kernels();
  cuda::kernels_of<float, test::simt_kernels>::load_kernels();
  for (auto const policy : policies)
    test::over_nccl(2, [&](auto const& comm) {
      layer_cases::check_group<layer_over<test::nccl_communicator>>(comm, true, policy);
    });
  using alone = syncnorm::self_communicator;
  layer_cases::check_group<layer_over<alone>>(alone{}, true);
  test::check_no_first_launches();
  fake_cuda::reset();
  test::over_nccl(2, [](auto const& comm) {
    pending_data<test::nccl_communicator> a{comm, 3}, b{comm, 6};
    cuda::batch_norm_group<test::nccl_communicator> group{comm};
    test::stream const on;
    for (int i = 0; i < 3; ++i) group.run(cuda::passes(a.plan_forward(), b.plan_forward()), on);
    group.synchronize(on);
  });
  CHECK(fake_cuda::calls("ncclAllGather") == 2 * (1 + 3)); // the first is to agree
  test::check_no_violations();
}

TEST_CASE("what is wrong with one layer of a group on one rank is an error on every rank, and no layer has changed") {
  auto const check_one_of_a_group = [](auto const& comm, syncnorm::exchange_policy policy) {
    using C = test::nccl_communicator;
    pending_data<C> a{comm, 3, policy}, b{comm, 6, policy};
    cuda::batch_norm_group<C> group{comm};
    test::stream const on;
    bool const here = comm.rank() == 1;
    auto const before_a = a.results(), before_b = b.results();
    auto const thrown = [&](auto passes) {
      return test::thrown<syncnorm::invalid_argument_error>([&] {
        group.run(std::move(passes), on);
        group.synchronize(on);
      });
    };
    auto bad = b.x.view;
    if (here) bad.data = nullptr;
    for (int i = 0; i < 2; ++i)
      CHECK(thrown(cuda::passes(a.plan_forward(), b.layer.plan_forward(bad, b.y.view))) ==
            "batch_norm forward of layer 1: rank 1: x is null, its extents are [3, 6, 5]");
    // Gradients of a forward pass that failed say nothing of their own, and are not added.
    group.run(cuda::passes(a.plan_backward(), b.plan_backward()), on);
    group.synchronize(on);
    pending_data<C> frozen{comm, 2, policy};
    frozen.layer.freeze_statistics();
    CHECK(thrown(cuda::passes(frozen.plan_forward(), a.plan_forward(), b.layer.plan_forward(bad, b.y.view))) ==
          "batch_norm forward of layer 2: rank 1: x is null, its extents are [3, 6, 5]");
    group.run(cuda::passes(frozen.plan_backward(), a.plan_backward(), b.plan_backward()), on);
    group.synchronize(on);

    CHECK(a.results() == before_a);
    CHECK(b.results() == before_b);
    // One value per channel of the second layer alone.
    layer_cases::device_tensor<float> one{test::layout::nc, comm.rank(), 6, 1};
    CHECK(thrown(cuda::passes(a.plan_forward(), b.layer.plan_forward(one.view, one.view))) ==
          "batch_norm forward: training needs more than 1 value per channel over all ranks, got 1");
    CHECK(a.results() == before_a);
    group.run(cuda::passes(a.plan_forward(), b.plan_forward()), on);
    group.synchronize(on);
    CHECK(thrown(cuda::passes(a.plan_forward(), b.plan_backward()))
              .find("a forward and a backward pass cannot travel "
                    "together") != std::string::npos);
    a.step(on);
    a.layer.synchronize(on);
  };
  auto const check_two_phases_of = [](auto const& comm, syncnorm::exchange_policy policy) {
    pending_data<test::nccl_communicator> a{comm, 3, policy};
    test::stream const on;
    auto const before = a.results();
    auto bad = a.x.view;
    if (comm.rank() == 1) bad.data = nullptr;
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            a.layer.begin_forward(bad, a.y.view, {}, on).finish(on);
            a.layer.synchronize(on);
          }) == "batch_norm forward: rank 1: x is null, its extents are [3, 3, 5]");
    CHECK(a.results() == before);
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    {
      auto const one = a.begin_forward(on); // as was begun before
      CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
              (void)a.begin_forward(on);
            }).find("before there is memory for as many pending passes") != std::string::npos);
    }
    CHECK(cudaStreamEndCapture(on, &graph) == cudaSuccess); // what was dropped has been joined
    cudaGraphDestroy(graph);
  };
  for (auto const policy : policies) {
    test::over_nccl(2, [&](auto const& comm) { check_one_of_a_group(comm, policy); });
    test::over_nccl(2, [&](auto const& comm) { check_two_phases_of(comm, policy); });
  }
  test::over_nccl(2, [](auto const& comm) {
    pending_data<test::nccl_communicator> a{comm, 3}, b{comm, 3 + comm.rank()};
    cuda::batch_norm_group<test::nccl_communicator> group{comm};
    test::stream const on;
    CHECK_THROWS_AS(group.run(cuda::passes(a.plan_forward(), b.plan_forward()), on), syncnorm::mismatch_error);
  });
  test::check_no_violations();
}

TEST_CASE("on a device, one rank alone hears what cannot be in a group, and nothing has changed") {
  using C = syncnorm::self_communicator;
  pending_data<C> a{C{}, 3}, b{C{}, 3};
  cuda::batch_norm_group<C> group{C{}};
  test::stream const on;
  a.step(on), b.step(on);
  on.wait();
  auto const of_a = a.results(), of_b = b.results();
  auto const message_of = [&](auto passes) {
    return test::thrown<syncnorm::invalid_argument_error>([&] { group.run(std::move(passes), on); });
  };
  CHECK(message_of(cuda::passes(a.plan_forward(), b.plan_forward(), a.plan_forward())) ==
        "batch_norm forward: two forward passes of one group are of the same layer");
  a.step(on), b.step(on); // what failed has left nothing for a backward pass
  on.wait();
  auto const later_a = a.results(), later_b = b.results();
  CHECK(message_of(cuda::passes(a.plan_forward(), b.plan_backward())) ==
        "batch_norm backward: a forward and a backward pass cannot travel together");
  on.wait();
  CHECK(a.results() == later_a);
  CHECK(b.results() == later_b);
  CHECK(later_a[0] == of_a[0] + 1);
  CHECK(later_b[0] == of_b[0] + 1);
  test::check_no_violations();
}

TEST_CASE(
    "on a device, ranks that disagree on which layers of a group exchange, and passes that overwrite, are told so") {
  for (auto const policy : policies)
    test::over_nccl(2, [&](auto const& comm) {
      using C = test::nccl_communicator;
      pending_data<C> a{comm, 3, policy}, b{comm, 3, policy};
      cuda::batch_norm_group<C> group{comm};
      test::stream const on;
      a.step(on), b.step(on);
      on.wait();
      auto const before = a.results();
      auto const run = [&](auto passes) {
        group.run(std::move(passes), on);
        group.synchronize(on);
      };
      bool const alone = comm.rank() == 1;
      auto text = test::thrown<syncnorm::mismatch_error>([&] {
        run(cuda::passes(a.plan_backward(),
                         b.layer.plan_backward(b.x.view, b.dy.view, b.dx.view, {}, {}, {.exchange = !alone})));
      });
      CHECK_MESSAGE(text.find("of this rank alone (3): rank 0 has 2, rank 1 has 3") != std::string::npos, text);
      CHECK(a.results() == before);
      text = test::thrown<syncnorm::invalid_argument_error>(
          [&] { run(cuda::passes(a.plan_forward(), a.plan_forward())); });
      CHECK_MESSAGE(text.find("rank 1: two forward passes of one group are of the same layer") != std::string::npos,
                    text);
      CHECK(a.results() == before);

      a.layer.forward(a.x.view, a.y.view, on);
      a.layer.synchronize(on);
      auto const trained = a.results();
      {
        auto backward = a.begin_backward(on);
        a.layer.eval();
        a.layer.forward(a.x.view, b.y.view, on);
        text = test::thrown<syncnorm::invalid_argument_error>([&] { backward.finish(on); });
      }
      CHECK_MESSAGE(text.find("another forward pass since this one began") != std::string::npos, text);
      a.layer.synchronize(on);
      CHECK(a.results() == trained);
      a.layer.train();
      a.step(on);
      a.layer.synchronize(on);
    });
  test::check_no_violations();
}

TEST_CASE("a rank that exchanges with itself comes to what one comes to on the batch given twice") {
  layer_cases::check_echoes<layer_over<test::echo_communicator>, layer_over<syncnorm::self_communicator>>();
  test::check_no_violations();
}
