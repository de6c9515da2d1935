#include "ops/cuda_support.hpp"

#include <barrier>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>
#include <syncnorm/ops/cuda_complex_batch_norm_layer.hpp>

#include <support/noise.hpp>
#include <support/sanitized.hpp>

#include "cuda/complex_layer.hpp"
#include "cuda/fake_nccl.hpp"
#include "ops/complex_case.hpp"

using syncnorm::gamma_numbers;
using test::layer_over;
using test::layout;

namespace {

template <class T>
void check_complex_case(test::complex_case const& of, bool over_nccl, bool captured) {
  auto const ranks = of.shares.size();
  auto const comms = over_nccl ? fake_nccl::make_group(static_cast<int>(ranks)) : std::vector<ncclComm_t>{};
  std::vector<std::vector<std::string>> failures(ranks);
  syncnorm::run_ranks(static_cast<int>(ranks), [&](syncnorm::thread_communicator const& host) {
    auto const rank = static_cast<std::size_t>(host.rank());
    using kernels = test::simt_kernels;
    failures[rank] =
        over_nccl ? test::run_complex_case_on_device<T, kernels>(of, host, test::nccl_communicator::adopt(comms[rank]),
                                                                 captured)
                  : test::run_complex_case_on_device<T, kernels>(of, host, test::staged_threads{host}, captured);
  });
  for (auto const& of_rank : failures)
    for (auto const& failure : of_rank) FAIL_CHECK(failure);
}

namespace cuda = syncnorm::cuda;
using number = std::complex<float>;
template <class C>
using complex_layer_over = cuda::basic_complex_batch_norm<float, C, test::simt_kernels>;

/// A batch `[N, 3, 5]` of this rank on the device, which a case spoils.
struct complex_step_memory {
  static constexpr std::int64_t channels = 3, spatial = 5;
  std::int64_t samples;
  test::device_buffer<number> x{numbers(1)}, y{numbers(2)}, dy{numbers(3)}, dx{numbers(4)};
  syncnorm::tensor_view<number> x_view{view(x)}, y_view{view(y)}, dy_view{view(dy)}, dx_view{view(dx)};
  test::device_buffer<std::uint8_t> counts{std::vector<std::uint8_t>(static_cast<std::size_t>(samples * spatial), 1)};
  syncnorm::batch_norm_mask mask{};
  std::vector<number> on_host = std::vector<number>(100);

  explicit complex_step_memory(std::int64_t n = 2) : samples{n} {}

  template <class Layer>
  void forward(Layer& layer, test::stream const& on) {
    layer.forward(x_view, y_view, mask, on);
  }
  template <class Layer>
  void backward(Layer& layer, test::stream const& on) {
    layer.backward(x_view, dy_view, dx_view, mask, {}, on);
  }

private:
  [[nodiscard]] std::vector<number> numbers(std::uint64_t stream) const {
    std::vector<number> values(static_cast<std::size_t>(samples * channels * spatial));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = {static_cast<float>(test::noise(stream, i)), static_cast<float>(test::noise(stream + 10, i))};
    return values;
  }
  [[nodiscard]] syncnorm::tensor_view<number> view(test::device_buffer<number> const& of) const {
    return syncnorm::nchw(of.data(), samples, channels, spatial);
  }
};

/// All that a layer's steps leave.
template <class Layer>
std::vector<number> results_of(Layer& layer) {
  std::vector<number> all{static_cast<float>(layer_cases::get(std::span{layer.num_batches_tracked(), 1})[0])};
  auto const add = [&](auto const& values) { all.insert(all.end(), values.begin(), values.end()); };
  add(layer_cases::get(layer.running_mean())), add(layer_cases::get(layer.running_var()));
  add(layer_cases::get(layer.gamma_grad())), add(layer_cases::get(layer.gamma_imag_grad()));
  add(layer_cases::get(layer.beta_grad()));
  return all;
}

/// A good step, one that `spoil` spoils on rank 1, and a good one again, where what fails is said on every rank.
void check_spoiled(std::function<void(complex_step_memory&)> const& spoil, std::string const& message) {
  INFO(message);
  test::over_nccl(3, [&](auto const& comm) {
    complex_layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    complex_step_memory good, bad;
    good.forward(layer, on), good.backward(layer, on);
    layer.synchronize(on);
    bool const in_backward = message.find("backward") != std::string::npos;
    if (in_backward) bad.forward(layer, on), layer.synchronize(on);
    auto const before = std::tuple{results_of(layer), bad.y.get(), bad.dx.get()};
    if (comm.rank() == 1) spoil(bad);
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            in_backward ? bad.backward(layer, on) : bad.forward(layer, on);
            layer.synchronize(on);
          }) == message);
    CHECK(std::tuple{results_of(layer), bad.y.get(), bad.dx.get()} == before);
    good.forward(layer, on), good.backward(layer, on);
    layer.synchronize(on);
  });
  test::check_no_violations();
}

} // namespace

