#include "ops/cuda_support.hpp"

#include <complex>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>
#include <syncnorm/ops/cuda_complex_batch_norm_layer.hpp>

#include <support/noise.hpp>
#include <support/sanitized.hpp>

#include "cuda/complex_layer.hpp"
#include "cuda/fake_nccl.hpp"
#include "ops/complex_case.hpp"
#include "ops/complex_second_order.hpp"

using syncnorm::gamma_numbers;
using test::layout;

namespace {

using complex = std::complex<float>;
template <class C>
using second_order_layer = syncnorm::cuda::basic_complex_batch_norm<float, C, test::simt_kernels>;

/// Calls f(comm of the host, rank's communicator of devices) on a thread for each of some ranks, by NCCL's stand-in or `staged`.
template <class F>
void over_devices(std::size_t ranks, bool over_nccl, F const& f) {
  auto const comms = over_nccl ? fake_nccl::make_group(static_cast<int>(ranks)) : std::vector<ncclComm_t>{};
  syncnorm::run_ranks(static_cast<int>(ranks), [&](syncnorm::thread_communicator const& host) {
    if (over_nccl)
      f(host, test::nccl_communicator::adopt(comms[static_cast<std::size_t>(host.rank())]));
    else
      f(host, test::staged_threads{host});
  });
}

/// A batch `[3, 2, 5]` on the device, with all that a double backward pass of it takes.
struct second_order_memory {
  static constexpr std::int64_t samples = 3, channels = 2, spatial = 5;
  test::device_buffer<complex> x{numbers(1)}, dy{numbers(3)}, u{numbers(5)}, y{numbers(7)}, to_dy{numbers(9)},
      to_x{numbers(11)};
  syncnorm::tensor_view<complex const> x_view = view(x), dy_view = view(dy), u_view = view(u);
  syncnorm::tensor_view<complex> y_view = view(y), to_dy_view = view(to_dy), to_x_view = view(to_x);
  syncnorm::batch_norm_mask mask{};
  syncnorm::complex_second_order<float> second{.dx = {&u_view, 1}};

  static std::vector<complex> numbers(std::uint64_t stream) {
    std::vector<complex> values(static_cast<std::size_t>(samples * channels * spatial));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = {static_cast<float>(test::noise(stream, i)), static_cast<float>(test::noise(stream + 1, i))};
    return values;
  }
  static syncnorm::tensor_view<complex> view(test::device_buffer<complex> const& of) {
    return syncnorm::nchw(of.data(), samples, channels, spatial);
  }
  template <class Layer>
  void forward(Layer& layer, test::stream const& on) {
    layer.forward(x_view, y_view, mask, on);
  }
  template <class Layer>
  void double_backward(Layer& layer, test::stream const& on) {
    layer.double_backward(second, x_view, dy_view, to_dy_view, to_x_view, mask, {}, on);
  }
};

} // namespace

TEST_CASE_TEMPLATE("double backward of complex numbers on a device agrees with differences of the oracle", T,
                   double AND_UNSANITIZED(float)) {
  std::size_t turn = 0;
  test::for_each_complex_second_order<T>([&](test::complex_second_order_case<T> const& problem) {
    bool const over_nccl = turn % 2 == 0, captured = turn % 4 == 0;
    if (test::sanitized && turn++ % 3 != 0) return;
    ++turn;
    std::vector<std::vector<std::string>> failures(problem.of.shares.size());
    over_devices(failures.size(), over_nccl, [&](auto const& host, auto const& comm) {
      failures[static_cast<std::size_t>(host.rank())] =
          test::check_complex_double_backward_on_device<T, test::simt_kernels>(problem, host, comm, captured);
    });
    for (auto const& of_rank : failures)
      for (auto const& failure : of_rank) FAIL_CHECK(failure);
  });
  test::check_no_violations();
}

