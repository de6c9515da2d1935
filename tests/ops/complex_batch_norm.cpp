#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/batch_norm_group.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>

#include <ops/complex_case.hpp>
#include <ops/complex_host_case.hpp>
#include <ops/complex_step.hpp>
#include <ops/grid_case.hpp>
#include <ops/micro_batches.hpp>
#include <ops/quick_communicator.hpp>
#include <support/noise.hpp>
#include <support/sanitized.hpp>

namespace {

using number = std::complex<float>;
using syncnorm::gamma_numbers;
using step = test::complex_step;
using test::layout;
using layer_type = syncnorm::complex_batch_norm<float, syncnorm::thread_communicator>;

template <class T>
void check_case(test::complex_case const& of) {
  auto const ranks = of.shares.size();
  std::vector<std::vector<std::string>> failures(ranks);
  syncnorm::run_ranks(static_cast<int>(ranks), [&](syncnorm::thread_communicator const& comm) {
    failures[static_cast<std::size_t>(comm.rank())] = test::run_complex_case<T>(of, comm);
  });
  for (auto const& of_rank : failures)
    for (auto const& failure : of_rank) FAIL_CHECK(failure);
}

std::vector<test::micro_batch_share> const shares{
    {{5}}, {{2, 3}}, {{4}, {4}}, {{1, 5, 2}, {3}, {0, 2}}, {{0, 0}, {2, 1, 1, 3}}, {{}, {2, 3}, {}}, {{0}, {7}, {1}}};

/// Of two threads.
struct two_threads {
  [[nodiscard]] static int concurrency() { return 2; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    std::atomic<std::int64_t> next = 0;
    auto const work = [&] {
      for (std::int64_t i = next++; i < n; i = next++) f(i);
    };
    std::jthread const other{work};
    work();
  }
};

} // namespace

TEST_CASE_TEMPLATE("complex batch norm over threads agrees with the oracle on the whole batch", T,
                   float AND_UNSANITIZED(double)) {
  std::size_t turn = 0;
  for (auto const& share : shares)
    for (auto const order : test::layouts)
      for (std::int64_t const channels : {1, 3, 70, 130}) {
        if (test::sanitized && turn % 3 != 0 && channels > 3) continue;
        std::int64_t const spatial = order == layout::nc ? 1 : channels == 3 ? 150 : 7; // rows that are long, and short
        test::complex_case of{share, channels, spatial, order};
        of.take_turn(turn);
        ++turn;
        check_case<T>(of);
      }
}

TEST_CASE("gradients of complex numbers are those of finite differences") {
  for (auto const masked : {0, 1, 2}) {
    test::complex_oracle oracle{
        3, 2, 4, std::vector<std::uint8_t>(12, 1), masked == 2, 1e-3L, masked == 1 ? 1.0L : 0.0L};
    if (masked != 0) oracle.counts[2] = oracle.counts[7] = oracle.counts[8] = 0;
    std::vector<test::wide_complex> x(24), dy(24);
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = {test::noise(1, i), 2 * test::noise(2, i)};
      dy[i] = {test::noise(3, i), test::noise(4, i)};
    }
    std::vector<test::wide_complex> gamma{{1.5L, 0.75L}, {-0.5L, masked == 0 ? 0 : -2.0L}};
    std::vector<test::wide_complex> beta{{0.5L, 1}, {-1, 2}};
    auto const loss = [&] {
      oracle.learn(x);
      auto const y = oracle.forward(x, gamma, beta);
      long double sum = 0;
      for (std::size_t i = 0; i < y.size(); ++i) sum += (std::conj(dy[i]) * y[i]).real();
      return sum;
    };
    static_cast<void>(loss());
    auto const gradients = oracle.backward(x, dy, gamma, 0, 3, false);
    // The error of a central difference is of the order of h², that of its rounding of that of 2⁻⁶⁴/h.
    constexpr long double h = 1e-6L, close = 1e-9L;
    auto const derivative = [&](auto& value, auto const by) {
      auto const middle = value;
      value = middle + by;
      long double const above = loss();
      value = middle - by;
      long double const below = loss();
      value = middle;
      return (above - below) / (2 * h);
    };
    for (std::size_t i = 0; i < x.size(); ++i) {
      CHECK(std::abs(derivative(x[i], test::wide_complex{h, 0}) - gradients.dx[i].real()) < close);
      CHECK(std::abs(derivative(x[i], test::wide_complex{0, h}) - gradients.dx[i].imag()) < close);
    }
    for (std::size_t c = 0; c < 2; ++c) {
      CHECK(std::abs(derivative(gamma[c], test::wide_complex{h, 0}) - gradients.gamma[c].real()) < close);
      CHECK(std::abs(derivative(gamma[c], test::wide_complex{0, h}) - gradients.gamma[c].imag()) < close);
      CHECK(std::abs(derivative(beta[c], test::wide_complex{h, 0}) - gradients.beta[c].real()) < close);
      CHECK(std::abs(derivative(beta[c], test::wide_complex{0, h}) - gradients.beta[c].imag()) < close);
    }
  }
}

