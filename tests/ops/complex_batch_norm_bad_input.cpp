#include <doctest/doctest.h>

#include <complex>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>

#include <ops/complex_step.hpp>
#include <support/failing_executor.hpp>
#include <support/message_of.hpp>
#include <support/throws.hpp>

namespace {

using number = std::complex<float>;
using syncnorm::gamma_numbers;
using step = test::complex_step;
using layer_type = syncnorm::complex_batch_norm<float, syncnorm::thread_communicator>;

/// A step that `spoil` spoils on rank 1, after a good one and as the first: an error on every rank, after which a good one is taken.
void check_spoiled(bool in_backward, auto const& spoil, std::string const& part) {
  for (std::int64_t const channels : {3, 100})
    for (bool const good_before : {true, false})
      syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
        layer_type layer{comm, channels};
        step good{channels}, bad{channels};
        auto const take = [&](step& in) {
          layer.forward(in.x_view, in.y_view, in.mask);
          layer.backward(in.x_view, in.dy_view, in.dx_view, in.mask);
        };
        if (good_before) take(good);
        if (in_backward) layer.forward(bad.x_view, bad.y_view);
        auto const state = [&] {
          return std::pair{std::vector<number>(layer.running_mean().begin(), layer.running_mean().end()),
                           std::vector<number>(layer.beta_grad().begin(), layer.beta_grad().end())};
        };
        auto const before = state();
        if (comm.rank() == 1) spoil(bad);
        test::check_throws<syncnorm::invalid_argument_error>(
            [&] {
              if (in_backward)
                layer.backward(bad.x_view, bad.dy_view, bad.dx_view, bad.mask);
              else
                layer.forward(bad.x_view, bad.y_view, bad.mask);
            },
            {part, "rank 1", in_backward ? "batch_norm backward" : "batch_norm forward"});
        CHECK(state() == before);
        take(good);
      });
}

} // namespace

TEST_CASE("what is wrong with complex numbers on one rank is an error on every rank") {
  check_spoiled(
      false, [](step& in) { in.x_view.data = nullptr; }, "x is null");
  check_spoiled(
      false, [](step& in) { in.y_view.data = nullptr; }, "y is null");
  check_spoiled(
      false, [](step& in) { in.x_view.channels = 2; }, "x has 2 channels");
  check_spoiled(
      false, [](step& in) { in.y_view.spatial = 4; }, "expected [3, ");
  check_spoiled(
      false, [](step& in) { in.x_view.samples = -1; }, "negative extent");
  check_spoiled(
      false, [](step& in) { in.y_view.stride_n = 0; }, "y has the strides");
  check_spoiled(
      false, [](step& in) { in.y_view = in.x_view, ++in.y_view.data; }, "y and x overlap");
  check_spoiled(
      false, [](step& in) { in.mask = {syncnorm::mask_of(in.counts.data(), 1, 5)}; }, "the mask is [1, 5]");
  check_spoiled(
      true, [](step& in) { in.dy_view.data = nullptr; }, "dy is null");
  check_spoiled(
      true, [](step& in) { in.dx_view.spatial = 4; }, "dx is [3, ");
  check_spoiled(
      true, [](step& in) { in.x_view.samples = in.dy_view.samples = in.dx_view.samples = 2; }, "x has 10 values");
  check_spoiled(
      true, [](step& in) { in.dx_view = in.dy_view, --in.dx_view.data; }, "dx and dy overlap");
}

TEST_CASE("what is wrong with a complex gamma is said") {
  constexpr std::size_t channels = 3;
  step in{channels};
  syncnorm::batch_norm_saved saved;
  syncnorm::batch_norm_workspace workspace{2 * channels};
  std::vector<float> const two(2, 1), three(channels, 1);
  std::vector<float> gradient(channels);
  using view = syncnorm::tensor_view<number>;
  using read = syncnorm::tensor_view<number const>;
  read const x = in.x_view, dy = in.dy_view;
  auto const forward = [&](std::span<float const> gamma_imag) {
    syncnorm::complex_batch_norm_forward<float>(syncnorm::host::serial_executor{}, syncnorm::self_communicator{},
                                                std::span{&x, 1}, std::span<view const>{&in.y_view, 1},
                                                {.gamma_imag = gamma_imag}, {}, {}, saved, workspace);
  };
  auto const backward = [&](std::span<float const> gamma_imag, std::span<float> of_gamma_imag) {
    syncnorm::complex_batch_norm_backward<float>(syncnorm::host::serial_executor{}, syncnorm::self_communicator{},
                                                 std::span{&dy, 1}, std::span{&x, 1},
                                                 std::span<view const>{&in.dx_view, 1}, {.gamma_imag = gamma_imag},
                                                 saved, {.gamma_imag = of_gamma_imag}, {}, workspace);
  };
  auto const expect = [](std::string const& message, char const* part) {
    CHECK_MESSAGE(test_support::contains(message, part), message);
  };
  expect(test_support::message_of([&] { forward(two); }), "the imaginary part of gamma has 2 elements, expected 3");
  forward(three);
  expect(test_support::message_of([&] { backward(two, {}); }),
         "the imaginary part of gamma has 2 elements, expected 3");
  expect(test_support::message_of([&] { backward(three, std::span{gradient}.first(1)); }),
         "the gradient of the imaginary part of gamma has 1 elements, expected 3");
  expect(test_support::message_of([&] { backward({}, gradient); }),
         "gamma is real, but the gradient of its imaginary part");
  backward(three, gradient);
}

