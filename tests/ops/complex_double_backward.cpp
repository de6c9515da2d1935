#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>

#include <ops/complex_host_case.hpp>
#include <ops/complex_second_order.hpp>
#include <ops/complex_step.hpp>
#include <support/noise.hpp>
#include <support/sanitized.hpp>
#include <support/throws.hpp>

namespace {

using syncnorm::gamma_numbers;
using syncnorm::thread_communicator;

/// What a layer of one thread or of several gives, of operands that are the same in float and in double.
template <class T, class E>
std::vector<std::complex<double>> second_order_of(E const& exec, std::int64_t spatial, bool nhwc, gamma_numbers gamma) {
  constexpr std::int64_t n = 4, channels = 37;
  using complex = std::complex<T>;
  auto const make = [&](std::uint64_t stream) {
    std::vector<complex> values(static_cast<std::size_t>(n * channels * spatial));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = {static_cast<float>(test::noise(stream, i)), static_cast<float>(test::noise(stream + 1, i))};
    return values;
  };
  auto x = make(1), dy = make(3), u = make(5), to_dy = make(7), to_x = make(9);
  auto const view = [&](std::vector<complex>& values) {
    return nhwc ? syncnorm::nhwc(values.data(), n, channels, spatial)
                : syncnorm::nchw(values.data(), n, channels, spatial);
  };
  std::vector<std::uint8_t> counts(static_cast<std::size_t>(n * spatial), 1);
  for (std::size_t i = 0; i < counts.size(); i += 3) counts[i] = 0;
  syncnorm::batch_norm_mask const mask{syncnorm::mask_of(counts.data(), n, spatial)};
  syncnorm::complex_batch_norm<T, syncnorm::self_communicator, E> layer{{}, channels, {}, exec, gamma};
  std::vector<T> const a(channels, T{0.5});
  if (gamma == gamma_numbers::complex) layer.gamma_imag()[0] = T{0.5}; // others are 0
  layer.forward(view(x), view(to_dy), mask);
  syncnorm::tensor_view<complex const> const of_u = view(u);
  layer.double_backward({.dx = {&of_u, 1}, .gamma_gradient = a}, view(x), view(dy), view(to_dy), view(to_x), mask);
  std::vector<std::complex<double>> all;
  for (auto const* const of : {&to_dy, &to_x}) all.insert(all.end(), of->begin(), of->end());
  for (T const value : layer.gamma_grad()) all.emplace_back(value);
  for (T const value : layer.gamma_imag_grad()) all.emplace_back(value);
  return all;
}

} // namespace

TEST_CASE_TEMPLATE("double backward of complex numbers agrees with differences of the oracle", T, double, float) {
  test::for_each_complex_second_order<T>([](test::complex_second_order_case<T> const& problem) {
    auto const ranks = problem.of.shares.size();
    std::vector<std::vector<std::string>> failures(ranks);
    syncnorm::run_ranks(static_cast<int>(ranks), [&](thread_communicator const& comm) {
      failures[static_cast<std::size_t>(comm.rank())] = test::check_complex_double_backward(problem, comm);
    });
    for (auto const& of_rank : failures)
      for (auto const& failure : of_rank) FAIL_CHECK(failure);
  });
}

TEST_CASE("double backward of long rows and of many channels of complex numbers is the same by any executor") {
  struct seven_threads : syncnorm::host::serial_executor {
    static int concurrency() { return 7; }
  };
  for (std::int64_t const spatial : {20, test::sanitized ? 300 : 2000})
    for (bool const nhwc : {false, true})
      for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex}) {
        auto const by_one = second_order_of<float>(syncnorm::host::serial_executor{}, spatial, nhwc, gamma);
        CHECK(by_one == second_order_of<float>(seven_threads{}, spatial, nhwc, gamma));
        // And that of the same elements in double, but for what some sums and products in float lose.
        auto const wide = second_order_of<double>(syncnorm::host::serial_executor{}, spatial, nhwc, gamma);
        double worst = 0;
        for (std::size_t i = 0; i < wide.size(); ++i) worst = std::max(worst, std::abs(by_one[i] - wide[i]));
        CHECK(worst < 2e-5);
      }
}

