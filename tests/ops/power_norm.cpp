#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/compiled_primitives.hpp>

#include <ops/power_norm_run.hpp>
#include <support/sanitized.hpp>
#include <support/throws.hpp>

namespace {

/// A number in binary16, made of a number or, as an int, of bits.
struct bits_or_number {
  syncnorm::float16 value;

  bits_or_number() = default;
  explicit bits_or_number(float number) : value{number} {}
  explicit bits_or_number(int bits) : value{syncnorm::float16::from_bits(static_cast<std::uint16_t>(bits))} {}
  explicit operator float() const { return static_cast<float>(value); }
};

} // namespace

template <>
struct syncnorm::element_traits<bits_or_number> : syncnorm::element_traits<syncnorm::float16> {};

namespace {

template <class T>
void check_run(test::power_norm_case const& c) {
  test::power_norm_data<T> const data{c};
  std::vector<std::vector<std::string>> failures(static_cast<std::size_t>(c.cell.ranks));
  syncnorm::run_ranks(c.cell.ranks, [&](syncnorm::thread_communicator const& comm) {
    failures[static_cast<std::size_t>(comm.rank())] = test::run_power_norm(data, comm);
  });
  for (auto const& of_rank : failures)
    for (auto const& failure : of_rank) FAIL_CHECK(failure);
}

} // namespace

TEST_CASE_TEMPLATE("power norm over threads is the reference on the whole batch, at every step", T,
                   float AND_UNSANITIZED(double)) {
  for (int const ranks : {1, 2, 3, 4, 7}) test::for_each_power_norm_case(ranks, check_run<T>);
}

TEST_CASE_TEMPLATE("power norm of one rank needs no group", T, float AND_UNSANITIZED(double)) {
  for (auto const order : test::layouts) {
    test::power_norm_case c{{1, 6, 4, order == test::layout::nc ? 1 : 9, test::partition::even, order}};
    c.groups = 3;
    test::power_norm_data<T> const data{c};
    for (auto const& failure : test::run_power_norm(data, syncnorm::self_communicator{})) FAIL_CHECK(failure);
  }
}

TEST_CASE("parameters of one's own type begin with 1 and 0, whatever else it is made of") {
  syncnorm::power_norm<bits_or_number, syncnorm::self_communicator, syncnorm::host::serial_executor, bits_or_number>
      layer{{}, 1};
  CHECK(static_cast<float>(layer.gamma()[0]) == 1);
  CHECK(static_cast<float>(layer.beta()[0]) == 0);
  CHECK(static_cast<float>(layer.running_phi()[0]) == 1);
}

