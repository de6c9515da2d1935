#include <syncnorm/ops/cuda_batch_norm_layer.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/adapters/staged.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/cuda/kernels.hpp>

#include "cuda/complex_layer.hpp"
#include "cuda/double_backward_case.hpp"
#include "cuda/echo.hpp"
#include "cuda/in_place_case.hpp"
#include "cuda/layer_cases.hpp"
#include "cuda/micro_batch_case.hpp"
#include "cuda/pending_cases.hpp"
#include "cuda/stream_contract.hpp"
#include "ops/complex_case.hpp"
#include "ops/complex_second_order.hpp"

// What needs a GPU: everything once on a stream, and, where the communicator allows it, once replayed from a graph.
namespace {

template <class T, class C>
using layer_over = syncnorm::cuda::basic_batch_norm<T, C, syncnorm::accumulate_t<T>, syncnorm::cuda::compiled_kernels>;
using staged_threads = syncnorm::staged<syncnorm::thread_communicator>;

/// f(comm) on a thread for each rank, all on one GPU.
void over_threads(int size, std::function<void(staged_threads const&)> const& f) {
  syncnorm::run_ranks(size, [&](auto const& threads) { f(staged_threads{threads}); });
}

/// A rank of NCCL that is a thread, as all others are, and may meet them on the host.
struct nccl_thread : syncnorm::nccl_communicator {
  syncnorm::thread_communicator host;
  nccl_thread(syncnorm::nccl_communicator comm, syncnorm::thread_communicator threads)
      : syncnorm::nccl_communicator{std::move(comm)}, host{std::move(threads)} {}
  void meet() const { host.barrier(); }
};

/// f(comm) on a thread for each GPU.
void over_nccl(std::function<void(nccl_thread const&)> const& f) {
  int devices = 0;
  REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
  std::vector<ncclComm_t> comms(static_cast<std::size_t>(devices));
  REQUIRE(ncclCommInitAll(comms.data(), devices, nullptr) == ncclSuccess);
  syncnorm::run_ranks(devices, [&](auto const& threads) {
    syncnorm::detail::require_cuda(cudaSetDevice(threads.rank()), "cudaSetDevice");
    f({syncnorm::nccl_communicator::adopt(comms[static_cast<std::size_t>(threads.rank())]), threads});
  });
}

template <class T, class C>
void check_cases(C const& comm, bool captured) {
  layer_cases::check_cases<layer_over<T, C>, T>(comm, captured);
}

// Many blocks to a channel, in clusters of 2 to 8, too, and many channels to a block.
std::vector<layer_cases::layer_case> large_cases() {
  using test::layout;
  return {{{16, 3, 0, 1}, 64, 56 * 56},
          {{64, 1, 0, 2}, 5, 56 * 56},
          {{16, 3, 0, 1}, 256, 28 * 28, layout::nhwc},
          {{512, 64, 0, 1}, 1000, 1, layout::nc}};
}

// Channels of one rank on the chip, in one block and in several, whose rows are no multiples of 16 bytes, in float or in 16 bits.
template <class T>
void check_odd_rows(bool captured) {
  syncnorm::self_communicator const self;
  for (auto const& of : {layer_cases::layer_case{{20}, 5, 14 * 14},
                         {{200}, 6, 14 * 14},
                         {{30}, 7, 49},
                         {{800}, 5, 49},
                         {{300}, 5, 30 * 5},
                         {{800}, 4, 49, test::layout::nchw, false, true, 0.25}})
    layer_cases::check_steps<layer_over<T, syncnorm::self_communicator>, T>(self, of, captured,
                                                                            layer_cases::accuracy_in<T>);
}

// Channels of one rank that are too long for the chip along channels, whole packs and others, so that two kernels take them.
template <class T>
void check_long_columns(bool captured) {
  using test::layout;
  syncnorm::self_communicator const self;
  for (auto const& of : {layer_cases::layer_case{{3}, 72, 28 * 28, layout::nhwc},
                         {{3}, 72, 28 * 28, layout::nhwc, false, true, 0.25},
                         {{3}, 72, 28 * 28, layout::nhwc, true},
                         {{2000}, 37, 1, layout::nc}})
    layer_cases::check_steps<layer_over<T, syncnorm::self_communicator>, T>(self, of, captured,
                                                                            layer_cases::accuracy_in<T>);
}

// Rows of several ranks that are multiples of 8 bytes in 16 bits, of one piece and of several.
template <class T, class C>
void check_rows_of_units(C const& comm) {
  for (auto const& of : {layer_cases::layer_case{{20, 3, 0, 1}, 5, 14 * 14},
                         {{200, 1, 9, 0}, 6, 14 * 14, test::layout::nchw, false, true, 0.25},
                         {{1, 30, 2, 5}, 3, 58 * 58}})
    layer_cases::check_steps<layer_over<T, C>, T>(comm, of, false, layer_cases::accuracy_in<T>);
}

// Short rows that are columns: to map, and in the first case to sum, too.
template <class T, class C>
void check_columns(C const& comm, bool captured) {
  for (auto const& of : {layer_cases::layer_case{{96, 90, 0, 1}, 512, 49},
                         {{9, 30, 8, 2}, 40, 14 * 14, test::layout::nchw, false, true, 0.25},
                         {{31, 8, 64, 3}, 24, 5}})
    layer_cases::check_steps<layer_over<T, C>, T>(comm, of, captured, layer_cases::accuracy_in<T>);
}

} // namespace