TEST_CASE("numbers without imaginary parts are normalized as real ones are") {
  constexpr std::int64_t n = 6, channels = 4, spatial = 31;
  constexpr std::size_t size = n * channels * spatial;
  std::vector<double> x(size), y(size), dx(size);
  std::vector<std::complex<double>> z(size), of_z(size), dz(size);
  for (std::size_t i = 0; i < size; ++i) z[i] = x[i] = test::noise(1, i) + 3;
  syncnorm::batch_norm<double> real{{}, channels};
  syncnorm::complex_batch_norm<double> complex{{}, channels};
  real.forward(syncnorm::nchw<double const>(x.data(), n, channels, spatial),
               syncnorm::nchw(y.data(), n, channels, spatial));
  real.backward(syncnorm::nchw<double const>(x.data(), n, channels, spatial),
                syncnorm::nchw<double const>(y.data(), n, channels, spatial),
                syncnorm::nchw(dx.data(), n, channels, spatial));
  using view = syncnorm::tensor_view<std::complex<double> const>;
  view const read = syncnorm::nchw(z.data(), n, channels, spatial),
             read_y = syncnorm::nchw(of_z.data(), n, channels, spatial);
  complex.forward(read, syncnorm::nchw(of_z.data(), n, channels, spatial));
  complex.backward(read, read_y, syncnorm::nchw(dz.data(), n, channels, spatial));
  for (std::size_t i = 0; i < size; ++i) {
    CHECK(std::abs(of_z[i] - y[i]) < 1e-12);
    CHECK(std::abs(dz[i] - dx[i]) < 1e-12);
  }
  for (std::size_t c = 0; c < channels; ++c) {
    CHECK(std::abs(complex.running_var()[c] - real.running_var()[c]) < 1e-12);
    CHECK(std::abs(complex.gamma_grad()[c] - real.gamma_grad()[c]) < 1e-10);
  }
}