TEST_CASE_TEMPLATE("complex numbers that are written past the cache are those that are written through it", T,
                   float AND_UNSANITIZED(double)) {
  using complex = std::complex<T>;
  namespace host = syncnorm::host;
  constexpr std::int64_t n = 2, most = 8;
  for (auto const& extents : {std::pair{1, 400}, {16, 3}, {37, 9}, {200, 2}, {3, 64}})
    for (bool const nhwc : {false, true})
      for (std::int64_t const offset : {0, 1, 5})
        for (bool const masked : {false, true}) {
          std::int64_t const channels = extents.first, spatial = extents.second;
          auto const size = static_cast<std::size_t>(n * channels * spatial);
          auto const view = [&](std::vector<complex>& of, std::int64_t first = 0) {
            return nhwc ? syncnorm::nhwc(of.data() + first, n, channels, spatial)
                        : syncnorm::nchw(of.data() + first, n, channels, spatial);
          };
          auto const make = [&](std::uint64_t stream) {
            std::vector<complex> values(size + most);
            for (std::size_t i = 0; i < values.size(); ++i)
              values[i] = {static_cast<T>(test::noise(stream, i)), static_cast<T>(test::noise(stream + 1, i))};
            return values;
          };
          auto x = make(1), dy = make(3), u = make(5);
          std::vector<std::uint8_t> counts(static_cast<std::size_t>(n * spatial), 1);
          for (std::size_t i = 0; i < counts.size(); i += 3) counts[i] = masked ? 0 : 1;
          syncnorm::batch_norm_mask const mask{syncnorm::mask_of(counts.data(), n, spatial),
                                               syncnorm::masked_outputs::zero};
          std::vector<double> const mean(static_cast<std::size_t>(2 * channels), 0.25);
          auto const run = [&](host::stores how, bool turns) {
            std::array<std::vector<complex>, 4> out{make(7), make(7), make(7), make(7)};
            host::serial_executor const exec;
            T const imag = turns ? T{0.5} : T{0};
            host::normalize_complex<T>(
                exec, view(x), view(out[0], offset),
                [&](std::int64_t c) {
                  return host::complex_normalize_coefficients<T>{{T{0.5}, 1}, {static_cast<T>(c + 1), imag}, {1, 2}};
                },
                turns, mask, how);
            host::backward_elemt_complex<T>(
                exec, view(dy), view(x), view(out[1], offset),
                [&](std::int64_t c) {
                  return host::complex_backward_coefficients<T>{
                      {static_cast<T>(c + 1), imag}, {T{0.5}, 1}, {1, 2}, T{0.75}};
                },
                turns, false, mask, how);
            host::double_backward_elemt_complex(
                exec,
                host::complex_second_order_operands<T>{view(dy), view(x), view(u), view(out[2], offset),
                                                       view(out[3], offset), mask, turns},
                mean,
                [&](std::int64_t c) {
                  syncnorm::complex_second_order_coefficients k;
                  k.for_dy = {{static_cast<double>(c), imag}, {1, imag}, {2, 3}};
                  k.for_x = {{1, imag}, {2, -1}, 3, static_cast<double>(c)};
                  return k;
                },
                how);
            return out;
          };
          for (bool const turns : {false, true})
            CHECK(run(host::stores::streaming, turns) == run(host::stores::cached, turns));
        }
}

TEST_CASE("double backward of complex numbers without an exchange is that by sums of this rank alone") {
  using complex = std::complex<double>;
  for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex})
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      bool const first = comm.rank() == 0;
      auto const make = [](std::uint64_t stream) {
        std::vector<complex> values(2UL * 3 * 5);
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = {test::noise(stream, i), test::noise(stream + 1, i)};
        return values;
      };
      auto x = make(first ? 1 : 21), dy = make(3), u = make(5), y = make(7), to_dy = make(9), to_x = make(11);
      auto const view = [](std::vector<complex>& values) { return syncnorm::nchw(values.data(), 2, 3, 5); };
      syncnorm::complex_batch_norm<double, thread_communicator> layer{comm, 3, {}, {}, gamma};
      syncnorm::tensor_view<complex const> const of_u = view(u);
      syncnorm::complex_second_order<double> const second{.dx = {&of_u, 1}};
      auto const run = [&](bool exchange) {
        layer.zero_grad();
        layer.forward(view(x), view(y));
        layer.double_backward(second, view(x), view(dy), view(to_dy), view(to_x), {}, {.exchange = exchange});
        auto all = to_dy;
        all.insert(all.end(), to_x.begin(), to_x.end());
        all.insert(all.end(), layer.gamma_grad().begin(), layer.gamma_grad().end());
        return all;
      };
      auto const alone = run(false);
      if (!first) dy.assign(dy.size(), {}), u.assign(u.size(), {});
      auto const among_zeroes = run(true);
      if (first) CHECK(alone == among_zeroes);
    });
}

