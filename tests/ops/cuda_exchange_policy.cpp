#include "ops/cuda_support.hpp"

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <future>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>

#include "cuda/double_backward_case.hpp"
#include "cuda/micro_batch_case.hpp"
#include "support/oracle.hpp"

using syncnorm::exchange_policy;
using test::layer_over;

namespace {

/// NCCL, whose allreduces of `*late` values wait for `go` in the stream.
struct late_allreduces {
  test::nccl_communicator const* comm;
  std::size_t const* late;
  std::shared_future<void> go;

  [[nodiscard]] int rank() const { return comm->rank(); }
  [[nodiscard]] int size() const { return comm->size(); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out, CUstream_st* stream) const {
    comm->allgather(in, out, stream);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op, CUstream_st* stream) const {
    if (in.size() == *late) fake_cuda::enqueue(stream, [wait = go] { wait.wait(); });
    comm->allreduce(in, out, op, stream);
  }
};

/// Of device memory, without any: for what ranks choose.
struct priced_stream_communicator {
  int ranks = 1;
  syncnorm::exchange_cost cost{};

  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return ranks; }
  [[nodiscard]] syncnorm::exchange_cost cost_of_exchange() const { return cost; }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const>, std::span<T>, CUstream_st*) const {}
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const>, std::span<T>, syncnorm::reduce_op, CUstream_st*) const {}
};

struct only_gathers {
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 1 << 12; }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const>, std::span<T>, CUstream_st*) const {}
};

} // namespace

TEST_CASE("passes on a device that reduce agree with the oracle, enqueued and replayed from a graph") {
  auto const reducing = [](layer_cases::layer_case of) {
    of.policy = exchange_policy::reduce;
    return of;
  };
  using test::layout;
  test::unload_kernels();
  for (auto const& of : layer_cases::cases()) {
    if (of.spatial > 30) continue; // to the exchange as the others
    test::over_nccl(3, [&](auto const& comm) {
      layer_cases::check_steps<layer_over<test::nccl_communicator>>(comm, reducing(of), true);
    });
  }
  test::check_no_first_launches();
  layer_cases::layer_case const with_epilogue{{}, 70, 3, layout::nhwc, true, true, 0.25};
  test::over_threads(2, [&](auto const& comm) {
    layer_cases::check_steps<layer_over<test::staged_threads>>(comm, reducing({{3, 2}}), false);
    layer_cases::check_micro_batches<layer_over<test::staged_threads>>(comm, {{1, 2}, {}}, reducing(with_epilogue),
                                                                       false);
    layer_cases::check_double_backward<layer_over<test::staged_threads>>(comm, {{2}, {1}}, layout::nchw, true, false,
                                                                         exchange_policy::reduce);
  });
  test::over_nccl(3, [&](auto const& comm) {
    layer_cases::check_double_backward<layer_over<test::nccl_communicator>>(comm, {{1, 2}, {}, {0, 1}}, layout::nhwc,
                                                                            false, true, exchange_policy::reduce);
  });
  test::check_no_violations();
}

TEST_CASE("ranks that connect as they first exchange have done so before a prepared layer is captured") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    test::over_nccl(3, [&](auto const& comm) {
      fake_nccl::set_connecting_lazily(comm.native_handle(), true);
      layer_cases::check_steps<layer_over<test::nccl_communicator>>(comm, {.samples = {3, 2, 4}, .policy = policy},
                                                                    true);
    });
  test::check_no_violations();
}

TEST_CASE("statistics that a device reduces are stable however large the mean, with the same bits on every rank") {
  int const ranks = 3;
  std::int64_t const channels = 3, spatial = 40, samples = 2;
  // Σx² would lose the square of mean over deviation, 1e12 of the 1e16 that a double has.
  double const mean = 1 << 22, deviation = 4;
  std::vector<double> x(static_cast<std::size_t>(ranks * samples * channels * spatial));
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::size_t const rank = i / static_cast<std::size_t>(samples * channels * spatial);
    x[i] = static_cast<float>(mean + deviation * (test::noise(1, i) + static_cast<double>(rank)));
  }
  test::batch_norm_oracle const oracle{x, ranks * samples, channels, spatial, 0};
  std::vector<std::vector<double>> bits(ranks);
  test::over_nccl(ranks, [&](auto const& comm) {
    layer_over<test::nccl_communicator> layer{
        comm, channels, {.norm = {.eps = 0, .exchange = exchange_policy::reduce}}};
    layer_cases::device_tensor<float> own{test::layout::nchw, samples, channels, spatial};
    own.put({x.begin(), x.end()}, comm.rank() * samples);
    test::stream const on;
    layer.forward(own.view, own.view, on);
    layer.synchronize(on);
    auto const saved = layer.saved().statistics();
    auto& mine = bits[static_cast<std::size_t>(comm.rank())];
    for (auto* const values : {saved.mean, saved.inv_std})
      for (auto const value : layer_cases::get(std::span{values, static_cast<std::size_t>(channels)}))
        mine.push_back(value);
  });
  for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
    // Differences of floats from a pivot near them lose half a unit of their own, of a few deviations.
    auto const expected = 1 / std::sqrt(static_cast<double>(oracle.var[c]));
    CHECK(std::abs(bits[0][static_cast<std::size_t>(channels) + c] - expected) < 1e-6 * expected);
    CHECK(std::abs(bits[0][c] - static_cast<double>(oracle.mean[c])) < 1e-6 * deviation);
  }
  for (auto const& of_rank : bits) CHECK(of_rank == bits[0]);
  test::check_no_violations();
}