TEST_CASE("a complex gamma without imaginary parts is a real one, and another turns what that gives") {
  constexpr std::int64_t channels = 5;
  for (bool const trains : {true, false}) {
    step of_real{channels}, of_complex{channels}, of_turned{channels};
    syncnorm::complex_batch_norm<float> real{{}, channels}, complex{{}, channels, {}, {}, gamma_numbers::complex},
        turned{{}, channels, {}, {}, gamma_numbers::complex};
    CHECK(real.gamma_imag().empty());
    for (std::size_t c = 0; c < channels; ++c) {
      CHECK(complex.gamma_imag()[c] == 0);
      real.gamma()[c] = complex.gamma()[c] = turned.gamma_imag()[c] = static_cast<float>(c) - 1.5F;
      turned.gamma()[c] = 0;
    }
    auto const take = [&](auto& layer, step& in) {
      layer.train(trains);
      layer.forward(in.x_view, in.y_view);
      layer.backward(in.x_view, in.dy_view, in.dx_view);
    };
    take(real, of_real), take(complex, of_complex);
    constexpr number i{0, 1};
    for (auto& value : of_turned.dy) value *= i;
    take(turned, of_turned);
    for (std::size_t at = 0; at < of_real.y.size(); ++at) {
      CHECK(std::abs(of_complex.y[at] - of_real.y[at]) < 1e-5F);
      CHECK(std::abs(of_complex.dx[at] - of_real.dx[at]) < 1e-5F);
      CHECK(std::abs(of_turned.y[at] - i * of_real.y[at]) < 1e-5F);
      CHECK(std::abs(of_turned.dx[at] - of_real.dx[at]) < 1e-5F);
    }
    for (std::size_t c = 0; c < channels; ++c) {
      CHECK(std::abs(complex.gamma_grad()[c] - real.gamma_grad()[c]) < 1e-4F);
      CHECK(std::abs(turned.gamma_imag_grad()[c] - real.gamma_grad()[c]) < 1e-4F);
    }
    complex.zero_grad();
    CHECK(std::ranges::count(complex.gamma_imag_grad(), 0.0F) == channels);
  }
}

TEST_CASE("of what does not count, and by constant statistics, a complex gamma passes nothing on") {
  constexpr auto nan = std::numeric_limits<float>::quiet_NaN();
  step clean{3}, spoiled{3};
  spoiled.counts[4] = clean.counts[4] = 0;
  for (std::int64_t c = 0; c < 3; ++c) spoiled.x_view(0, c, 4) = spoiled.dy_view(0, c, 4) = nan;
  auto const take = [](step& in) {
    syncnorm::complex_batch_norm<float> layer{{}, 3, {}, {}, gamma_numbers::complex};
    std::ranges::fill(layer.gamma_imag(), 0.5F);
    syncnorm::batch_norm_mask const mask{syncnorm::mask_of(in.counts.data(), step::samples, step::spatial),
                                         syncnorm::masked_outputs::zero};
    layer.forward(in.x_view, in.y_view, mask);
    layer.backward(in.x_view, in.dy_view, in.dx_view, mask);
  };
  take(clean), take(spoiled);
  CHECK(spoiled.y == clean.y);
  CHECK(spoiled.dx == clean.dx);
  CHECK(clean.dx_view(0, 1, 4) == number{});

  syncnorm::complex_batch_norm<float> frozen{{}, 3, {}, {}, gamma_numbers::complex};
  std::ranges::fill(frozen.gamma_imag(), 0.5F);
  frozen.eval();
  frozen.forward(clean.x_view, clean.y_view);
  for (auto& value : clean.x) value = nan;
  frozen.backward(clean.x_view, clean.dy_view, clean.dx_view);
  for (auto const& value : clean.dx) CHECK(std::abs(value - number{1, -1} * number{1, -0.5F}) < 1e-4F);
}

TEST_CASE("equal complex numbers have exactly their mean, and no spread") {
  constexpr std::int64_t samples = 40;
  for (bool const nhwc : {false, true})
    for (std::int64_t const channels : {1, 3, 37})
      for (std::int64_t const spatial : {3, 100, 300}) {
        std::vector<std::complex<double>> x(static_cast<std::size_t>(samples * channels * spatial)), y(x.size());
        auto const view = [&](auto& of) {
          return nhwc ? syncnorm::nhwc(of.data(), samples, channels, spatial)
                      : syncnorm::nchw(of.data(), samples, channels, spatial);
        };
        auto const in = view(x);
        for (std::int64_t n = 0; n < samples; ++n)
          for (std::int64_t c = 0; c < channels; ++c)
            for (std::int64_t s = 0; s < spatial; ++s)
              in(n, c, s) = {9.7 + test::noise(1, static_cast<std::uint64_t>(c)), 0.1};
        syncnorm::complex_batch_norm<double> layer{{}, channels, {.norm = {.eps = 0}}};
        layer.forward(in, view(y));
        for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
          CHECK(layer.saved().inv_std[2 * c] == 0);
          CHECK(layer.saved().mean[2 * c] == 9.7 + test::noise(1, c));
          CHECK(layer.saved().mean[2 * c + 1] == 0.1);
        }
        CHECK(std::ranges::count(y, std::complex<double>{}) == std::ssize(y));
      }
}