TEST_CASE("double backward of large and of unaligned complex numbers on a device is that of the host") {
  auto gamma = gamma_numbers::complex;
  for (auto const& [samples, channels, spatial, order] : {std::tuple{40, 2, 200, layout::nchw},
                                                          {20, 3, 33, layout::strided},
                                                          {6, 31, 60, layout::nhwc},
                                                          {260, 5, 7, layout::nchw},
                                                          {900, 5, 1, layout::nc}}) {
    gamma = gamma == gamma_numbers::real ? gamma_numbers::complex : gamma_numbers::real;
    test::complex_second_order_case<float> problem{.of{{{samples}, {samples / 3}}, channels, spatial, order}};
    problem.of.gamma = gamma;
    if (order != layout::strided) problem.of.masked = syncnorm::masked_outputs::normalized;
    problem.fill();
    over_devices(2, true, [&](auto const& host, auto const& comm) {
      auto const rank = static_cast<std::size_t>(host.rank());
      auto const& of = problem.of;
      auto const run = [&](auto&& layer) {
        test::complex_operands<float> own{of, rank, problem.first_of(rank), problem.x, problem.dy, problem.counts},
            more{of, rank, problem.first_of(rank), problem.u, problem.dy, problem.counts};
        std::vector<float> const a(static_cast<std::size_t>(of.channels), 0.5F);
        if (gamma == gamma_numbers::complex) layer.gamma_imag()[0] = 0.75F;
        layer.forward(own.read_x, own.y, own.masks);
        layer.zero_grad();
        layer.double_backward({.dx = more.read_x, .gamma_gradient = a}, own.read_x, own.read_dy, more.dx, more.y,
                              own.masks);
        std::vector<complex> all;
        for (auto const& view : {more.dx[0], more.y[0]})
          for (std::int64_t n = 0; n < view.samples; ++n)
            for (std::int64_t c = 0; c < view.channels; ++c)
              for (std::int64_t s = 0; s < view.spatial; ++s) all.push_back(view(n, c, s));
        all.insert(all.end(), layer.gamma_grad().begin(), layer.gamma_grad().end());
        all.insert(all.end(), layer.gamma_imag_grad().begin(), layer.gamma_imag_grad().end());
        return all;
      };
      using device_type = test::complex_layer<float, std::remove_cvref_t<decltype(comm)>, test::simt_kernels>;
      auto const got = run(device_type{comm, of.channels, {.norm = of.norm}, gamma, true});
      auto const expected = run(syncnorm::complex_batch_norm<float, syncnorm::thread_communicator>{
          host, of.channels, {.norm = of.norm}, {}, gamma});
      REQUIRE(got.size() == expected.size());
      // Of sums of up to some thousand numbers in float, the greatest of which are gamma's.
      test::comparison all{1};
      for (std::size_t i = 0; i < got.size(); ++i) {
        all.add(static_cast<double>(got[i].real()), expected[i].real());
        all.add(static_cast<double>(got[i].imag()), expected[i].imag());
      }
      CHECK_MESSAGE(all.within(test::tolerance<float>), of.name(), ": ", all.text());
    });
  }
  test::check_no_violations();
}