TEST_CASE("what is not given to double backward of complex numbers is not another times 0") {
  using complex = std::complex<double>;
  double const infinity = std::numeric_limits<double>::infinity();
  for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex}) {
    std::vector<complex> x{1, {2, 1}, {3, -1}, -2}, dy{0.5, {0, infinity}, -1, 2}, u{2, 1, -1, 3}, y(4), to_dy(4),
        to_x(4);
    std::vector<complex> const b{{0.75, -0.5}};
    auto const view = [](std::vector<complex>& values) { return syncnorm::nchw(values.data(), 2, 1, 2); };
    syncnorm::complex_batch_norm<double> layer{{}, 1, {}, {}, gamma};
    layer.forward(view(x), view(y));
    // Of the gradient of beta alone, which is linear in dy.
    layer.double_backward({.beta_gradient = b}, view(x), view(dy), view(to_dy), view(to_x));
    CHECK(to_dy == std::vector<complex>(4, b[0]));
    CHECK(to_x == std::vector<complex>(4));
    CHECK(layer.gamma_grad()[0] == 0);

    // By constant statistics dx is a multiple of dy alone.
    layer.eval();
    layer.running_var()[0] = 1 - 1e-5;
    layer.gamma()[0] = 2;
    x[1] = {infinity, 0};
    layer.forward(view(x), view(y));
    syncnorm::tensor_view<complex const> const of_u = view(u);
    layer.double_backward({.dx = {&of_u, 1}}, view(x), view(dy), view(to_dy), view(to_x));
    for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(to_dy[i] - 2.0 * u[i]) < 1e-12);
    CHECK(to_x == std::vector<complex>(4));
  }
  // An infinity in one part leaves the other as it is, where gamma is real.
  std::vector<complex> x{1, {2, 1}, {3, -1}, -2}, dy(4, 1), u{{infinity, 1}, 1, -1, 3}, y(4), to_dy(4), to_x(4);
  auto const view = [](std::vector<complex>& values) { return syncnorm::nchw(values.data(), 2, 1, 2); };
  syncnorm::complex_batch_norm<double> layer{{}, 1};
  layer.eval();
  layer.forward(view(x), view(y));
  syncnorm::tensor_view<complex const> const of_u = view(u);
  layer.double_backward({.dx = {&of_u, 1}}, view(x), view(dy), view(to_dy), view(to_x));
  CHECK(to_dy[0].real() == infinity);
  CHECK(std::abs(to_dy[0].imag() - 1) < 1e-5);
}

TEST_CASE("one output of double backward of complex numbers is what it is beside the other, and 0 where y is") {
  using complex = std::complex<float>;
  for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex}) {
    test::complex_step in{2};
    std::vector<complex> to_dy(in.x.size(), 7), to_x(in.x.size(), 7), one(in.x.size());
    auto const view = [](std::vector<complex>& values) { return test::complex_step::view(values, 2); };
    for (std::size_t i = 0; i < in.dy.size(); ++i) in.dy[i] = in.x[i] * in.x[i];
    for (std::size_t i = 0; i < in.counts.size(); i += 4) in.counts[i] = 0;
    syncnorm::batch_norm_mask const mask{
        syncnorm::mask_of(in.counts.data(), test::complex_step::samples, test::complex_step::spatial),
        syncnorm::masked_outputs::zero};
    syncnorm::complex_batch_norm<float> layer{{}, 2, {}, {}, gamma};
    layer.forward(in.x_view, in.y_view, mask);
    syncnorm::tensor_view<complex const> const u = in.y_view;
    syncnorm::complex_second_order<float> const second{.dx = {&u, 1}};
    layer.double_backward(second, in.x_view, in.dy_view, view(to_dy), view(to_x), mask);
    layer.double_backward(second, in.x_view, in.dy_view, view(one), {}, mask);
    CHECK(one == to_dy);
    layer.double_backward(second, in.x_view, in.dy_view, {}, view(one), mask);
    CHECK(one == to_x);
    CHECK(to_dy[0] == complex{});
    CHECK(to_x[0] == complex{});
    CHECK(to_x[1] != complex{});
  }
}

TEST_CASE("double backward of complex numbers of no micro-batches, or of no channels, is none") {
  syncnorm::complex_batch_norm<float> none{{}, 0}, negative{{}, -1};
  CHECK_NOTHROW(none.double_backward({}, std::span<decltype(none)::input const>{}, {}, {}, {}));
  test::check_throws<syncnorm::invalid_argument_error>(
      [&] { negative.double_backward({}, std::span<decltype(none)::input const>{}, {}, {}, {}); },
      {"batch_norm 2nd backward", "the number of channels is negative: -1"});
  syncnorm::complex_batch_norm<float> layer{{}, 2};
  layer.forward(std::span<decltype(layer)::input const>{}, {});
  CHECK_NOTHROW(layer.double_backward({}, std::span<decltype(layer)::input const>{}, {}, {}, {}));
  CHECK(layer.gamma_grad()[1] == 0);
}