TEST_CASE("windows that slide over complex numbers are read as what they are, and by any executor") {
  for (std::int64_t const channels : {2, 257}) {
    constexpr std::int64_t samples = 2, spatial = 9;
    std::vector<number> memory(static_cast<std::size_t>(samples * 300 + channels + spatial));
    for (std::size_t i = 0; i < memory.size(); ++i)
      memory[i] = {static_cast<float>(test::noise(1, i)), static_cast<float>(test::noise(2, i))};
    syncnorm::tensor_view<number const> const window{memory.data(), samples, channels, spatial, 300, 1, 1};
    std::vector<number> apart(static_cast<std::size_t>(samples * channels * spatial));
    auto const copy = syncnorm::nchw(apart.data(), samples, channels, spatial);
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::int64_t c = 0; c < channels; ++c)
        for (std::int64_t s = 0; s < spatial; ++s) copy(n, c, s) = window(n, c, s);
    auto const run = [&]<class E>(E const& exec, syncnorm::tensor_view<number const> x, gamma_numbers gamma) {
      std::vector<number> y(apart.size()), dx(apart.size());
      syncnorm::complex_batch_norm<float, syncnorm::self_communicator, E> layer{{}, channels, {}, exec, gamma};
      std::ranges::fill(layer.gamma_imag(), 0.5F);
      layer.forward(x, syncnorm::nchw(y.data(), samples, channels, spatial));
      layer.backward(x, x, syncnorm::nchw(dx.data(), samples, channels, spatial));
      y.insert(y.end(), dx.begin(), dx.end());
      return y;
    };
    for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex}) {
      auto const expected = run(syncnorm::host::serial_executor{}, copy, gamma);
      auto const serial = run(syncnorm::host::serial_executor{}, window, gamma),
                 parallel = run(two_threads{}, window, gamma);
      CHECK(parallel == serial);
      for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(serial[i] - expected[i]) < 1e-5F);
    }
  }
}

TEST_CASE("of a number that is infinite in one part, a real gamma leaves the other as it is") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  for (bool const nhwc : {false, true})
    for (std::int64_t const spatial : {5, 200}) {
      constexpr std::int64_t samples = 2, channels = 3;
      std::vector<number> x(static_cast<std::size_t>(samples * channels * spatial), {2, 3}), y(x.size()), dx(x.size());
      auto const view = [&](std::vector<number>& of) {
        return nhwc ? syncnorm::nhwc(of.data(), samples, channels, spatial)
                    : syncnorm::nchw(of.data(), samples, channels, spatial);
      };
      auto const in = view(x), out = view(y), gradient = view(dx);
      in(1, 2, 3) = {inf, 3};
      in(0, 1, 4) = {2, -inf};
      syncnorm::complex_batch_norm<float> layer{{}, channels};
      layer.eval();
      layer.forward(in, out);
      layer.backward(in, in, gradient);
      for (auto const& of : {out, gradient}) {
        CHECK(of(1, 2, 3).real() == inf);
        CHECK(std::abs(of(1, 2, 3).imag() - 3) < 1e-3F);
        CHECK(of(0, 1, 4).imag() == -inf);
        CHECK(std::abs(of(0, 1, 4).real() - 2) < 1e-3F);
      }
    }
}