TEST_CASE_TEMPLATE("power norm of 16-bit elements is that of the same elements in float, rounded", T,
                   syncnorm::bfloat16 AND_UNSANITIZED(syncnorm::float16)) {
  using syncnorm::thread_communicator;
  constexpr double rounding = std::is_same_v<T, syncnorm::float16> ? 0x1p-11 : 0x1p-8; // of the last bit that is kept
  for (auto const order : {test::layout::nchw, test::layout::nhwc})
    for (std::int64_t const groups : {0, 2})
      syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
        // One rank has no samples; the warm-up ends after two of the four steps.
        std::int64_t const samples = comm.rank() == 1 ? 0 : 2 + comm.rank(), channels = 6, spatial = 7;
        syncnorm::power_norm_layer_options const options{.norm = {.warmup_iters = 2, .groups = groups}};
        syncnorm::power_norm<T, thread_communicator> layer{comm, channels, options};
        syncnorm::power_norm<float, thread_communicator> twin{comm, channels, options};
        auto const make = [&]<class V>(V) { return test::owned_tensor<V>{order, samples, channels, spatial}; };
        auto x = make(T{}), dy = make(T{}), out = make(T{});
        auto wide_x = make(0.0F), wide_dy = make(0.0F), wide_out = make(0.0F);
        std::vector<std::uint8_t> mask(static_cast<std::size_t>(samples * spatial), 1);
        for (std::size_t i = 0; i < mask.size(); i += 3) mask[i] = 0;
        auto const each = [&](auto const& f) {
          for (std::int64_t n = 0; n < samples; ++n)
            for (std::int64_t c = 0; c < channels; ++c)
              for (std::int64_t s = 0; s < spatial; ++s) f(n, c, s);
        };
        auto const compare = [&] {
          each([&](auto n, auto c, auto s) {
            double const expected = wide_out.view(n, c, s);
            double const error = std::abs(syncnorm::as_double(out.view(n, c, s)) - expected);
            CHECK(error <= rounding * std::abs(expected) + 1e-5);
          });
        };
        std::uint64_t drawn = static_cast<std::uint64_t>(comm.rank()) << 20;
        for (int step = 0; step < 4; ++step) {
          each([&](auto n, auto c, auto s) {
            x.view(n, c, s) = syncnorm::from_double<T>(test::noise(1, ++drawn));
            dy.view(n, c, s) = syncnorm::from_double<T>(test::noise(2, drawn));
            wide_x.view(n, c, s) = static_cast<float>(x.view(n, c, s));
            wide_dy.view(n, c, s) = static_cast<float>(dy.view(n, c, s));
          });
          auto const counts = syncnorm::mask_of(mask.data(), samples, spatial);
          layer.forward(x.view, out.view, counts);
          twin.forward(wide_x.view, wide_out.view, counts);
          compare();
          layer.backward(x.view, dy.view, out.view);
          twin.backward(wide_x.view, wide_dy.view, wide_out.view);
          compare();
        }
        double const terms = 4.0 * static_cast<double>(samples * spatial); // of a gradient of gamma
        for (std::size_t c = 0; c < static_cast<std::size_t>(channels); ++c) {
          CHECK(std::abs(layer.running_phi()[c] - twin.running_phi()[c]) <= 1e-5 * twin.running_phi()[c]);
          CHECK(std::abs(layer.ema_gz()[c] - twin.ema_gz()[c]) <= 1e-5);
          CHECK(std::abs(layer.gamma_grad()[c] - twin.gamma_grad()[c]) <= 1e-5 * terms);
        }
      });
}

TEST_CASE("power norm looks at sizes and options in every pass, and ranks at which step a backward pass is of") {
  using syncnorm::thread_communicator;
  using invalid = syncnorm::invalid_argument_error;
  constexpr syncnorm::host::serial_executor serial{};
  syncnorm::run_ranks(
      2,
      [&](thread_communicator const& comm) {
        bool const here = comm.rank() == 1;
        std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17}, y(8), dx(8), phi(2, 1.0F), ema(2), three(3);
        auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 2, 2); };
        syncnorm::tensor_view<float const> const xs = view(x);
        syncnorm::power_norm<float, thread_communicator> layer{comm, 2};
        layer.forward(xs, view(y));
        auto const first = layer.saved();
        layer.forward(xs, view(y));
        test::check_throws<syncnorm::mismatch_error>(
            [&] {
              layer.backward(here ? layer.saved() : first, xs, xs, view(dx));
              layer.synchronize();
            },
            {"the step: rank 0 has 1, rank 1 has 2"});

        syncnorm::power_norm_saved saved;
        auto const infer = [&](syncnorm::power_norm_options const& options) {
          syncnorm::power_norm_inference<float, float>(serial, xs, view(y), {}, phi, options, saved);
        };
        infer({});
        test::check_throws<invalid>([&] { infer({.eps = -1}); }, {"eps is -1"});
        CHECK(saved.pass == nullptr);

        syncnorm::power_norm_workspace<thread_communicator, float> workspace{2};
        std::int64_t iters = 0;
        syncnorm::power_norm_state<float> state{phi, ema, &iters};
        syncnorm::power_norm_forward<float, float>(serial, comm, xs, view(y), {}, {}, state, {}, saved, workspace);
        auto const backward = [&](syncnorm::power_norm_options const& options, std::span<float> beta) {
          syncnorm::power_norm_backward<float const, float>(serial, comm, xs, xs, view(dx), {}, state, options, saved,
                                                            {{}, beta}, workspace);
          workspace.synchronize();
        };
        test::check_throws<invalid>([&] { backward({}, here ? std::span{three} : std::span{ema}); },
                                    {"rank 1", "the gradient of beta has 3"});
        test::check_throws<invalid>([&] { backward({.eps = here ? -1 : 1e-5}, {}); }, {"rank 1", "eps is -1"});
      },
      std::chrono::seconds{2});
}