TEST_CASE("device memory over a communicator of the host keeps the contract of streams on a GPU") {
  for (int const ranks : {1, 2, 4})
    over_threads(ranks, [](auto const& comm) { stream_contract::check_contract(comm, false); });
}

TEST_CASE("NCCL keeps the contract of streams on as many GPUs as there are") {
  over_nccl([](auto const& comm) {
    for (bool const captured : {false, true}) stream_contract::check_contract(comm, captured);
    int const parity = comm.rank() % 2;
    stream_contract::check_contract(nccl_thread{syncnorm::split(comm, parity), syncnorm::split(comm.host, parity)},
                                    true);
  });
}

TEST_CASE("one rank on a GPU agrees with the oracle, in every element type") {
  syncnorm::self_communicator const self;
  for (bool const captured : {false, true}) {
    check_cases<float>(self, captured);
    check_cases<double>(self, captured);
    check_cases<__half>(self, captured);
    check_cases<__nv_bfloat16>(self, captured);
    for (auto const& of : large_cases())
      layer_cases::check_steps<layer_over<float, syncnorm::self_communicator>>(self, of, captured);
    check_odd_rows<float>(captured);
    check_odd_rows<__half>(captured);
    check_odd_rows<__nv_bfloat16>(captured);
    check_columns<float>(self, captured);
    check_columns<double>(self, captured);
    check_columns<__half>(self, captured);
    check_long_columns<float>(captured);
    check_long_columns<double>(captured);
    check_long_columns<__half>(captured);
    check_long_columns<__nv_bfloat16>(captured);
  }
}

TEST_CASE("complex numbers on a GPU agree with the oracle, of one rank, of ranks on one GPU and over NCCL") {
  using test::layout;
  using kernels = syncnorm::cuda::compiled_kernels;
  auto const check = []<class T>(T, test::complex_case const& of, auto const& host, auto const& comm, bool captured) {
    for (auto const& failure : test::run_complex_case_on_device<T, kernels>(of, host, comm, captured))
      FAIL_CHECK(failure);
  };
  for (auto const order : {layout::nchw, layout::nhwc, layout::strided})
    for (auto const gamma : {syncnorm::gamma_numbers::real, syncnorm::gamma_numbers::complex})
      for (std::int64_t const spatial : {7, 28 * 28}) {
        test::complex_case of{{{20}}, 40, spatial, order};
        of.gamma = gamma;
        if (spatial == 7) of.masked = syncnorm::masked_outputs::zero;
        syncnorm::self_communicator const self;
        check(float{}, of, self, self, true);
        check(double{}, of, self, self, true);
        of.shares = {{3, 9}, {}, {0, 8}};
        over_threads(3, [&](staged_threads const& comm) { check(float{}, of, comm.host(), comm, false); });
        over_nccl([&](nccl_thread const& comm) {
          auto const ranks = static_cast<std::size_t>(syncnorm::size(comm.host));
          auto each = of;
          each.shares.assign(ranks, {5});
          check(float{}, each, comm.host, comm, true);
        });
      }
}