TEST_CASE("passes over complex numbers in two phases, and in a group with real ones, are those at once") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
      constexpr std::int64_t channels = 70;
      auto const gamma = policy == syncnorm::exchange_policy::gather ? gamma_numbers::real : gamma_numbers::complex;
      syncnorm::batch_norm_layer_options const options{.norm = {.exchange = policy}};
      layer_type at_once{comm, channels, options, {}, gamma}, begun{comm, channels, options, {}, gamma},
          grouped{comm, channels, options, {}, gamma};
      for (auto* const layer : {&at_once, &begun, &grouped}) std::ranges::fill(layer->gamma_imag(), -0.75F);
      syncnorm::batch_norm<float, syncnorm::thread_communicator> real{comm, 2 * channels, options},
          real_grouped{comm, 2 * channels, options};
      step of{channels}, of_begun{channels}, of_group{channels};
      std::vector<float> u(of.x.size() * 2, 0), v(u), du(u), v_grouped(u), du_grouped(u);
      for (std::size_t i = 0; i < u.size(); ++i) u[i] = static_cast<float>(test::noise(9, i));
      auto const real_view = [&](std::vector<float>& values) {
        return syncnorm::nchw(values.data(), step::samples, 2 * channels, step::spatial);
      };
      syncnorm::batch_norm_group group{comm};
      for (int turn = 0; turn < 2; ++turn) {
        at_once.forward(of.x_view, of.y_view);
        at_once.backward(of.x_view, of.dy_view, of.dx_view);
        real.forward(real_view(u), real_view(v));
        real.backward(real_view(u), real_view(u), real_view(du));
        begun.begin_forward(of_begun.x_view, of_begun.y_view).finish();
        begun.begin_backward(of_begun.x_view, of_begun.dy_view, of_begun.dx_view).finish();
        group.run(syncnorm::passes(grouped.plan_forward(of_group.x_view, of_group.y_view),
                                   real_grouped.plan_forward(real_view(u), real_view(v_grouped))));
        group.run(syncnorm::passes(grouped.plan_backward(of_group.x_view, of_group.dy_view, of_group.dx_view),
                                   real_grouped.plan_backward(real_view(u), real_view(u), real_view(du_grouped))));
      }
      for (auto const* const other : {&of_begun, &of_group}) {
        CHECK(other->y == of.y);
        CHECK(other->dx == of.dx);
      }
      for (auto const* const other : {&begun, &grouped}) {
        CHECK(std::ranges::equal(other->running_mean(), at_once.running_mean()));
        CHECK(std::ranges::equal(other->running_var(), at_once.running_var()));
        CHECK(std::ranges::equal(other->gamma_grad(), at_once.gamma_grad()));
        CHECK(std::ranges::equal(other->gamma_imag_grad(), at_once.gamma_imag_grad()));
        CHECK(std::ranges::equal(other->beta_grad(), at_once.beta_grad()));
      }
      CHECK(v_grouped == v);
      CHECK(du_grouped == du);
    });
}

TEST_CASE("large layers of complex numbers are exchanged in parts, and give the same by any executor") {
  for (auto const order : {layout::nchw, layout::nhwc}) {
    test::complex_case of{{{2, 1}, {2}}, 37, test::sanitized ? 1000 : 3000, order};
    for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex}) {
      if (test::sanitized && (order == layout::nchw) != (gamma == gamma_numbers::complex)) continue;
      of.gamma = gamma;
      std::vector<std::vector<std::string>> failures(2);
      syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
        failures[static_cast<std::size_t>(comm.rank())] =
            test::run_complex_case<float>(of, test::quick_communicator{comm, 0});
      });
      for (auto const& of_rank : failures)
        for (auto const& failure : of_rank) FAIL_CHECK(failure);
    }
  }
  auto const run = []<class E>(E const& exec, std::int64_t spatial, bool nhwc, gamma_numbers gamma) {
    constexpr std::int64_t n = 4, channels = 37;
    std::vector<number> x(static_cast<std::size_t>(n * channels * spatial)), y(x.size()), dx(x.size());
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = {static_cast<float>(test::noise(1, i)), static_cast<float>(test::noise(2, i))};
    auto const view = [&](auto& values) {
      return nhwc ? syncnorm::nhwc(values.data(), n, channels, spatial)
                  : syncnorm::nchw(values.data(), n, channels, spatial);
    };
    syncnorm::complex_batch_norm<float, syncnorm::self_communicator, E> layer{{}, channels, {}, exec, gamma};
    if (gamma == gamma_numbers::complex) layer.gamma_imag()[0] = 0.5F; // others are 0
    layer.forward(view(x), view(y));
    layer.backward(view(x), view(y), view(dx));
    return std::pair{y, dx};
  };
  for (std::int64_t const spatial : {20, test::sanitized ? 500 : 2000})
    for (bool const nhwc : {false, true})
      for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex})
        CHECK(run(two_threads{}, spatial, nhwc, gamma) == run(syncnorm::host::serial_executor{}, spatial, nhwc, gamma));
}