TEST_CASE("what double backward of complex numbers on a device is not given is not another times 0") {
  float const infinity = std::numeric_limits<float>::infinity();
  for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex}) {
    second_order_layer<syncnorm::self_communicator> layer{{}, 2, {}, gamma};
    test::stream const on;
    second_order_memory of;
    of.forward(layer, on);
    auto dy = of.dy.get();
    dy[3] = {0, infinity};
    of.dy.put(dy);
    test::device_buffer<complex> const b{std::vector<complex>{{0.75F, -0.5F}, {1, 2}}};
    of.second = {.beta_gradient = b.span()};
    of.double_backward(layer, on);
    layer.synchronize(on);
    auto const to_dy = of.to_dy.get();
    for (std::size_t i = 0; i < to_dy.size(); ++i) CHECK(to_dy[i] == b.get()[i / 5 % 2]);
    CHECK(of.to_x.get() == std::vector<complex>(30));
    CHECK(layer_cases::get(layer.gamma_grad()) == std::vector<float>(2));
  }
  // An infinity in one part leaves the other as it is, where gamma is real; and what is masked leaves all as it is.
  second_order_layer<syncnorm::self_communicator> layer{{}, 2};
  test::stream const on;
  second_order_memory of;
  std::vector<std::uint8_t> counts(15, 1);
  counts[4] = 0;
  test::device_buffer<std::uint8_t> const mask{counts};
  of.mask = {syncnorm::mask_of(mask.data(), 3, 5), syncnorm::masked_outputs::zero};
  layer.eval();
  of.forward(layer, on);
  auto u = of.u.get();
  u[0] = {infinity, 1}, u[4] = {infinity, infinity};
  of.u.put(u);
  of.double_backward(layer, on);
  layer.synchronize(on);
  CHECK(of.to_dy.get()[0].real() == infinity);
  CHECK(std::abs(of.to_dy.get()[0].imag() - 1) < 1e-5F);
  CHECK(of.to_dy.get()[4] == complex{});
  CHECK(of.to_x.get()[4] == complex{});
  // One output alone is what it is beside the other.
  auto const both = std::tuple{of.to_dy.get(), of.to_x.get()};
  of.to_x.put(second_order_memory::numbers(11)), of.to_dy.put(second_order_memory::numbers(9));
  layer.double_backward(of.second, of.x_view, of.dy_view, {}, of.to_x_view, of.mask, {}, on);
  CHECK(of.to_dy.get() == second_order_memory::numbers(9));
  layer.double_backward(of.second, of.x_view, of.dy_view, of.to_dy_view, {}, of.mask, {}, on);
  layer.synchronize(on);
  CHECK(std::tuple{of.to_dy.get(), of.to_x.get()} == both);
  test::check_no_violations();
}

TEST_CASE("what is wrong with double backward of complex numbers on one rank of devices is an error on every rank") {
  using layer_type = second_order_layer<test::nccl_communicator>;
  std::vector<float> const on_host(2);
  auto const said = [&](auto const& spoil, std::string const& part) {
    test::over_nccl(3, [&](auto const& comm) {
      layer_type layer{comm, 2};
      test::stream const on;
      second_order_memory good, of;
      of.forward(layer, on);
      if (comm.rank() == 1) spoil(of, layer);
      auto const text = test::thrown<syncnorm::invalid_argument_error>([&] {
        of.double_backward(layer, on);
        layer.synchronize(on);
      });
      CHECK_MESSAGE(text.find("batch_norm 2nd backward: rank 1: " + part) == 0, text);
      CHECK(layer_cases::get(layer.gamma_grad()) == std::vector<float>(2));
      // And then a good one.
      good.forward(layer, on), good.double_backward(layer, on);
      CHECK_NOTHROW(layer.synchronize(on));
    });
  };
  said([](auto& of, auto&) { of.u_view.samples = 1; },
       "the gradient with respect to dx is [1, 2, 5], expected [3, 2, 5]");
  said([&](auto& of, auto&) { of.second.gamma_gradient = on_host; },
       "the gradient with respect to that of gamma is memory of the host");
  said([](auto& of, auto& layer) { of.second.gamma_imag_gradient = layer.gamma(); },
       "gamma is real, but there is a gradient of its imaginary part");
  said([](auto& of, auto&) { of.to_x_view = of.to_dy_view; },
       "the gradient to dy and the gradient to x overlap in memory");
  said([](auto& of, auto&) { of.to_x_view = second_order_memory::view(of.x); },
       "the gradient to x and x overlap in memory");
  said(
      [](auto& of, auto&) {
        of.x_view.samples = of.dy_view.samples = of.u_view.samples = of.to_dy_view.samples = of.to_x_view.samples = 2;
      },
      "x has 10 values per channel, in the forward pass 15");

  second_order_layer<syncnorm::self_communicator> alone{{}, 2};
  test::stream const on;
  second_order_memory of;
  CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { of.double_backward(alone, on); }) ==
        "batch_norm 2nd backward: there was no forward pass");
  test::check_no_violations();
}

