#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <ops/pending_cases.hpp>
#include <support/throws.hpp>

namespace {

using invalid = syncnorm::invalid_argument_error;
using views = std::array<syncnorm::tensor_view<float>, 2>;
using const_views = std::array<syncnorm::tensor_view<float const>, 2>;
constexpr syncnorm::host::serial_executor one_thread_of_sizes{};

/// Two micro-batches of a sample each.
template <class Views, class V>
Views halves(V& values) {
  return {syncnorm::nchw(values.data(), 1, 2, 2), syncnorm::nchw(values.data() + 4, 1, 2, 2)};
}

} // namespace

TEST_CASE("parameters, gradients and statistics of a wrong size on one rank are an error on every rank") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17}, y(8), dx(8), good(2, 1.0F), three(3, 1.0F);
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 2, 2); };
    syncnorm::tensor_view<float const> const xs = view(x);
    std::span<float> const wrong = comm.rank() == 1 ? std::span{three} : std::span{good};
    auto const saved = syncnorm::batch_norm_forward<float>(one_thread_of_sizes, comm, xs, view(y));
    auto const refused = [&](std::string const& what, auto const& pass) {
      test::check_throws<invalid>(pass, {"rank 1", what + " has 3 elements, expected 2"});
    };
    using affine = syncnorm::affine_parameters<float>;
    auto const forward = [&](affine const& with, syncnorm::running_statistics<float> const& running = {}) {
      (void)syncnorm::batch_norm_forward<float>(one_thread_of_sizes, comm, xs, view(y), with, running);
    };
    refused("gamma", [&] { forward({wrong, {}}); });
    refused("beta", [&] { forward({{}, wrong}); });
    refused("running_mean", [&] { forward({}, {wrong, good, nullptr}); });
    refused("running_var", [&] { forward({}, {good, wrong, nullptr}); });
    auto const backward = [&](affine const& with, syncnorm::affine_gradients<float> const& gradients) {
      syncnorm::batch_norm_backward<float const>(one_thread_of_sizes, comm, xs, xs, view(dx), with, saved, gradients);
    };
    refused("gamma", [&] { backward({wrong, {}}, {}); });
    refused("beta", [&] { backward({{}, wrong}, {}); });
    refused("the gradient of gamma", [&] { backward({}, {wrong, {}}); });
    refused("the gradient of beta", [&] { backward({}, {{}, wrong}); });
    auto const twice = [&](syncnorm::batch_norm_second_order<float, float> const& second, affine const& with,
                           std::span<float> gradient) {
      syncnorm::batch_norm_double_backward<float>(one_thread_of_sizes, comm, second, xs, xs, with, saved, {}, view(dx),
                                                  gradient);
    };
    refused("gamma", [&] { twice({}, {wrong, {}}, {}); });
    refused("beta", [&] { twice({}, {{}, wrong}, {}); });
    refused("the gradient of gamma", [&] { twice({}, {}, wrong); });
    refused("the gradient with respect to that of gamma", [&] { twice({.gamma_gradient = wrong}, {}, {}); });
    refused("the gradient with respect to that of beta", [&] { twice({.beta_gradient = wrong}, {}, {}); });
  });
}

TEST_CASE("inference looks at all that it is given, and where it fails leaves no backward pass that waits for others") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    if (comm.rank() == 1) return;
    std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17}, y(8), dx(8), good(2, 1.0F), wrong(3, 1.0F);
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 2, 2); };
    syncnorm::tensor_view<float const> const xs = view(x);
    syncnorm::batch_norm_saved saved;
    auto const infer = [&](syncnorm::affine_parameters<float> const& with, std::span<float const> mean,
                           std::span<float const> var, double eps) {
      syncnorm::batch_norm_inference<float>(one_thread_of_sizes, xs, view(y), with, mean, var, eps, saved);
    };
    test::check_throws<invalid>([&] { infer({wrong, {}}, good, good, 1); }, {"gamma has 3"});
    test::check_throws<invalid>([&] { infer({{}, wrong}, good, good, 1); }, {"beta has 3"});
    test::check_throws<invalid>([&] { infer({}, wrong, good, 1); }, {"x has 2 channels, expected 3"});
    test::check_throws<invalid>([&] { infer({}, good, wrong, 1); }, {"var has 3"});
    test::check_throws<invalid>([&] { infer({}, good, good, -1); }, {"eps is -1"});
    test::check_throws<invalid>([&] { infer({}, good, good, std::numeric_limits<double>::infinity()); },
                                {"eps is inf"});
    test::check_throws<invalid>(
        [&] { syncnorm::batch_norm_backward<float const>(one_thread_of_sizes, comm, xs, xs, view(dx), {}, saved); },
        {"was there a forward pass?"});
  });
}

