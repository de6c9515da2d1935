#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <simt/ranks.hpp>
#include <support/second_order_case.hpp>

namespace {

using namespace syncnorm;
using namespace test;

/// A double backward pass on ranks in the interpreter, by statistics of the oracle, against differences of its loss.
template <class T, bool Epilogue>
void check_double_backward(second_order_case problem, arrangement order, int multiprocessors = 2) {
  using A = accumulate_t<T>;
  using P = A;
  auto const channels = problem.channels, spatial = problem.spatial;
  auto const round = [](std::vector<double>& values) {
    for (double& each : values) each = static_cast<double>(static_cast<A>(T(static_cast<A>(each))));
  };
  round(problem.x), round(problem.dy), round(problem.u), round(problem.v), round(problem.residual),
      round(problem.gamma), round(problem.beta), round(problem.a), round(problem.b);
  auto const statistics = problem.oracle();
  std::deque<rank_memory<P>> ranks;
  std::deque<tensor<T>> xs, dys, us, vs, residuals, to_dys, to_xs;
  std::deque<batch_norm_epilogue<T>> epilogues;
  std::deque<std::vector<P>> as, bs;
  for (std::size_t r = 0; r < problem.shares.size(); ++r) {
    auto const n = problem.shares[r], first = problem.first_of(r);
    auto const part = [&](std::vector<double> const& values) {
      std::vector<T> of_rank;
      for (auto i = first * channels * spatial; i < (first + n) * channels * spatial; ++i)
        of_rank.push_back(T(static_cast<A>(values[static_cast<std::size_t>(i)])));
      return tensor<T>{order, n, channels, spatial, of_rank};
    };
    auto& rank = ranks.emplace_back(channels, static_cast<int>(problem.shares.size()), 7);
    xs.push_back(part(problem.x)), dys.push_back(part(problem.dy)), us.push_back(part(problem.u));
    vs.push_back(part(problem.v)), residuals.push_back(part(problem.residual));
    to_dys.emplace_back(order, n, channels, spatial), to_xs.emplace_back(order, n, channels, spatial);
    auto const length = static_cast<std::size_t>(channels);
    auto const of_rank = [&](std::vector<double> const& values) {
      auto const from = std::span{values}.subspan(r * length, length);
      return std::vector<P>(from.begin(), from.end());
    };
    as.push_back(of_rank(problem.a)), bs.push_back(of_rank(problem.b));
    for (std::size_t c = 0; c < length; ++c) {
      rank.mean[c] = static_cast<double>(statistics.mean[c]),
      rank.inv_std[c] = static_cast<double>(statistics.inv_std[c]);
      rank.gamma[c] = problem.has_gamma ? static_cast<P>(problem.gamma[c]) : P{1};
      rank.beta[c] = problem.has_gamma ? static_cast<P>(problem.beta[c]) : P{0};
      rank.gamma_gradient[c] = P{0};
    }
    rank.count = statistics.count;
    auto& memory = rank.machine.memory;
    add_tensor<T const>(memory, "x", xs[r].view());
    add_tensor<T const>(memory, "dy", dys[r].view());
    add_tensor<T const>(memory, "u", us[r].view());
    add_tensor<T const>(memory, "v", vs[r].view());
    add_tensor<T const>(memory, "residual", residuals[r].view());
    auto& epilogue = epilogues.emplace_back();
    epilogue.activation.negative_slope = problem.slope;
    if (problem.has_residual) epilogue.residual = residuals[r].view();
    if (!problem.mask.empty()) {
      epilogue.mask = mask_of(problem.mask.data() + first * spatial, n, spatial);
      memory.add("mask", epilogue.mask.data, static_cast<std::size_t>(n * spatial));
    }
    if (problem.zeroes) epilogue.masked = masked_outputs::zero;
    add_tensor(memory, "to_dy", to_dys[r].view());
    add_tensor(memory, "to_x", to_xs[r].view());
    memory.add("a", as[r].data(), length);
    memory.add("b", bs[r].data(), length);
    tensor_view<T const> u;
    if (problem.has_u) u = us[r].view();
    auto const a = problem.has_ab ? gpu::channel_values{as[r].data()} : gpu::channel_values{};
    auto const op = gpu::detail::make_double_backward_sums<T, Epilogue>(u, dys[r].view(), xs[r].view(), rank.affine(),
                                                                        epilogues[r], rank.saved(), a);
    run_reduction(rank.machine,
                  gpu::detail::make_reduction(op, header_of(channels, n * spatial), rank.packet_data(),
                                              rank.workspace(), {multiprocessors, 1 << 16}, 64),
                  {});
  }
  auto const packets = gather(ranks);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto& rank = ranks[r];
    rank.machine.memory.add("packets", packets.data(), packets.size());
    tensor_view<T const> u;
    if (problem.has_u) u = us[r].view();
    auto const a = problem.has_ab ? gpu::channel_values{as[r].data()} : gpu::channel_values{};
    auto const b = problem.has_ab ? gpu::channel_values{bs[r].data()} : gpu::channel_values{};
    gpu::detail::double_backward_statistics const of_pass{
        {reinterpret_cast<std::byte const*>(packets.data()), static_cast<int>(ranks.size())},
        rank.packet_data(),
        rank.saved(),
        rank.affine(),
        a,
        b,
        gpu::channel_outputs{rank.gamma_gradient.data()},
        rank.report()};
    tensor_view<T const> v;
    if (problem.has_residual) v = vs[r].view();
    auto const op = gpu::detail::make_double_gradient<T, Epilogue>(u, v, dys[r].view(), xs[r].view(), to_dys[r].view(),
                                                                   to_xs[r].view(), epilogues[r], of_pass);
    run_map(rank.machine, gpu::detail::make_map(op, {2, 1 << 16}, 64), {});

    std::vector<long double> to_dy, to_x, to_gamma;
    auto const first = problem.first_of(r) * channels * spatial, last = first + problem.shares[r] * channels * spatial;
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(last); ++i) {
      to_dy.push_back(static_cast<long double>(problem.slope_of(problem.dy[i])));
      to_x.push_back(static_cast<long double>(problem.slope_of(problem.x[i])));
    }
    double const tolerance = std::max(accuracy<T>, 1e-9); // that of the differences
    CHECK(error_of(as_long(to_dys[r].values()), to_dy) < tolerance);
    CHECK(error_of(as_long(to_xs[r].values()), to_x) < tolerance);
    CHECK(to_dys[r].intact());
    CHECK(to_xs[r].intact());
    if (!problem.has_gamma) continue;
    for (double& gamma : problem.gamma)
      to_gamma.push_back(static_cast<long double>(problem.slope_of(gamma, static_cast<int>(r))));
    CHECK(error_of(as_long(rank.gamma_gradient), to_gamma) < std::max(1e-9, accuracy<A>));
  }
}

} // namespace