TEST_CASE("double backward of complex numbers is captured once there is memory for it, and then allocates nothing") {
  second_order_layer<syncnorm::self_communicator> layer{{}, 2};
  test::stream const on;
  second_order_memory of;
  layer.prepare(on);
  auto const text = test::thrown<syncnorm::invalid_argument_error>([&] {
    test::run_on(on, true, [&](cudaStream_t stream) {
      layer.forward(of.x_view, of.y_view, stream);
      layer.double_backward(of.second, of.x_view, of.dy_view, of.to_dy_view, of.to_x_view, {}, {}, stream);
    });
  });
  CHECK_MESSAGE(text.find("call reserve_double_backward() first") != std::string::npos, text);
  second_order_layer<syncnorm::self_communicator> other{{}, 2};
  test::unload_kernels();
  other.prepare(on);
  other.reserve_double_backward();
  fake_cuda::reset();
  of.forward(other, on);
  of.double_backward(other, on);
  other.synchronize(on);
  CHECK(fake_cuda::calls("cudaMalloc") == 0);
  CHECK(fake_cuda::calls("first launch") == 0);
  CHECK(fake_cuda::calls("kernel") == 4);
  test::check_no_violations();
}

TEST_CASE("what no kernel of double backward of complex numbers can take is an error, and nothing is launched") {
  using kernels = syncnorm::cuda::complex_kernels_of<float, test::simt_kernels>;
  namespace cuda = syncnorm::cuda;
  constexpr std::int64_t channels = second_order_memory::channels;
  cuda::device_limits const limits{4, 48 * 1024};
  test::stream const on;
  second_order_memory of;
  test::device_buffer<std::byte> const packet_bytes{std::vector<std::byte>(cuda::packet_bytes(2 * channels, 7))},
      work_bytes{std::vector<std::byte>(cuda::workspace_bytes(channels, limits))};
  test::device_buffer<double> const statistics{std::vector<double>(4 * channels)};
  test::device_buffer<std::int64_t> const count{std::vector<std::int64_t>(1)};
  cuda::packet_place const packet{packet_bytes.data()};
  cuda::workspace const work{work_bytes.data(), work_bytes.size()};
  cuda::saved_statistics const saved{statistics.data(), statistics.data() + 2 * channels, count.data()};
  auto const x = of.x_view;
  auto flat = x;
  flat.spatial = 1;
  auto flat_out = of.to_dy_view;
  flat_out.spatial = 1;
  fake_cuda::reset();
  auto const reduce = [&](auto const& u, auto const& dy, syncnorm::batch_norm_mask const& mask) {
    return test::thrown<syncnorm::invalid_argument_error>(
        [&] { kernels::double_backward_reduce({u}, dy, x, false, mask, saved, {}, packet, work, limits, on); });
  };
  auto const elemt = [&](auto const& to_dy, auto const& to_x, cuda::gathered_packets const& packets) {
    return test::thrown<syncnorm::invalid_argument_error>([&] {
      kernels::double_backward_elemt({}, x, x, to_dy, to_x, {}, {}, saved, packets, packet, {}, {}, limits, on);
    });
  };
  test::device_buffer<std::uint8_t> const counts{std::vector<std::uint8_t>(18)};
  syncnorm::batch_norm_mask const wide{syncnorm::mask_of(counts.data(), 3, 6)};
  CHECK(reduce(x, flat, {}) == "double_backward_reduce: dy has other extents than x");
  CHECK(reduce(flat, x, {}) == "double_backward_reduce: the gradient with respect to dx has other extents than x");
  CHECK(reduce(x, x, wide) == "double_backward_reduce: the mask has other extents than x");
  CHECK(elemt(flat_out, of.to_x_view, own_packet(packet)) ==
        "double_backward_elemt: the gradient to dy has other extents than x");
  CHECK(elemt(of.to_dy_view, of.to_dy_view, own_packet(packet)) ==
        "double_backward_elemt: the gradients to dy and x are the same memory");
  CHECK(elemt(of.to_dy_view, of.to_x_view, {}) == "double_backward_elemt: a packet is null or not aligned to 8 bytes");
  CHECK(fake_cuda::calls("kernel") == 0);
}