TEST_CASE_TEMPLATE("complex batch norm on a device agrees with the oracle on the whole batch", T,
                   float AND_UNSANITIZED(double)) {
  std::vector<std::vector<std::vector<std::int64_t>>> const shares{
      {{5}}, {{2, 3}}, {{4}, {4}}, {{1, 5, 2}, {3}, {0, 2}}, {{}, {2, 3}, {}}, {{0}, {7}, {1}}};
  std::size_t turn = 0;
  for (auto const& share : shares)
    for (auto const order : test::layouts)
      for (std::int64_t const channels : {1, 3, 37}) {
        ++turn;
        if (test::sanitized && turn % 4 != 0) continue;
        test::complex_case of{share, channels, order == layout::nc ? 1 : channels == 3 ? 150 : 7, order};
        of.take_turn(turn);
        check_complex_case<T>(of, turn % 4 == 3, turn % 4 == 3 && turn % 8 > 3);
      }
  test::check_no_violations();
}

TEST_CASE(
    "large layers of complex numbers take several blocks of a device to a channel, and several channels to a block") {
  auto gamma = gamma_numbers::complex;
  for (auto const& [samples, channels, spatial, order] : {std::tuple{40, 2, 200, layout::nchw},
                                                          {20, 2, 130, layout::strided},
                                                          {6, 30, 60, layout::nhwc},
                                                          {260, 4, 7, layout::nchw},
                                                          {900, 5, 1, layout::nc},
                                                          {12, 64, 20, layout::nhwc}}) {
    test::complex_case of{{{samples}, {samples / 3}}, channels, spatial, order};
    of.gamma = gamma;
    gamma = gamma == gamma_numbers::real ? gamma_numbers::complex : gamma_numbers::real;
    check_complex_case<float>(of, true, true);
    if (!test::sanitized) check_complex_case<double>(of, true, true);
  }
  test::check_no_violations();
}

TEST_CASE("complex numbers that begin in the midst of 16 bytes, or of a number, are normalized as others are") {
  constexpr std::int64_t n = 3, c = 2, s = 9;
  test::stream const on;
  auto const run = [&](std::size_t floats) {
    std::vector<float> x(2 * n * c * s + floats + 4);
    for (std::size_t i = 0; i < 2 * n * c * s; ++i) x[floats + i] = static_cast<float>(test::noise(1, i));
    test::device_buffer<float> const in{x}, out{std::vector<float>(x.size())};
    auto const view = [&](test::device_buffer<float> const& of) {
      return syncnorm::nchw(reinterpret_cast<number*>(of.data() + floats), n, c, s);
    };
    complex_layer_over<syncnorm::self_communicator> layer{{}, c};
    layer.forward(view(in), view(out), on);
    layer.backward(view(in), view(in), view(out), on);
    layer.synchronize(on);
    auto const all = out.get();
    return std::vector<float>(all.begin() + static_cast<std::ptrdiff_t>(floats),
                              all.begin() + static_cast<std::ptrdiff_t>(floats + 2 * n * c * s));
  };
  auto const expected = run(0);
  for (std::size_t const floats : {1U, 2U, 3U}) CHECK(layer_cases::error_of(run(floats), expected) < 1e-6);
  test::check_no_violations();
}

