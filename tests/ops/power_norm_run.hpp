#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include <ops/grid_case.hpp>
#include <ops/power_norm_reference.hpp>
#include <support/sanitized.hpp>
#include <support/worse_of.hpp>

namespace test {

/// One training run: how it is spread over ranks, and what of power norm it uses.
struct power_norm_case {
  grid_case cell; // `batch` and `spread` say how many samples a rank has, which changes from pass to pass
  std::int64_t groups = 0, warmup = 20;
  bool corrected = false, masks = true;
  int steps = 56;

  [[nodiscard]] std::string name() const {
    return cell.name() + ", groups " + std::to_string(groups) + ", warmup " + std::to_string(warmup) +
           (corrected ? ", corrected" : ", reference") + (masks ? ", masks" : "");
  }
  [[nodiscard]] syncnorm::power_norm_options options() const {
    return {.eps = 1e-3,
            .alpha_forward = 0.85,
            .alpha_backward = 0.75,
            .warmup_iters = warmup,
            .groups = groups,
            .group_eps = 1e-2,
            .recursion =
                corrected ? syncnorm::power_norm_recursion::corrected : syncnorm::power_norm_recursion::reference};
  }
};

/// A run over the whole batch, dense `[N, C, S]`, and what the reference says of every pass of it.
///
/// A step is one pass forward and backward, or, every third, two of them whose gradients accumulate; or two forward and
/// then two backward, in the other order; or one forward and two backward. Every 11th pass has all of its positions masked,
/// and every 13th has no samples at all.
template <class T>
struct power_norm_data {
  struct micro {
    grid_case cell;
    std::vector<T> x, dy;
    std::vector<bool> masked; // `[N, S]`
    power_norm_reference::pass pass;
    std::vector<std::vector<long double>> dx; // of each backward pass
  };
  enum class kind { forward, backward };
  struct event {
    kind what;
    std::size_t micro;
    std::size_t time = 0;                         // of a backward pass: which one of its forward pass
    std::vector<long double> running_phi, ema_gz; // afterwards
    std::int64_t iters = 0;
    long double ema_scale = 0;
    bool ends_step = false;
  };

  power_norm_case run;
  std::vector<T> gamma, beta;
  std::vector<micro> micros;
  std::vector<event> events;

  explicit power_norm_data(power_norm_case const& c) : run{c}, gamma(per_channel(3, 1.25)), beta(per_channel(4, 0)) {
    auto const o = c.options();
    power_norm_reference reference{c.cell.channels, o.warmup_iters,  o.groups,         o.eps,
                                   o.group_eps,     o.alpha_forward, o.alpha_backward, c.corrected};
    for (int step = 0; step < c.steps; ++step) {
      auto const forward = [&] {
        micros.push_back(make_micro());
        auto& m = micros.back();
        m.pass = reference.forward(m.x, m.cell.samples(), m.cell.spatial, m.masked, gamma, beta);
        add_event(reference, kind::forward, micros.size() - 1);
      };
      auto const backward = [&](std::size_t i) {
        auto& m = micros[i];
        m.dx.push_back(reference.backward(m.pass, m.dy, gamma));
        add_event(reference, kind::backward, i);
        events.back().time = m.dx.size() - 1;
      };
      forward();
      auto const first = micros.size() - 1;
      if (step % 6 == 3) {
        forward();
        backward(first + 1);
        backward(first);
      } else {
        backward(first);
        if (step % 3 == 2) forward(), backward(first + 1);
        if (step % 7 == 5) backward(first);
      }
      events.back().ends_step = true;
    }
  }

private:
  void add_event(power_norm_reference const& r, kind what, std::size_t i) {
    events.push_back({what, i, 0, r.running_phi, r.ema_gz, r.iters, r.ema_terms, false});
  }