TEST_CASE("layers of complex numbers without parameters or running statistics, with gamma alone, and frozen") {
  constexpr std::int64_t channels = 3;
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    step full{channels}, other{channels};
    layer_type plain{comm, channels, {.affine = false, .track_running_stats = false}}, layer{comm, channels};
    layer.forward(full.x_view, full.y_view);
    plain.forward(other.x_view, other.y_view);
    CHECK(other.y == full.y);
    layer.backward(full.x_view, full.dy_view, full.dx_view);
    plain.backward(other.x_view, other.dy_view, other.dx_view);
    CHECK(other.dx == full.dx);
    CHECK((plain.gamma().empty() && plain.beta_grad().empty() && plain.running_mean().empty()));
    plain.eval(); // by its own batch, on this rank
    plain.forward(other.x_view, other.y_view);
    CHECK(plain.saved().scope == syncnorm::statistics_scope::this_rank);

    layer_type gamma_alone{comm, channels, {.parts = syncnorm::affine_parts::gamma}};
    gamma_alone.forward(other.x_view, other.y_view);
    gamma_alone.backward(other.x_view, other.dy_view, other.dx_view);
    CHECK(other.dx == full.dx);
    CHECK(gamma_alone.beta().empty());
    CHECK(std::ranges::equal(gamma_alone.gamma_grad(), layer.gamma_grad()));

    // Frozen, training is evaluation, and the gradient of x alone reads no x.
    layer.freeze_statistics();
    layer.forward(full.x_view, full.y_view);
    layer.backward(full.x_view, full.dy_view, full.dx_view);
    layer.eval();
    layer.forward(other.x_view, other.y_view);
    layer.backward(other.x_view, other.dy_view, other.dx_view);
    CHECK(other.y == full.y);
    CHECK(other.dx == full.dx);
    CHECK(layer.num_batches_tracked() == 1);
    layer.reset_running_stats();
    CHECK(layer.num_batches_tracked() == 0);
    CHECK(layer.running_mean()[0] == number{0});
    CHECK(layer.running_var()[0] == 1);
  });
}

TEST_CASE("y over x, and dx over dy, of complex numbers") {
  for (auto const gamma : {gamma_numbers::real, gamma_numbers::complex}) {
    step apart{5}, within{5};
    syncnorm::complex_batch_norm<float> one{{}, 5, {}, {}, gamma}, other{{}, 5, {}, {}, gamma};
    one.forward(apart.x_view, apart.y_view);
    one.backward(apart.x_view, apart.dy_view, apart.dx_view);
    other.forward(within.x_view, within.y_view);
    other.backward(within.x_view, within.dy_view, within.dy_view);
    CHECK(within.dy == apart.dx);
    other.forward(within.x_view, within.x_view);
    CHECK(within.x == apart.y);
    // Of a micro-batch the gradient may not be wanted.
    std::array<syncnorm::tensor_view<std::complex<float> const>, 1> const x{apart.x_view}, dy{apart.dy_view};
    std::array<syncnorm::tensor_view<std::complex<float>>, 1> const none{};
    std::vector<float> const before(one.gamma_grad().begin(), one.gamma_grad().end());
    one.backward(x, dy, none);
    for (std::size_t c = 0; c < before.size(); ++c) CHECK(one.gamma_grad()[c] == 2 * before[c]);
  }
}