TEST_CASE("other numbers and extents of micro-batches' gradients are refused") {
  std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17}, y(8), dx(8), residual(8);
  auto const xs = halves<const_views>(x), residuals = halves<const_views>(residual);
  auto const ys = halves<views>(y), gradients = halves<views>(dx);
  std::array<syncnorm::batch_norm_epilogue<float>, 2> with{};
  with[0].residual = residuals[0], with[1].residual = residuals[1];
  syncnorm::batch_norm<float> layer{{}, 2};
  layer.forward(xs, ys, with);
  auto narrow = gradients;
  narrow[1].spatial = 1;
  test::check_throws<invalid>([&] { layer.backward(xs, xs, ys, with, std::span{gradients}.first(1)); },
                              {"there are 1 micro-batches of dresidual, expected 2"});
  test::check_throws<invalid>([&] { layer.backward(xs, xs, ys, with, narrow); }, {"dresidual[1] is [1, 2, 1]"});
  layer.backward(xs, xs, ys, with, gradients);

  using second_order = syncnorm::batch_norm_second_order_batches<float, float>;
  auto const one = std::span{xs}.first(1);
  auto const refused = [&](second_order const& second, std::span<syncnorm::tensor_view<float const> const> dy,
                           std::string const& part) {
    test::check_throws<invalid>([&] { layer.double_backward(second, xs, dy, {}, gradients, with); }, {part});
  };
  refused({.dx = one}, xs, "there are 1 micro-batches of the gradient with respect to dx");
  refused({.dresidual = one}, xs, "there are 1 micro-batches of the gradient with respect to dresidual");
  refused({}, one, "there are 1 micro-batches of dy");
  auto narrow_x = xs;
  narrow_x[1].spatial = 1;
  refused({.dresidual = narrow_x}, xs, "the gradient with respect to dresidual[1] is [1, 2, 1]");
}

TEST_CASE("a stride of an extent of 1 says nothing of what overlaps") {
  std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17};
  syncnorm::tensor_view<float> const one{x.data(), 1, 2, 4, 8, 4, 1}, other{x.data(), 1, 2, 4, 99, 4, 1};
  syncnorm::tensor_view<float const> const read = one;
  CHECK_NOTHROW(
      (void)syncnorm::batch_norm_forward<float>(one_thread_of_sizes, syncnorm::self_communicator{}, read, other));
}

TEST_CASE("only one of the running statistics is no pair, and a slope beyond float is none") {
  std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17}, y(8), two(2, 1.0F);
  auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 2, 2, 2); };
  syncnorm::tensor_view<float const> const xs = view(x);
  syncnorm::self_communicator const self;
  auto const forward = [&](syncnorm::running_statistics<float> const& running,
                           syncnorm::batch_norm_epilogue<float> const& with) {
    (void)syncnorm::batch_norm_forward<float>(one_thread_of_sizes, self, xs, view(y), {}, running, {}, with);
  };
  test::check_throws<invalid>([&] { forward({two, {}, nullptr}, {}); }, {"only one of running_mean and running_var"});
  test::check_throws<invalid>([&] { forward({}, {.activation = {1e300}}); }, {"that float holds"});
}

TEST_CASE("what is kept of a pass in place says itself what does not fit it") {
  std::vector<float> x{1, 2, 3, 5, 7, 11, 13, 17};
  auto const view = syncnorm::nchw(x.data(), 2, 2, 2);
  syncnorm::tensor_view<float const> const y = view;
  syncnorm::batch_norm_kept<float> kept;
  syncnorm::batch_norm_saved saved;
  saved.mean = {0, 0}, saved.inv_std = {1, 1};
  kept.keep<float>(y, {}, {});
  saved.mean = {0, 0, 0}, saved.inv_std = {1, 1, 1};
  CHECK(kept.recover(one_thread_of_sizes, y, view, saved, {}).find("the statistics have 3 channels") !=
        std::string::npos);
  saved.mean = {0, 0}, saved.inv_std = {1, 1};
  CHECK(kept.restore(one_thread_of_sizes, view, saved, {}).empty());
  auto const other = syncnorm::nchw(x.data(), 4, 2, 1);
  CHECK(kept.restore(one_thread_of_sizes, other, saved, {}).find("y is [4, 2, 1], expected [2, 2, 2]") !=
        std::string::npos);
}