TEST_CASE("ranks that disagree on complex numbers hear of it") {
  auto const run = [](auto const& on_rank_1) {
    std::vector<std::string> messages(2);
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      auto const forward = [&](auto&& layer, step& in) { layer.forward(in.x_view, in.y_view); };
      messages[static_cast<std::size_t>(comm.rank())] = test_support::message_of<syncnorm::mismatch_error>([&] {
        step in{4};
        if (comm.rank() == 1)
          on_rank_1(comm, in);
        else
          forward(layer_type{comm, 4}, in);
      });
    });
    CHECK(messages[0] == messages[1]);
    return messages[0];
  };
  auto const real = run([](auto const& comm, step& in) {
    syncnorm::batch_norm<float, syncnorm::thread_communicator> layer{comm, 8};
    auto* const x = reinterpret_cast<float*>(in.x.data());
    auto* const y = reinterpret_cast<float*>(in.y.data());
    layer.forward(syncnorm::nchw<float const>(x, 3, 8, 5), syncnorm::nchw(y, 3, 8, 5));
  });
  CHECK_MESSAGE(test_support::contains(real, "complex float"), real);
  auto const gamma = run([](auto const& comm, step& in) {
    layer_type layer{comm, 4, {}, {}, gamma_numbers::complex};
    layer.forward(in.x_view, in.y_view);
  });
  CHECK_MESSAGE(test_support::contains(gamma, "affine parameters: rank 0 has 3, rank 1 has 7"), gamma);
  auto const eps = run([](auto const& comm, step& in) {
    layer_type layer{comm, 4, {.norm = {.eps = 1}}};
    layer.forward(in.x_view, in.y_view);
  });
  CHECK_MESSAGE(test_support::contains(eps, "eps"), eps);
  auto const channels = run([](auto const& comm, step&) {
    step in{3};
    layer_type layer{comm, 3};
    layer.forward(in.x_view, in.y_view);
  });
  CHECK_MESSAGE(test_support::contains(channels, "rank 1 has"), channels);
}

TEST_CASE("one complex number over all ranks is no batch, and none is none") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    layer_type layer{comm, 1};
    std::vector<number> values(1, {1, 2}), y(1);
    auto const view = [&](auto& of, std::int64_t n) { return syncnorm::nchw(of.data(), n, 1, 1); };
    auto const message =
        test_support::message_of([&] { layer.forward(view(values, comm.rank()), view(y, comm.rank())); });
    CHECK_MESSAGE(test_support::contains(message, "more than 1 value"), message);
    layer.forward(view(values, 0), view(y, 0));
    layer.backward(view(values, 0), view(values, 0), view(y, 0));
    CHECK(layer.num_batches_tracked() == 0);
    CHECK(layer.running_var()[0] == 1);
  });
}

TEST_CASE("a backward pass of complex numbers without its forward pass is an error, and so is an executor's") {
  step in{3};
  syncnorm::complex_batch_norm<float> layer{{}, 3};
  auto const message = test_support::message_of([&] { layer.backward(in.x_view, in.dy_view, in.dx_view); });
  CHECK_MESSAGE(test_support::contains(message, "was there a forward pass?"), message);
  syncnorm::complex_batch_norm<float> negative{{}, -1};
  for (bool const training : {true, false}) {
    negative.train(training);
    auto const of_none =
        test_support::message_of([&] { negative.forward(std::span<syncnorm::tensor_view<number const> const>{}, {}); });
    CHECK_MESSAGE(test_support::contains(of_none, "channels is negative: -1"), of_none);
  }
  for (int failing = 1; failing <= 2; ++failing) {
    int uses = 0;
    syncnorm::complex_batch_norm<float, syncnorm::self_communicator, test::failing_executor> failed{
        {}, 3, {}, {&uses, failing}};
    auto const thrown = test_support::thrown([&] { failed.forward(in.x_view, in.y_view); });
    if (thrown.empty()) continue;
    CHECK(thrown == "no threads");
    CHECK(failed.num_batches_tracked() == 0);
    CHECK_FALSE(test_support::thrown([&] { failed.backward(in.x_view, in.dy_view, in.dx_view); }).empty());
  }
}
