#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "power_norm_support.hpp"

#include <syncnorm/comm/thread_group.hpp>

#include <ops/power_norm_run.hpp>

using namespace test;

namespace {

/// A run of the reference through autograd on this rank; returns what is wrong. `Module` is PowerNorm or SyncPowerNorm.
template <class T, class Module>
std::vector<std::string> run_module(power_norm_data<T> const& data, Module norm, int rank, bool four) {
  using kind = typename power_norm_data<T>::kind;
  std::vector<std::string> failures;
  std::size_t event_number = 0;
  auto const expect = [&](std::vector<double> const& got, auto const& expected, char const* what,
                          long double scale = 0) {
    long double worst = 0;
    for (auto const value : expected) scale = std::max(scale, std::abs(static_cast<long double>(value)));
    for (std::size_t i = 0; i < got.size() && i < expected.size(); ++i)
      worst = worse_of(worst, std::abs(static_cast<long double>(got[i]) - static_cast<long double>(expected[i])));
    if (got.size() != expected.size() || !(worst <= power_norm_tolerance<T> * scale))
      failures.push_back(data.run.name() + ", rank " + std::to_string(rank) + ", event " +
                         std::to_string(event_number) + ": " + what + " off by " +
                         std::to_string(static_cast<double>(worst)) + " of " +
                         std::to_string(static_cast<double>(scale)));
  };
  auto const channels = data.run.cell.channels;
  norm->to(std::is_same_v<T, double> ? torch::kDouble : torch::kFloat);
  {
    torch::NoGradGuard const no_recording;
    for (std::int64_t c = 0; c < channels; ++c) {
      norm->weight[c] = data.gamma[static_cast<std::size_t>(c)];
      norm->bias[c] = data.beta[static_cast<std::size_t>(c)];
    }
  }
  struct part {
    Tensor x, y, dy;
    std::size_t first, last; // of the elements
  };
  std::vector<part> parts;
  power_norm_reference const sums{channels, 0, 0, 0, 0, 0, 0, data.run.corrected};
  std::vector<long double> dgamma(static_cast<std::size_t>(channels)), dbeta(dgamma);
  for (auto const& event : data.events) {
    ++event_number;
    auto const& m = data.micros[event.micro];
    auto const n = m.cell.samples_of(rank), first_sample = m.cell.first_sample_of(rank), s = m.cell.spatial;
    auto const of = [&](auto const& whole, part const& p) {
      return std::vector<typename std::decay_t<decltype(whole)>::value_type>(
          whole.begin() + static_cast<std::ptrdiff_t>(p.first), whole.begin() + static_cast<std::ptrdiff_t>(p.last));
    };
    if (event.what == kind::forward) {
      part p;
      p.first = static_cast<std::size_t>(first_sample * channels * s);
      p.last = p.first + static_cast<std::size_t>(n * channels * s);
      p.x = module_tensor<T>(of(m.x, p), n, channels, s, four).requires_grad_();
      p.dy = module_tensor<T>(of(m.dy, p), n, channels, s, four);
      auto mask = torch::zeros({n, s}, torch::kBool);
      for (std::int64_t i = 0; i < n * s; ++i)
        mask.view(-1)[i] = static_cast<bool>(m.masked[static_cast<std::size_t>(first_sample * s + i)]);
      if (four) mask = mask.view({n, s, 1});
      p.y = data.run.masks ? norm->forward(p.x, mask) : norm->forward(p.x);
      expect(dense_values(p.y), of(m.pass.y, p), "y", scale_of_all(m.pass.y));
      parts.push_back(p);
    } else {
      auto& p = parts[event.micro];
      p.x.mutable_grad() = Tensor{};
      p.y.backward(p.dy, /*retain_graph=*/true);
      expect(dense_values(p.x.grad()), of(m.dx[event.time], p), "dx", scale_of_all(m.dx[event.time]));
      sums.add_gradients(m.pass, m.dy, first_sample, first_sample + n, dgamma, dbeta);
    }
    if (!event.ends_step) continue;
    if (norm->iters() != event.iters) failures.push_back("iters is " + std::to_string(norm->iters()));
    expect(dense_values(norm->running_phi().view({-1})), event.running_phi, "running_phi");
    expect(dense_values(norm->ema_gz().view({-1})), event.ema_gz, "ema_gz", event.ema_scale);
    auto const scale = static_cast<long double>(std::max<std::int64_t>(1, 2 * m.cell.samples() * s));
    expect(dense_values(norm->weight.grad()), dgamma, "the gradient of weight", scale);
    expect(dense_values(norm->bias.grad()), dbeta, "the gradient of bias", scale);
    norm->zero_grad();
    std::ranges::fill(dgamma, 0.0L);
    std::ranges::fill(dbeta, 0.0L);
  }
  return failures;
}

PowerNormOptions module_options(power_norm_case const& c) {
  auto const o = c.options();
  return PowerNormOptions{c.cell.channels}
      .eps(o.eps)
      .alpha_fwd(o.alpha_forward)
      .alpha_bkw(o.alpha_backward)
      .warmup_iters(o.warmup_iters)
      .group_num(o.groups)
      .corrected(c.corrected);
}

template <class T>
void check_case(power_norm_case const& c, bool four) {
  power_norm_data<T> const data{c};
  std::vector<std::vector<std::string>> failures(static_cast<std::size_t>(c.cell.ranks));
  syncnorm::run_ranks(c.cell.ranks, [&](syncnorm::thread_communicator const& comm) {
    failures[static_cast<std::size_t>(comm.rank())] =
        run_module<T>(data, SyncPowerNorm{module_options(c), comm}, comm.rank(), four);
  });
  if (c.cell.ranks == 1) {
    auto const local = run_module<T>(data, PowerNorm{module_options(c)}, 0, four);
    failures[0].insert(failures[0].end(), local.begin(), local.end());
  }
  for (auto const& of_rank : failures)
    for (std::size_t i = 0; i < of_rank.size() && i < 4; ++i) FAIL_CHECK(of_rank[i]);
}

} // namespace

TEST_CASE("the modules over the ranks are the reference on the whole batch, through autograd") {
  // The group scaling of the modules is that of their option, whose eps is the authors'.
  std::size_t turn = 0;
  for (int const ranks : {1, 2, 3})
    for (auto const spread : partitions)
      for (bool const corrected : {false, true})
        for (std::int64_t const spatial : {1, 5}) {
          ++turn;
          power_norm_case c{{ranks, turn % 4 == 0 ? 130 : 6, 2, spatial, spread, layout::tbc}};
          c.corrected = corrected;
          c.masks = turn % 5 != 0;
          c.warmup = turn % 3 == 0 ? 0 : 8;
          c.steps = c.cell.channels > 100 ? 12 : 51;
          bool const four = spatial > 1 && turn % 4 < 2;
          turn % 2 == 0 ? check_case<float>(c, four) : check_case<double>(c, four);
        }
}