TEST_CASE("what is wrong with double backward of complex numbers on one rank is an error on every rank") {
  using complex = std::complex<float>;
  using of_threads = syncnorm::complex_batch_norm<float, thread_communicator>;
  using syncnorm::invalid_argument_error;
  for (std::int64_t const channels : {3, 100})
    syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
      bool const wrong = comm.rank() == 1;
      test::complex_step in{channels};
      std::vector<complex> to_dy(in.x.size()), to_x(in.x.size());
      auto const of_dy = test::complex_step::view(to_dy, channels), of_x = test::complex_step::view(to_x, channels);
      of_threads layer{comm, channels};
      syncnorm::tensor_view<complex const> u = in.y_view;
      std::vector<float> const short_gamma(static_cast<std::size_t>(channels - 1));
      auto const c = std::to_string(channels);

      test::check_throws<invalid_argument_error>(
          [&] {
            layer.double_backward({.dx = {&u, 1}}, in.x_view, in.dy_view, of_dy, of_x);
          },
          {"batch_norm 2nd backward", "the saved statistics have 0 channels, expected " + c});
      layer.forward(in.x_view, in.y_view);
      auto const fails = [&](auto const& f, std::string const& part) {
        test::check_throws<invalid_argument_error>(f, {"batch_norm 2nd backward", "rank 1", part});
        CHECK(layer.gamma_grad()[0] == 0);
      };
      fails(
          [&] {
            auto part = u;
            if (wrong) part.samples = 1;
            layer.double_backward({.dx = {&part, 1}}, in.x_view, in.dy_view, of_dy, of_x);
          },
          "the gradient with respect to dx is [1, ");
      fails(
          [&] {
            layer.double_backward({.dx = {&u, 1}}, in.x_view, in.dy_view, wrong ? of_x : of_dy, of_x);
          },
          "the gradient to dy and the gradient to x overlap in memory");
      fails(
          [&] {
            layer.double_backward({.dx = {&u, 1}}, in.x_view, in.dy_view, of_dy, wrong ? in.x_view : of_x);
          },
          "the gradient to x and x overlap in memory");
      fails(
          [&] {
            syncnorm::complex_second_order<float> second{.dx = {&u, 1}};
            if (wrong) second.gamma_gradient = short_gamma;
            layer.double_backward(second, in.x_view, in.dy_view, of_dy, of_x);
          },
          "the gradient with respect to that of gamma has " + std::to_string(channels - 1));
      fails(
          [&] {
            syncnorm::complex_second_order<float> second{.dx = {&u, 1}};
            if (wrong) second.gamma_imag_gradient = layer.gamma();
            layer.double_backward(second, in.x_view, in.dy_view, of_dy, of_x);
          },
          "gamma is real, but there is a gradient of its imaginary part");
      fails(
          [&] {
            std::vector<of_threads::input> const us(wrong ? 2 : 1, u);
            of_threads::input const x = in.x_view, dy = in.dy_view;
            layer.double_backward({.dx = us}, {&x, 1}, {&dy, 1}, {&of_dy, 1}, {&of_x, 1});
          },
          "there are 2 micro-batches of the gradient with respect to dx, expected 1 as of x");
      fails(
          [&] {
            auto const part = [&](auto view) { return wrong ? view.sample_range(0, 2) : view; };
            auto const of_u = part(u);
            layer.double_backward({.dx = {&of_u, 1}}, part(in.x_view), part(in.dy_view), part(of_dy), part(of_x));
          },
          "x has 10 values per channel, in the forward pass 15");
      CHECK_NOTHROW(layer.double_backward({.dx = {&u, 1}}, in.x_view, in.dy_view, of_dy, of_x));

      // Ranks of which one has a complex gamma.
      of_threads other{comm, channels, {}, {}, wrong ? gamma_numbers::complex : gamma_numbers::real};
      test::check_throws<syncnorm::mismatch_error>(
          [&] {
            syncnorm::batch_norm_workspace workspace{2 * channels};
            syncnorm::complex_affine_parameters<float> affine{.gamma = other.gamma()};
            if (wrong) affine.gamma_imag = other.gamma_imag();
            of_threads::input const x = in.x_view, dy = in.dy_view;
            syncnorm::complex_batch_norm_double_backward<float>(
                syncnorm::host::serial_executor{}, comm, {.dx = {&u, 1}}, {&dy, 1}, {&x, 1}, affine, layer.saved(),
                {&of_dy, 1}, {&of_x, 1}, {}, {}, workspace);
          },
          {"batch_norm 2nd backward", "disagree on affine parameters", "rank 1 has 4"});
    });
}