TEST_CASE("equal complex numbers have exactly their mean on a device, and no variance") {
  test::over_nccl(2, [](auto const& comm) {
    for (bool const rows : {true, false}) {
      constexpr std::int64_t n = 7, c = 3, s = 11;
      number const value{0.1F, -0.7F};
      test::device_buffer<number> const x{std::vector<number>(n * c * s, value)}, y{std::vector<number>(n * c * s)};
      auto const view = [&](test::device_buffer<number> const& of) {
        return rows ? syncnorm::nchw(of.data(), n, c, s) : syncnorm::nhwc(of.data(), n, c, s);
      };
      complex_layer_over<test::nccl_communicator> layer{comm, c, {.norm = {.eps = 0, .momentum = 1}}};
      test::stream const on;
      layer.forward(view(x), view(y), on);
      layer.synchronize(on);
      CHECK(layer_cases::get(layer.running_mean()) == std::vector<number>(c, value));
      CHECK(layer_cases::get(layer.running_var()) == std::vector<float>(c, 0));
      CHECK(y.get() == std::vector<number>(n * c * s));
    }
  });
  test::check_no_violations();
}

TEST_CASE("what is infinite in one part of a complex number leaves the other as it is, and what does not count all") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  complex_layer_over<syncnorm::self_communicator> layer{{}, 3};
  test::stream const on;
  complex_step_memory of;
  auto x = of.x.get();
  x[0] = {infinity, 1};
  of.x.put(x);
  layer.eval();
  of.forward(layer, on);
  layer.synchronize(on);
  CHECK(of.y.get()[0].real() == infinity);
  CHECK(std::abs(of.y.get()[0].imag() - 1) < 1e-4F);
  // Of position 0 of a sample, where x is infinite, nothing is in the statistics, nor in the gradients of others.
  std::vector<std::uint8_t> counts(10, 1);
  counts[0] = 0;
  of.counts.put(counts);
  of.mask = {syncnorm::mask_of(of.counts.data(), 2, 5), syncnorm::masked_outputs::zero};
  layer.train();
  of.forward(layer, on), of.backward(layer, on);
  layer.synchronize(on);
  for (auto const& values : {of.y.get(), of.dx.get(), results_of(layer)})
    for (auto const value : values) CHECK(std::isfinite(std::abs(value)));
  CHECK(of.y.get()[0] == number{});
  CHECK(of.dx.get()[0] == number{});
  test::check_no_violations();
}

TEST_CASE("layers of real and of complex numbers on a device are in one collective, in two phases, as by themselves") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    test::over_nccl(2, [&](auto const& comm) {
      using C = test::nccl_communicator;
      syncnorm::batch_norm_layer_options const options{.norm = {.exchange = policy}};
      test::stream const on;
      auto const run = [&](bool together) {
        layer_over<C> real{comm, 3, options};
        complex_layer_over<C> complex{comm, 3, options, gamma_numbers::complex};
        layer_cases::device_tensor<float> x{layout::nchw, 2, 3, 5}, y{layout::nchw, 2, 3, 5};
        std::vector<long double> values(30);
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7);
        x.put(values, 0);
        complex_step_memory of{2 + comm.rank()};
        if (together) {
          cuda::batch_norm_group group{comm};
          group.begin(cuda::passes(real.plan_forward(x.view, y.view), complex.plan_forward(of.x_view, of.y_view)), on)
              .finish(on);
          group.run(cuda::passes(real.plan_backward(x.view, x.view, y.view),
                                 complex.plan_backward(of.x_view, of.dy_view, of.dx_view)),
                    on);
          group.synchronize(on);
        } else {
          real.forward(x.view, y.view, on);
          complex.begin_forward(of.x_view, of.y_view, {}, on).finish(on);
          real.backward(x.view, x.view, y.view, on);
          complex.begin_backward(of.x_view, of.dy_view, of.dx_view, {}, {}, on).finish(on);
          real.synchronize(on), complex.synchronize(on);
        }
        return std::tuple{y.get(), of.y.get(), of.dx.get(), results_of(complex)};
      };
      CHECK(run(true) == run(false));
    });
  test::check_no_violations();
}