TEST_CASE_TEMPLATE("Double backward kernels give the gradients of what a backward pass gives", T, float, double,
                   bfloat16) {
  for (auto const order : {arrangement::nchw, arrangement::nhwc, arrangement::every_other}) {
    check_double_backward<T, false>(second_order_case{{2, 0, 1}}, order);
    second_order_case alone{{3}};
    check_double_backward<T, false>(alone, order);
    alone.has_u = false;
    check_double_backward<T, false>(alone, order);
    alone.has_u = true, alone.has_ab = alone.has_gamma = false;
    check_double_backward<T, false>(alone, order);
    second_order_case with{{2, 0, 1}};
    with.with_epilogue(0.25, true, true, true);
    check_double_backward<T, true>(with, order);
    with.zeroes = false;
    check_double_backward<T, true>(with, order);
    with.mask.clear(), with.has_residual = false, with.has_u = false;
    check_double_backward<T, true>(with, order);
  }
  second_order_case columns{{9, 0, 8}, 8}; // which few multiprocessors have enough of
  check_double_backward<T, false>(columns, arrangement::nchw, 0);
  columns.with_epilogue(0.25, true, false, false);
  check_double_backward<T, true>(columns, arrangement::nchw, 0);
}

TEST_CASE("Double backward kernels make up for what rounding the mean lost") {
  for (auto const order : {arrangement::nchw, arrangement::nhwc}) {
    second_order_case far{{2, 0, 1}};
    for (double& x : far.x) x += 1000;
    check_double_backward<float, false>(far, order);
    far.with_epilogue(0.25, true, true, true);
    check_double_backward<float, true>(far, order);
  }
}
