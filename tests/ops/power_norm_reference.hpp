#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace test {

/// Power norm of one concatenated batch at a time, dense `[N, C, S]`, written from the authors' recursion line by line, in
/// long double. It shares no code with the library.
struct power_norm_reference {
  using real = long double;
  using reals = std::vector<real>;

  std::int64_t channels, warmup, groups; // groups: 0 for no scaling
  double eps, group_eps, alpha_forward, alpha_backward;
  bool corrected;
  reals running_phi, ema_gz;
  std::int64_t iters = 0;
  real ema_terms = 0; // what the means that went into ema_gz amount to; they cancel

  power_norm_reference(std::int64_t c, std::int64_t w, std::int64_t g, double e, double ge, double af, double ab,
                       bool is_corrected)
      : channels{c}, warmup{w}, groups{g}, eps{e}, group_eps{ge}, alpha_forward{af},
        alpha_backward{ab}, corrected{is_corrected}, running_phi(static_cast<std::size_t>(c), 1),
        ema_gz(static_cast<std::size_t>(c), 0) {}

  struct pass {
    std::int64_t n = 0, s = 0;
    bool counts = false;      // whether any position was unmasked
    reals u, root, z, y;      // `[N, C, S]`; root is 1/√(mean square of the group + eps), at every channel
    reals divisor;            // `[C]`, of dx
    std::vector<bool> masked; // `[N, S]`
  };

  template <class T, class P>
  pass forward(std::vector<T> const& x, std::int64_t n, std::int64_t s, std::vector<bool> const& masked,
               std::vector<P> const& gamma, std::vector<P> const& beta) {
    pass p{n, s, false, reals(x.size()), reals(x.size(), 1), reals(x.size()), reals(x.size()), {}, masked};
    each(p, [&](std::size_t i, std::size_t, std::size_t) { p.u[i] = static_cast<real>(x[i]); });
    if (groups > 0) {
      each_group(p, [&](std::vector<std::size_t> const& members) {
        real squares = 0;
        for (auto const i : members) squares += p.u[i] * p.u[i];
        auto const m2 = squares / static_cast<real>(members.size());
        for (auto const i : members) p.root[i] = 1 / std::sqrt(m2 + group_eps);
      });
      for (std::size_t i = 0; i < p.u.size(); ++i) p.u[i] *= p.root[i];
    }

    reals var(running_phi.size(), 0);
    std::int64_t count = std::count(masked.begin(), masked.end(), false);
    each(p, [&](std::size_t i, std::size_t c, std::size_t position) {
      if (!masked[position]) var[c] += p.u[i] * p.u[i];
    });
    p.counts = count > 0;
    reals of_z(var.size());
    if (!p.counts) {
      for (std::size_t c = 0; c < var.size(); ++c) of_z[c] = std::sqrt(running_phi[c] + eps);
      p.divisor = of_z;
    } else {
      for (auto& value : var) value /= static_cast<real>(count);
      auto const t = ++iters;
      for (std::size_t c = 0; c < var.size(); ++c) {
        of_z[c] = std::sqrt((t <= warmup ? var[c] : running_phi[c]) + eps);
        p.divisor.push_back(corrected ? of_z[c] : std::sqrt(var[c] + eps));
        auto const tt = static_cast<real>(t);
        if (corrected) {
          if (t <= warmup)
            running_phi[c] = running_phi[c] * (tt - 1) / tt + var[c] / tt;
          else
            running_phi[c] = alpha_forward * running_phi[c] + (1 - static_cast<real>(alpha_forward)) * var[c];
        } else {
          if (t < warmup) running_phi[c] = running_phi[c] * (tt - 1) / tt + var[c] / tt;
          running_phi[c] = alpha_forward * running_phi[c] + (1 - static_cast<real>(alpha_forward)) * var[c];
        }
      }
    }
    each(p, [&](std::size_t i, std::size_t c, std::size_t) {
      p.z[i] = p.u[i] / of_z[c];
      p.y[i] = static_cast<real>(gamma[c]) * p.z[i] + static_cast<real>(beta[c]);
    });
    return p;
  }

  /// dx; ema_gz moves.
  template <class T, class P>
  reals backward(pass const& p, std::vector<T> const& dy, std::vector<P> const& gamma) {
    reals gh(dy.size()), dx(dy.size()), sum(ema_gz.size(), 0), terms(ema_gz.size(), 0);
    std::int64_t positions = 0;
    for (bool const masked : p.masked) positions += corrected && masked ? 0 : 1;
    each(p, [&](std::size_t i, std::size_t c, std::size_t position) {
      auto const g = static_cast<real>(dy[i]) * static_cast<real>(gamma[c]);
      gh[i] = g - (1 - static_cast<real>(alpha_backward)) * ema_gz[c] * p.z[i];
      if (corrected && p.masked[position]) gh[i] = 0;
      sum[c] += gh[i] * p.z[i];
      terms[c] += std::abs(gh[i] * p.z[i]);
      dx[i] = gh[i] / p.divisor[c];
    });
    if (p.counts && positions > 0)
      for (std::size_t c = 0; c < sum.size(); ++c) {
        ema_gz[c] += sum[c] / static_cast<real>(positions);
        ema_terms = std::max(ema_terms, terms[c] / static_cast<real>(positions));
      }
    if (groups == 0) return dx;
    each_group(p, [&](std::vector<std::size_t> const& members) { // of u = x·root, by the chain rule
      real along = 0;
      for (auto const i : members) along += dx[i] * p.u[i] / static_cast<real>(members.size());
      for (auto const i : members) dx[i] = p.root[i] * (dx[i] - p.u[i] * along);
    });
    return dx;
  }

  /// What samples [first, last) add to the gradients of gamma and beta.
  template <class T>
  void add_gradients(pass const& p, std::vector<T> const& dy, std::int64_t first, std::int64_t last, reals& gamma,
                     reals& beta) const {
    each(p, [&](std::size_t i, std::size_t c, std::size_t position) {
      auto const n = static_cast<std::int64_t>(position) / p.s;
      if (n < first || n >= last || (corrected && p.masked[position])) return;
      gamma[c] += static_cast<real>(dy[i]) * p.z[i];
      beta[c] += static_cast<real>(dy[i]);
    });
  }

private:
  /// f(element, channel, position)
  template <class F>
  void each(pass const& p, F const& f) const {
    std::size_t i = 0;
    for (std::int64_t n = 0; n < p.n; ++n)
      for (std::size_t c = 0; c < running_phi.size(); ++c)
        for (std::int64_t s = 0; s < p.s; ++s) f(i++, c, static_cast<std::size_t>(n * p.s + s));
  }

  template <class F>
  void each_group(pass const& p, F const& f) const {
    std::int64_t const width = channels / groups;
    std::vector<std::size_t> members(static_cast<std::size_t>(width));
    for (std::int64_t n = 0; n < p.n; ++n)
      for (std::int64_t g = 0; g < groups; ++g)
        for (std::int64_t s = 0; s < p.s; ++s) {
          for (std::int64_t k = 0; k < width; ++k)
            members[static_cast<std::size_t>(k)] = static_cast<std::size_t>((n * channels + g * width + k) * p.s + s);
          f(members);
        }
  }
};

} // namespace test