TEST_CASE("what is wrong with complex numbers on one rank is an error on every rank of devices") {
  std::string const forward = "batch_norm forward: rank 1: ", backward = "batch_norm backward: rank 1: ";
  check_spoiled([](auto& in) { in.x_view.data = nullptr; }, forward + "x is null, its extents are [2, 3, 5]");
  check_spoiled([](auto& in) { in.x_view.data = in.on_host.data(); },
                forward + "x is memory of the host, expected of device 0");
  check_spoiled([](auto& in) { in.x_view.channels = 2; }, forward + "x has 2 channels, expected 3");
  check_spoiled([](auto& in) { in.y_view = syncnorm::nhwc(in.x_view.data, 2, 3, 5); },
                forward + "y and x overlap in memory, and are not the same");
  check_spoiled([](auto& in) { in.mask = {syncnorm::mask_of(in.counts.data(), 1, 5)}; },
                forward + "the mask is [1, 5], expected [2, 5]: a position for each sample and place of x");
  check_spoiled([](auto& in) { in.dy_view.samples = 1; }, backward + "dy is [1, 3, 5], expected [2, 3, 5] as x");
  check_spoiled([](auto& in) { in.dx_view.data = in.on_host.data(); },
                backward + "dx is memory of the host, expected of device 0");
  check_spoiled([](auto& in) { in.x_view.samples = in.dy_view.samples = in.dx_view.samples = 1; },
                backward + "x has 5 values per channel, in the forward pass 10");
}

TEST_CASE("ranks that differ in their complex numbers hear of it, and a single value per channel is refused") {
  auto const said_by = [](auto const& layer_of_rank, std::int64_t samples) {
    std::vector<std::string> said(2);
    test::over_nccl(2, [&](auto const& comm) {
      auto layer = layer_of_rank(comm);
      test::stream const on;
      complex_step_memory of{samples};
      said[static_cast<std::size_t>(comm.rank())] = test::thrown<syncnorm::error>([&] {
        of.forward(layer, on);
        layer.synchronize(on);
      });
    });
    CHECK(said[0] == said[1]);
    return said[0];
  };
  using layer = complex_layer_over<test::nccl_communicator>;
  CHECK(said_by(
            [](auto const& comm) {
              return layer{comm, 3, {}, comm.rank() == 0 ? gamma_numbers::real : gamma_numbers::complex};
            },
            2)
            .find("affine parameters: rank 0 has 3, rank 1 has 7") != std::string::npos);
  CHECK(said_by(
            [](auto const& comm) {
              return layer{comm, 3, {.norm = {.eps = comm.rank() + 1.0}}};
            },
            2)
            .find("eps") != std::string::npos);
  complex_layer_over<syncnorm::self_communicator> alone{{}, 3};
  test::stream const on;
  test::device_buffer<number> const one{std::vector<number>(3)};
  auto const view = syncnorm::nc(one.data(), 1, 3);
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { alone.forward(view, view, on); }) ==
        "batch_norm forward: training needs more than 1 value per channel over all ranks, got 1");
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { alone.backward(view, view, view, on); }) ==
        "batch_norm backward: there was no forward pass");
  test::check_no_violations();
}