TEST_CASE("a pass on a device that reduces is three launches, and has no room for the packets of all ranks") {
  test::over_nccl(3, [](auto const& comm) {
    test::device_buffer<double> const token{1};
    auto const step = [&](exchange_policy policy) {
      auto const barrier = [&](test::stream const& on) { // of all ranks, lest one counts what another does later
        syncnorm::allreduce(comm, std::span<double const>{token.span()}, token.span(), syncnorm::reduce_op::sum, on);
        on.wait();
      };
      test::stream const on;
      barrier(on);
      auto const before = fake_cuda::allocated();
      barrier(on);
      layer_over<test::nccl_communicator> layer{comm, 64, {.norm = {.exchange = policy}}};
      barrier(on);
      auto const room = fake_cuda::allocated() - before;
      layer.prepare(on);
      layer_cases::device_tensor<float> x{test::layout::nc, 2, 64, 1};
      x.put(std::vector<long double>(128, 1), 0);
      barrier(on);
      if (comm.rank() == 0) fake_cuda::reset();
      barrier(on);
      layer.forward(x.view, x.view, on);
      layer.backward(x.view, x.view, x.view, on);
      layer.synchronize(on);
      barrier(on);
      if (policy == exchange_policy::reduce && comm.rank() == 0) {
        CHECK(fake_cuda::calls("cudaMalloc") == 0);
        CHECK(fake_cuda::calls("kernel") == 3 * 6);
        CHECK(fake_cuda::calls("ncclAllGather") == 3 * 2);
        CHECK(fake_cuda::calls("ncclGroupEnd") == 3 * 3); // one for each allreduce
      }
      barrier(on);
      return room;
    };
    auto const reduced = step(exchange_policy::reduce), gathered = step(exchange_policy::gather);
    CHECK(gathered - reduced > 3 * 2 * 3 * 64 * sizeof(double));
  });
  test::check_no_violations();
}

TEST_CASE("what is wrong with a pass on a device that reduces is said once, also where the host hears of it between "
          "the kernels") {
  test::over_nccl(2, [](auto const& nccl) {
    for (bool const too_few : {false, true}) {
      std::promise<void> go;
      std::size_t late = 0;
      late_allreduces const comm{&nccl, &late, go.get_future().share()};
      layer_over<late_allreduces> layer{comm, 3, {.norm = {.exchange = exchange_policy::reduce}}};
      test::stream const on;
      layer_cases::device_tensor<float> x{test::layout::nc, too_few ? comm.rank() : 2, 3, 1};
      auto wrong = x.view;
      if (!too_few && comm.rank() == 1) wrong.data = nullptr;
      layer.prepare(on);
      // Those of m2, between the two kernels of a forward pass: of 3 channels, and of what has come.
      late = 3 + 1;
      auto const deadline = std::chrono::steady_clock::now() + std::chrono::minutes{1};
      std::string said;
      auto const hear = [&](auto const& f) {
        if (said.empty()) said = test::thrown<syncnorm::invalid_argument_error>(f);
      };
      hear([&] { layer.forward(wrong, x.view, on); });
      while (said.empty() && std::chrono::steady_clock::now() < deadline) hear([&] { layer.check(); });
      CHECK(said == (too_few ? "batch_norm forward: training needs more than 1 value per channel over all ranks, got 1"
                             : "batch_norm forward: rank 1: x is null, its extents are [2, 3, 1]"));
      go.set_value();
      on.wait();
      CHECK_NOTHROW(layer.check());
    }
  });
  test::check_no_violations();
}

TEST_CASE("on a device the model chooses with the headers that are gathered in any case, unless the user does") {
  using syncnorm::detail::merge_rule;
  using syncnorm::detail::resolve_on_stream;
  syncnorm::exchange_cost const distant{.latency = 1}, narrow{.latency = 1e-9, .bandwidth = 1e3};
  auto const chosen = [](priced_stream_communicator const& comm, std::int64_t channels,
                         exchange_policy wish = exchange_policy::automatic) {
    return resolve_on_stream(wish, comm, merge_rule::moments, channels);
  };
  CHECK(chosen({8, distant}, 1000) == exchange_policy::gather);
  CHECK(chosen({8, narrow}, 1000) == exchange_policy::reduce);
  CHECK(chosen({8, narrow}, 1) == exchange_policy::gather); // headers are most of it
  CHECK(chosen({8, distant}, 1000, exchange_policy::reduce) == exchange_policy::reduce);
  CHECK(chosen({8, narrow}, 1000, exchange_policy::gather) == exchange_policy::gather);
  CHECK(chosen({4096}, 256) == exchange_policy::reduce);
  CHECK(chosen({4096, {.reduction_scales = false}}, 256) == exchange_policy::gather);
  CHECK(resolve_on_stream(exchange_policy::reduce, only_gathers{}, merge_rule::sums, 1000) == exchange_policy::gather);
}

TEST_CASE("ranks on a device that choose different policies are told so") {
  test::over_nccl(2, [](auto const& comm) {
    test::stream const on;
    layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 5};
    x.put(std::vector<long double>(30, 1), 0);
    layer_over<test::nccl_communicator> differing{
        comm, 3, {.norm = {.exchange = comm.rank() == 0 ? exchange_policy::gather : exchange_policy::reduce}}};
    CHECK(
        test::thrown<syncnorm::mismatch_error>([&] { differing.forward(x.view, x.view, on); })
            .find("ranks disagree on the exchange policy asked for (0: automatic, 1: gather, 2: reduce): rank 0 has 1, "
                  "rank 1 has 2") != std::string::npos);
    layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.exchange = exchange_policy::reduce}}};
    layer.prepare(on);
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            layer.backward(x.view, x.view, x.view, on); // by the layer's policy, though no forward pass had one
            layer.synchronize(on);
          }).find("rank 1: there was no forward pass") != std::string::npos);
  });
  test::check_no_violations();
}