  [[nodiscard]] micro make_micro() const {
    auto const number = micros.size();
    micro m{run.cell, {}, {}, {}, {}, {}};
    m.cell.batch = number % 13 == 12 ? 0 : run.cell.batch + static_cast<std::int64_t>(number % 3);
    if (number % 13 == 12) m.cell.spread = partition::even;
    auto const size = static_cast<std::size_t>(m.cell.samples() * m.cell.channels * m.cell.spatial);
    for (std::size_t i = 0; i < size; ++i) {
      auto const c = static_cast<double>((static_cast<std::int64_t>(i) / m.cell.spatial) % m.cell.channels);
      auto const drift = 1 + 0.4 * std::sin(0.3 * static_cast<double>(number));
      m.x.push_back(static_cast<T>(noise(10 + 2 * number, i) * (1 + 0.05 * std::cos(c)) * drift + 0.3 * std::sin(c)));
      m.dy.push_back(static_cast<T>(noise(11 + 2 * number, i) + 0.2 * std::cos(c)));
    }
    m.masked.resize(static_cast<std::size_t>(m.cell.samples() * m.cell.spatial));
    for (std::size_t i = 0; i < m.masked.size(); ++i)
      m.masked[i] = run.masks && (number % 11 == 10 || noise(7 + number, i) > 0.4);
    return m;
  }
  [[nodiscard]] std::vector<T> per_channel(std::uint64_t stream, double shift) const {
    std::vector<T> values;
    for (std::int64_t c = 0; c < run.cell.channels; ++c)
      values.push_back(static_cast<T>(noise(stream, static_cast<std::uint64_t>(c)) + shift));
    return values;
  }
};

/// What a result may be off by, relative to its scale. Sums of floats are at most 1024 long before they go into double, and
/// those of doubles are in double; a state in the element's own type is rounded once a step, and the moving averages forget,
/// so that no more than 1/(1 − 0.85) roundings are ever left of it. In all that is some tens of units of rounding.
template <class T>
inline constexpr double power_norm_tolerance = std::is_same_v<T, float> ? 1e-5 : 1e-12;

/// This rank's part of a pass, in memory as the layout says.
template <class T>
struct power_norm_part {
  owned_tensor<T> x, dy, out;
  std::unique_ptr<bool[]> mask;
  std::int64_t samples, first;
  syncnorm::power_norm_saved saved;