TEST_CASE("a step of complex numbers allocates nothing on a device, and loads no kernel after it was prepared") {
  test::over_nccl(2, [](auto const& comm) {
    complex_layer_over<test::nccl_communicator> layer{comm, 3};
    test::stream const on;
    complex_step_memory of;
    static std::barrier<> all{2};
    all.arrive_and_wait();
    if (comm.rank() == 0) test::unload_kernels();
    all.arrive_and_wait();
    layer.prepare(on);
    all.arrive_and_wait();
    if (comm.rank() == 0) fake_cuda::reset();
    all.arrive_and_wait();
    of.forward(layer, on), of.backward(layer, on);
    layer.synchronize(on);
    all.arrive_and_wait();
    CHECK(fake_cuda::calls("cudaMalloc") == 0);
    CHECK(fake_cuda::calls("first launch") == 0);
    CHECK(fake_cuda::calls("kernel") == 8);
    all.arrive_and_wait();
  });
  test::check_no_violations();
}

TEST_CASE("what no kernel of complex numbers can take is an error, and nothing is launched") {
  using kernels = cuda::complex_kernels_of<float, test::simt_kernels>;
  constexpr std::int64_t channels = complex_step_memory::channels;
  cuda::device_limits const limits{4, 48 * 1024};
  test::stream const on;
  complex_step_memory of;
  test::device_buffer<std::byte> const packet_bytes{std::vector<std::byte>(cuda::packet_bytes(2 * channels))},
      work_bytes{std::vector<std::byte>(cuda::workspace_bytes(channels, limits))};
  test::device_buffer<double> const statistics{std::vector<double>(4 * channels)};
  test::device_buffer<std::int64_t> const count{std::vector<std::int64_t>(1)};
  cuda::packet_place const packet{packet_bytes.data()};
  cuda::workspace const work{work_bytes.data(), work_bytes.size()};
  cuda::saved_statistics const saved{statistics.data(), statistics.data() + 2 * channels, count.data()};
  syncnorm::tensor_view<number const> const x = of.x_view;
  auto no_x = x, flat = x;
  no_x.data = nullptr, flat.spatial = 1;
  auto flat_y = of.y_view;
  flat_y.spatial = 1;
  syncnorm::batch_norm_mask const wide{syncnorm::mask_of(of.counts.data(), 2, 6)};
  fake_cuda::reset();
  auto const said = [](auto const& f) { return test::thrown<syncnorm::invalid_argument_error>(f); };
  CHECK(said([&] { kernels::local_moments(no_x, {}, {}, packet, work, limits, on); }) == "local_moments: x is null");
  CHECK(said([&] { kernels::local_moments(x, wide.mask, {}, packet, work, limits, on); }) ==
        "local_moments: the mask has other extents than x");
  CHECK(said([&] {
          kernels::local_moments(x, {}, {}, packet, {work.data, 16}, limits, on);
        }) == "local_moments: the workspace has 16 bytes, of " + std::to_string(work.bytes));
  CHECK(said([&] { kernels::normalize(x, flat_y, {}, {}, {}, own_packet(packet), saved, {}, {}, work, limits, on); }) ==
        "normalize: y has other extents than x");
  CHECK(said([&] { kernels::normalize(x, of.y_view, {}, {}, {}, {}, saved, {}, {}, work, limits, on); }) ==
        "normalize: a packet is null or not aligned to 8 bytes");
  CHECK(said([&] { kernels::normalize_constant(x, of.y_view, {}, {}, {}, {}, {}, saved, limits, on); }) ==
        "normalize_constant: the running statistics are null");
  CHECK(said([&] { kernels::backward_reduce(flat, x, false, {}, saved, {}, packet, work, limits, on); }) ==
        "backward_reduce: dy has other extents than x");
  CHECK(said([&] { kernels::backward_reduce(x, x, false, {}, {}, {}, packet, work, limits, on); }) ==
        "backward_reduce: the saved statistics are null");
  CHECK(said([&] {
          kernels::backward_elemt(x, x, of.dx_view, {}, wide, saved, own_packet(packet), packet, {}, {}, limits, on);
        }) == "backward_elemt: the mask has other extents than x");
  CHECK(fake_cuda::calls("kernel") == 0);
}