TEST_CASE("double backward of complex numbers on a GPU agrees with differences of the oracle") {
  using kernels = syncnorm::cuda::compiled_kernels;
  auto const check = []<class T>(test::complex_second_order_case<T> const& problem, auto const& host, auto const& comm,
                                 bool captured) {
    for (auto const& failure : test::check_complex_double_backward_on_device<T, kernels>(problem, host, comm, captured))
      FAIL_CHECK(failure);
  };
  test::for_each_complex_second_order<double>([&](test::complex_second_order_case<double> const& problem) {
    auto const ranks = static_cast<int>(problem.of.shares.size());
    syncnorm::self_communicator const self;
    if (ranks == 1) check(problem, self, self, true);
    over_threads(ranks, [&](staged_threads const& comm) { check(problem, comm.host(), comm, false); });
  });
}

TEST_CASE("equal elements have exactly their mean on a GPU, and no spread") {
  syncnorm::self_communicator const self;
  layer_cases::check_equal_elements<layer_over<float, syncnorm::self_communicator>, float>(self, true);
  layer_cases::check_equal_elements<layer_over<double, syncnorm::self_communicator>, double>(self, true);
}

TEST_CASE("passes on the chip of different sizes are replayed from one graph") {
  // 64 KB a channel, for which a kernel needs leave, and then 1 KB of the same kernel.
  using layer_cases::device_tensor;
  test::stream const on;
  layer_over<float, syncnorm::self_communicator> large{{}, 200}, small{{}, 200};
  device_tensor<float> x{test::layout::nchw, 16, 200, 1024}, y{test::layout::nchw, 16, 200, 1024};
  device_tensor<float> u{test::layout::nchw, 16, 200, 16}, v{test::layout::nchw, 16, 200, 16};
  for (auto* const each : {&x, &u}) {
    std::vector<long double> values(static_cast<std::size_t>(each->view.size()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = test::noise(1, i);
    each->put(values, 0);
  }
  auto const step = [&](cudaStream_t stream) {
    large.forward(x.view, y.view, stream);
    small.forward(u.view, v.view, stream);
  };
  test::run_on(on, false, step);
  auto const of_large = y.get(), of_small = v.get();
  for (auto* const each : {&y, &v}) each->put(std::vector<long double>(static_cast<std::size_t>(each->view.size())), 0);
  test::run_on(on, true, step, 2);
  CHECK((y.get() == of_large));
  CHECK((v.get() == of_small));
}

TEST_CASE("ranks on one GPU agree with the oracle") {
  for (int const ranks : {2, 3, 4}) over_threads(ranks, [](auto const& comm) { check_cases<float>(comm, false); });
  over_threads(4, [](auto const& comm) {
    for (auto const& of : large_cases()) layer_cases::check_steps<layer_over<float, staged_threads>>(comm, of, false);
    check_columns<float>(comm, false);
    check_columns<__half>(comm, false);
    check_rows_of_units<__half>(comm);
    check_rows_of_units<__nv_bfloat16>(comm);
  });
}

TEST_CASE(
    "exchanges of one GPU with itself, gathered and reduced, in two phases and in groups, on a stream and replayed") {
  layer_cases::check_echoes<layer_over<float, test::echo_communicator>,
                            layer_over<float, syncnorm::self_communicator>>();
}

TEST_CASE("double backward on a GPU agrees with the oracle, of one batch and over micro-batches") {
  using test::layout;
  for (bool const with_epilogue : {false, true})
    for (auto const order : {layout::nchw, layout::nhwc}) {
      for (bool const captured : {false, true})
        layer_cases::check_double_backward<layer_over<float, syncnorm::self_communicator>>(
            syncnorm::self_communicator{}, {{1, 0, 3, 2}}, order, with_epilogue, captured);
      for (auto const& shares : {layer_cases::micro_batch_share{{2}, {0}, {3}}, {{1, 2}, {}, {0, 1, 1}}})
        over_threads(3, [&](auto const& comm) {
          layer_cases::check_double_backward<layer_over<float, staged_threads>>(comm, shares, order, with_epilogue,
                                                                                false);
        });
    }
}

TEST_CASE("passes of ranks on one GPU that reduce agree with the oracle") {
  over_threads(3, [&](auto const& comm) {
    for (auto of : layer_cases::cases()) {
      of.policy = syncnorm::exchange_policy::reduce;
      layer_cases::check_steps<layer_over<float, staged_threads>>(comm, of, false);
    }
  });
}

TEST_CASE("passes in place, over micro-batches, in two phases and in groups on a GPU") {
  using alone = layer_over<float, syncnorm::self_communicator>;
  using over_host = layer_over<float, staged_threads>;
  syncnorm::self_communicator const self;
  using layer_cases::dx_over;
  for (auto const& of : layer_cases::in_place_cases()) {
    for (bool const captured : {false, true})
      for (auto const over : {dx_over::neither, dx_over::dy})
        layer_cases::check_in_place<alone>(self, of, captured, over);
    over_threads(2, [&](auto const& comm) { layer_cases::check_in_place<over_host>(comm, of, false, dx_over::y); });
  }
  layer_cases::layer_case const of{{}, 37, 9, test::layout::nhwc, true, true, 0.25};
  for (bool const captured : {false, true}) {
    layer_cases::check_micro_batches<alone>(self, {{1, 0, 3, 2}}, of, captured);
    layer_cases::check_micro_batches_in_place<alone>(self, {{2, 0, 3}}, test::layout::nhwc, captured, captured);
    layer_cases::check_micro_batches_in_place<alone>(self, {{4, 1, 2}}, test::layout::nchw, captured, !captured, true);
  }
  over_threads(3, [&](auto const& comm) {
    layer_cases::check_micro_batches<over_host>(comm, {{1, 5, 2}, {3}, {}}, of, false);
    layer_cases::check_micro_batches_in_place<over_host>(comm, {{2, 1, 3}, {}, {0, 4}}, test::layout::nchw, false,
                                                         false);
    layer_cases::check_two_phases<over_host>(comm, false, [] {});
    layer_cases::check_group<over_host>(comm, false);
  });
}

TEST_CASE("what is wrong on one rank is an error on every rank of a GPU, and nothing is written") {
  over_threads(2, [](auto const& comm) {
    layer_over<float, staged_threads> layer{comm, 3};
    test::stream const on;
    layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 5}, y{test::layout::nchw, 2, 3, 5};
    auto const before = y.get();
    auto view = x.view;
    if (comm.rank() == 1) view.data = x.host.storage.data();
    std::string said;
    for (bool const first : {true, false}) {
      if (first) layer.forward(x.view, x.view, on);
      try {
        layer.forward(view, y.view, on);
        layer.synchronize(on);
      } catch (syncnorm::invalid_argument_error const& e) {
        said = e.what();
      }
      CHECK(said == "batch_norm forward: rank 1: x is memory of the host, expected of device 0");
      CHECK(y.get() == before);
    }
    layer.forward(x.view, y.view, on);
    layer.synchronize(on);
  });
}