  power_norm_part(typename power_norm_data<T>::micro const& m, int of_rank)
      : x{m.cell.order, m.cell.samples_of(of_rank), m.cell.channels, m.cell.spatial},
        dy{m.cell.order, m.cell.samples_of(of_rank), m.cell.channels, m.cell.spatial}, out{m.cell.order,
                                                                                           m.cell.samples_of(of_rank),
                                                                                           m.cell.channels,
                                                                                           m.cell.spatial},
        mask{std::make_unique<bool[]>(static_cast<std::size_t>(m.cell.samples_of(of_rank) * m.cell.spatial))},
        samples{m.cell.samples_of(of_rank)}, first{m.cell.first_sample_of(of_rank)} {
    for (std::int64_t i = 0; i < samples * m.cell.spatial; ++i)
      mask[static_cast<std::size_t>(i)] = !m.masked[static_cast<std::size_t>(first * m.cell.spatial + i)];
    each(m, [&](auto n, auto c, auto s, std::size_t i) {
      x.view(n, c, s) = m.x[i];
      dy.view(n, c, s) = m.dy[i];
    });
  }
  template <class F>
  void each(typename power_norm_data<T>::micro const& m, F const& f) const {
    for (std::int64_t n = 0; n < samples; ++n)
      for (std::int64_t c = 0; c < m.cell.channels; ++c)
        for (std::int64_t s = 0; s < m.cell.spatial; ++s)
          f(n, c, s, static_cast<std::size_t>(((first + n) * m.cell.channels + c) * m.cell.spatial + s));
  }
};

/// Runs a case on this rank of `comm`; returns what is wrong.
template <class T, syncnorm::communicator C>
std::vector<std::string> run_power_norm(power_norm_data<T> const& data, C const& comm) {
  using kind = typename power_norm_data<T>::kind;
  int const rank = syncnorm::rank(comm);
  auto const& run = data.run;
  std::vector<std::string> failures;
  std::size_t event_number = 0;
  auto const expect = [&](bool holds, std::string const& what) {
    if (!holds && failures.size() < 8)
      failures.push_back(run.name() + (std::is_same_v<T, float> ? ", float" : ", double") + ", rank " +
                         std::to_string(rank) + ", event " + std::to_string(event_number) + ": " + what);
  };
  auto const expect_channels = [&](auto const& got, std::vector<long double> const& expected, char const* what,
                                   long double scale = 0) {
    long double worst = 0;
    for (auto const value : expected) scale = std::max(scale, std::abs(value));
    for (std::size_t i = 0; i < expected.size(); ++i)
      worst = worse_of(worst, std::abs(static_cast<long double>(got[i]) - expected[i]));
    expect(got.size() == expected.size() && worst <= power_norm_tolerance<T> * scale,
           std::string{what} + " off by " + std::to_string(static_cast<double>(worst)) + " of " +
               std::to_string(static_cast<double>(scale)));
  };

  auto const expect_tensor = [&](power_norm_part<T> const& own, auto const& m, std::vector<long double> const& expected,
                                 char const* what) {
    long double scale = 0, worst = 0;
    for (auto const value : expected) scale = std::max(scale, std::abs(value));
    own.each(m, [&](auto n, auto c, auto s, std::size_t i) {
      worst = worse_of(worst, std::abs(static_cast<long double>(own.out.view(n, c, s)) - expected[i]));
    });
    expect(worst <= power_norm_tolerance<T> * scale, std::string{what} + " off by " +
                                                         std::to_string(static_cast<double>(worst)) + " of " +
                                                         std::to_string(static_cast<double>(scale)));
  };

  syncnorm::power_norm<T, C> layer{comm, run.cell.channels, {.norm = run.options()}};
  std::ranges::copy(data.gamma, layer.gamma().begin());
  std::ranges::copy(data.beta, layer.beta().begin());
  power_norm_reference const sums{run.cell.channels, 0, 0, 0, 0, 0, 0, run.corrected};
  auto const channels = static_cast<std::size_t>(run.cell.channels);
  std::vector<long double> dgamma(channels), dbeta(channels), terms(channels);
  std::vector<std::unique_ptr<power_norm_part<T>>> parts;
  bool const watches = run.cell.ranks % 2 == 1; // the state after every pass, or else only after every step
  for (auto const& event : data.events) {
    ++event_number;
    auto const& m = data.micros[event.micro];
    if (event.what == kind::forward) {
      parts.push_back(std::make_unique<power_norm_part<T>>(m, rank));
      auto& own = *parts.back();
      auto const mask =
          run.masks ? syncnorm::mask_of(own.mask.get(), own.samples, m.cell.spatial) : syncnorm::mask_view{};
      layer.forward(own.x.view, own.out.view, mask);
      own.saved = layer.saved();
      expect_tensor(own, m, m.pass.y, "y");
    } else {
      auto& own = *parts[event.micro];
      layer.backward(own.saved, own.x.view, own.dy.view, own.out.view);
      expect_tensor(own, m, m.dx[event.time], "dx");
      sums.add_gradients(m.pass, m.dy, own.first, own.first + own.samples, dgamma, dbeta);
    }
    if (watches || event.ends_step) {
      expect(layer.iters() == event.iters, "iters is " + std::to_string(layer.iters()));
      expect_channels(layer.running_phi(), event.running_phi, "running_phi");
      expect_channels(layer.ema_gz(), event.ema_gz, "ema_gz", event.ema_scale);
      expect(!layer.in_flight(), "something is in flight after the state was read");
    }
    if (event.ends_step) {
      // The terms of a gradient cancel; there are about as many of them as there are positions.
      auto const scale = static_cast<long double>(std::max<std::int64_t>(1, 2 * m.cell.samples() * m.cell.spatial));
      expect_channels(layer.gamma_grad(), dgamma, "the gradient of gamma", scale);
      expect_channels(layer.beta_grad(), dbeta, "the gradient of beta", scale);
      layer.zero_grad();
      std::ranges::fill(dgamma, 0.0L);
      std::ranges::fill(dbeta, 0.0L);
    }
  }

  std::vector<std::byte> own;
  auto const append = [&](auto const& values) {
    auto const bytes = std::as_bytes(std::span{values});
    own.insert(own.end(), bytes.begin(), bytes.end());
  };
  append(layer.running_phi()), append(layer.ema_gz());
  std::vector<std::byte> all(own.size() * static_cast<std::size_t>(run.cell.ranks));
  syncnorm::allgather(comm, own, std::span{all});
  for (std::size_t r = 0; r < static_cast<std::size_t>(run.cell.ranks); ++r)
    expect(std::memcmp(all.data() + r * own.size(), own.data(), own.size()) == 0,
           "other bits of the state than rank " + std::to_string(r));
  return failures;
}

/// Every number of cases that a rank count is tested by: layouts, spreads, masks, groups and both recursions take turns.
template <class Run>
void for_each_power_norm_case(int ranks, Run const& run) {
  std::size_t turn = static_cast<std::size_t>(ranks);
  for (auto const order : layouts)
    for (auto const spread : partitions)
      for (bool const corrected : {false, true}) {
        ++turn;
        if (sanitized && turn % 11 != static_cast<std::size_t>(ranks)) continue; // other cases for each number of ranks
        std::int64_t const channels = turn % 5 == 0 ? 132 : turn % 2 == 0 ? 12 : 6;
        std::int64_t const spatial = order == layout::nc ? 1 : turn % 3 == 0 ? 17 : 5;
        power_norm_case c{{ranks, channels, 2, spatial, spread, order}};
        c.corrected = corrected;
        c.masks = turn % 4 != 0;
        c.groups = turn % 3 == 0 ? 0 : turn % 3 == 1 ? 2 : 3;
        c.warmup = turn % 7 == 0 ? 0 : turn % 7 == 1 ? 1 : 20;
        c.steps = channels > 100 ? 12 : 56;
        run(c);
      }
}

} // namespace test
