#include "ops/cuda_support.hpp"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>

#include "cuda/in_place_case.hpp"

using test::layer_over;

TEST_CASE("a pass in place on a device recovers x, or keeps it, enqueued and replayed from a graph") {
  using layer_cases::dx_over;
  for (auto const& of : layer_cases::in_place_cases()) {
    test::over_nccl(2, [&](auto const& comm) {
      using layer = layer_over<test::nccl_communicator>;
      layer_cases::check_in_place<layer>(comm, of, true, dx_over::neither);
      layer_cases::check_in_place<layer>(comm, of, false, dx_over::y);
    });
    using alone = layer_over<syncnorm::self_communicator>;
    layer_cases::check_in_place<alone>(syncnorm::self_communicator{}, of, true, dx_over::neither);
    layer_cases::check_in_place<alone>(syncnorm::self_communicator{}, of, false, dx_over::dy);
    layer_cases::check_in_place<alone>(syncnorm::self_communicator{}, of, of.residual, dx_over::neither, true);
  }
  test::check_no_violations();
}

namespace {

struct in_place_memory {
  layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 5}, dy{test::layout::nchw, 2, 3, 5},
      dx{test::layout::nchw, 2, 3, 5};
  std::vector<long double> values = std::vector<long double>(30);
  test::stream on{};

  in_place_memory() {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7);
    x.put(values, 0), dy.put(values, 0);
  }
};

} // namespace

TEST_CASE("more channels to keep than there is room for are an error on every rank, and x stays") {
  std::string const message = "more channels to keep than room";
  auto const check = [&](auto const& comm, int spoiled, std::string const& expected) {
    layer_over<std::remove_cvref_t<decltype(comm)>> layer{comm, 3};
    in_place_memory m;
    layer.prepare(m.on);
    layer.reserve_in_place(m.x.view, {}, 1, m.on);
    CHECK(layer.kept().room() == 1);
    if (syncnorm::rank(comm) == spoiled) layer_cases::put(layer.gamma(), {0, 1, 0});
    auto const wrong = [&](auto const& f) { return test::thrown<syncnorm::invalid_argument_error>(f); };
    CHECK(wrong([&] {
            layer.forward_in_place(m.x.view, m.on);
            layer.synchronize(m.on);
          }) == expected);
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    layer.synchronize(m.on);
    CHECK(m.x.get() == m.values);
    CHECK(layer_cases::get(std::span{layer.num_batches_tracked(), 1})[0] == 0);
    // With room for them, and in evaluation first without.
    layer.eval();
    bool const here = syncnorm::rank(comm) == spoiled;
    CHECK(wrong([&] {
            layer.forward_in_place(m.x.view, m.on);
            layer.synchronize(m.on);
          }) == (here ? "batch_norm inference: " + message : ""));
    if (here) CHECK(m.x.get() == m.values);
    m.x.put(m.values, 0);
    layer.train();
    layer.reserve_in_place(m.x.view, {}, 0, m.on);
    layer.forward_in_place(m.x.view, m.on);
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    layer.synchronize(m.on);
    CHECK(layer_cases::error_of(m.x.get(), m.values) < 1e-6);
  };
  test::over_nccl(2, [&](auto const& comm) { check(comm, 1, "batch_norm forward: rank 1: " + message); });
  check(syncnorm::self_communicator{}, 0, "batch_norm forward: rank 0: " + message);
  test::check_no_violations();
}

TEST_CASE("what is wrong with a pass in place on one rank is an error on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    in_place_memory m;
    auto const thrown = [&](auto const& f) {
      return test::thrown<syncnorm::invalid_argument_error>([&] {
        f();
        layer.synchronize(m.on);
      });
    };
    layer.prepare(m.on);
    bool const here = comm.rank() == 1;
    if (here) layer.reserve_in_place(m.x.view, {}, 0, m.on);
    CHECK(thrown([&] {
            test::run_on(m.on, true, [&](cudaStream_t stream) { layer.forward_in_place(m.x.view, stream); });
          }).find("rank 0: the stream is being captured in a graph before there is memory for what is kept") !=
          std::string::npos);
    CHECK(m.x.get() == m.values);
    fake_cuda::reset();
    layer.forward_in_place(m.x.view, m.on); // rank 0 makes room
    layer.forward_in_place(m.x.view, m.on);
    auto y = m.x.view;
    if (here) y.spatial = 4;
    CHECK(thrown([&] { layer.backward_in_place(y, m.dy.view, m.dx.view, m.on); }) ==
          "batch_norm backward: rank 1: y is [2, 3, 4], expected [2, 3, 5] as x");
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    m.on.wait();
    auto const once = m.dx.get();
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on); // x is there already
    layer.synchronize(m.on);
    CHECK(m.dx.get() == once);
    // What an earlier pass has kept does not go over what a pass that failed has left.
    layer_cases::put(layer.gamma(), {0, 1, 1});
    layer.reserve_in_place(m.x.view, {}, 0, m.on);
    layer.forward_in_place(m.x.view, m.on);
    m.on.wait();
    auto const left = m.x.get();
    auto none = m.x.view;
    if (here) none.data = nullptr;
    CHECK(thrown([&] { layer.forward_in_place(none, m.on); }) ==
          "batch_norm forward: rank 1: x is null, its extents are [2, 3, 5]");
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    layer.synchronize(m.on);
    CHECK(m.x.get() == left);

    if (here) {
      layer.reserve_in_place(m.x.view, {}, 3, m.on);
      CHECK(layer.kept().bytes() == 3 * 10 * sizeof(float));
      fake_cuda::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
      CHECK_THROWS_AS(layer.reserve_in_place(m.x.view, {}, 3, m.on), syncnorm::cuda_error);
      CHECK(layer.kept().room() == 0);
    }
  });
  test::check_no_violations();
}
