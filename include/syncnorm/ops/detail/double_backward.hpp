#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/activation_gradient.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/combine.hpp>
#include <syncnorm/host/epilogue.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>
#include <syncnorm/ops/detail/pass_epilogues.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// What a double backward pass reads and writes, of K micro-batches; names as in `batch_norm_double_backward`.
template <class T, class P>
struct double_backward_operands {
  std::span<tensor_view<T const> const> dy, x;
  std::span<tensor_view<T const> const> u, v; ///< none, or K; default views: 0
  std::span<P const> a, b;
  affine_parameters<P> affine;
  std::span<tensor_view<T> const> to_dy, to_x; ///< none, or K; default views: not needed
  std::span<P> gamma_gradient;
  std::span<batch_norm_epilogue<T> const> epilogues;
};

/// The sums of a double backward pass, `[C]` each, with x − mean in the place of x̂.
struct double_backward_sums {
  enum row : std::size_t { g, g_xmu, u, u_xmu, u_g, a_g, a_g_xmu, rows };
  std::array<std::vector<double>, rows> of;

  explicit double_backward_sums(std::size_t channels) {
    for (auto& each : of) each.assign(channels, 0.0);
  }
  [[nodiscard]] double at(row which, std::size_t c) const { return of[which][c]; }
};

/// A double backward pass, as `batch_norm_double_backward` documents it.
template <class T, class P, host::executor E>
class double_backward {
  using sums_type = double_backward_sums;

public:
  static constexpr std::string_view name = "batch_norm 2nd backward";

  /// Everything is borrowed, and checked.
  double_backward(E const& exec, std::int64_t channels, double_backward_operands<T, P> const& operands,
                  batch_norm_saved const& saved, batch_norm_caller const& caller)
      : exec_{&exec}, channels_{channels}, length_{static_cast<std::size_t>(std::max<std::int64_t>(0, channels))},
        in_{operands}, saved_{&saved}, own_{length_}, all_{length_} {
    check_.require(caller.fault.empty(), [&] { return std::string{caller.fault}; });
    check_.require(saved.mean.size() == length_ && saved.inv_std.size() == length_, [&] {
      return check_.text("the saved statistics have ", saved.mean.size(), " channels, expected ", channels,
                         "; was there a forward pass?");
    });
    auto const batches = in_.x.size();
    auto const as_many = [&](std::size_t count, char const* what) {
      check_.require(count == batches || count == 0, [&] {
        return check_.text("there are ", count, " micro-batches of ", what, ", expected ", batches, " as of x");
      });
    };
    check_.require(in_.dy.size() == batches, [&] {
      return check_.text("there are ", in_.dy.size(), " micro-batches of dy, expected ", batches, " as of x");
    });
    as_many(in_.u.size(), "the gradient with respect to dx");
    as_many(in_.v.size(), "the gradient with respect to dresidual");
    as_many(in_.to_dy.size(), "the gradient to dy");
    as_many(in_.to_x.size(), "the gradient to x");
    for (std::size_t k = 0; k < batches && !check_.failed(); ++k) check_batch(k, batches);
    epilogues_.emplace(check_, in_.epilogues, in_.x);
    for (std::size_t k = 0; k < in_.v.size() && !check_.failed(); ++k)
      check_.require(!given(in_.v[k]) || (*epilogues_)[k].has_residual() || in_.x[k].size() == 0,
                     [&] { return "there is a gradient with respect to dresidual, but no residual"; });
    check_.channel_values(in_.affine.gamma, "gamma", channels);
    check_.channel_values(in_.affine.beta, "beta", channels);
    check_.channel_values(in_.a, "the gradient with respect to that of gamma", channels);
    check_.channel_values(in_.b, "the gradient with respect to that of beta", channels);
    check_.channel_values(in_.gamma_gradient, "the gradient of gamma", channels);
  }

  template <communicator C>
  void run(C const& comm, bool exchange, batch_norm_workspace& workspace) {
    if (size(comm) == 1 || saved_->scope != statistics_scope::all_ranks || !exchange) {
      throw_fault(name, check_);
      local();
      all_ = own_;
    } else {
      auto& packets = workspace.double_packets;
      if (workspace.exchange.agreed()) packets.agree();
      packets.prepare(size(comm));
      std::int64_t count = 0;
      for (auto const& x : in_.x) count += x.count();
      packets.header(0) = make_header<T>(name, channels_, count, check_);
      if (!check_.failed()) local();
      for (std::size_t v = 0; v < sums_type::rows; ++v) std::ranges::copy(own_.of[v], packets.own(0, v).begin());
      auto const rule = merge_rule::sums;
      auto const policy = resolve(saved_->exchange, comm, rule, channels_, sums_type::rows);
      auto const work = packets.start(comm, rule, policy, false);
      packets.finish();
      std::array<std::span<double>, sums_type::rows> totals;
      for (std::size_t v = 0; v < sums_type::rows; ++v) totals[v] = all_.of[v];
      packets.total(0, totals);
    }
    apply();
  }

private:
  template <class U>
  [[nodiscard]] static bool given(tensor_view<U> const& view) {
    return view.data != nullptr || view.samples != 0 || view.channels != 0 || view.spatial != 0;
  }
  template <class View>
  [[nodiscard]] static View of(std::span<View const> views, std::size_t k) {
    return views.empty() ? View{} : views[k];
  }
  [[nodiscard]] static double value_of(std::span<P const> values, std::size_t c, double otherwise) {
    return values.empty() ? otherwise : as_double(values[c]);
  }

  void check_batch(std::size_t k, std::size_t batches) {
    auto const& x = in_.x[k];
    check_.tensor(x, batch_name("x", k, batches), channels_);
    check_.same_extents(in_.dy[k], batch_name("dy", k, batches), x);
    auto const read = [&](tensor_view<T const> const& view, char const* what) {
      if (given(view)) check_.same_extents(view, batch_name(what, k, batches), x);
    };
    auto const written = [&](tensor_view<T> const& view, char const* what) {
      if (given(view)) check_.output(view, batch_name(what, k, batches), x);
    };
    read(of(in_.u, k), "the gradient with respect to dx");
    read(of(in_.v, k), "the gradient with respect to dresidual");
    written(of(in_.to_dy, k), "the gradient to dy");
    written(of(in_.to_x, k), "the gradient to x");
  }

  /// g of each micro-batch. What differs from dy is written where the gradient to dy goes later, or into memory of its own.
  void find_activated() {
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      auto const& x = in_.x[k];
      if (!(*epilogues_)[k].gates()) {
        g_.push_back(in_.dy[k]);
        continue;
      }
      tensor_view<T> g = of(in_.to_dy, k);
      if (!given(g)) {
        memory_.push_back(std::make_unique<T[]>(static_cast<std::size_t>(x.size())));
        auto* const data = memory_.back().get();
        g = x.stride_c == 1 ? nhwc(data, x.samples, x.channels, x.spatial)
                            : nchw(data, x.samples, x.channels, x.spatial);
      }
      gate(k, in_.dy[k], g);
      g_.push_back(g);
    }
  }

  void gate(std::size_t k, tensor_view<T const> dy, tensor_view<T> out) const {
    host::activation_gradient<T, P>(*exec_, dy, in_.x[k], out, saved_->mean, saved_->inv_std, in_.affine,
                                    (*epilogues_)[k]);
  }

  void local() {
    find_activated();
    std::vector<double> const zero(length_, 0.0);
    std::array<std::vector<double>, sums_type::rows> part;
    for (auto& each : part) each.assign(length_, 0.0);
    auto const add = [&](sums_type::row which) {
      for (std::size_t c = 0; c < length_; ++c) own_.of[which][c] += part[which][c];
    };
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      auto const& epilogue = (*epilogues_)[k];
      auto const& x = in_.x[k];
      auto const sum = [&](tensor_view<T const> of, tensor_view<T const> with, std::vector<double> const& mean,
                           host::prepared_epilogue<T> const& by, sums_type::row first, sums_type::row second) {
        host::backward_reduce(*exec_, of, with, mean, saved_->inv_std, in_.affine, by, part[first], part[second]);
      };
      sum(in_.dy[k], x, saved_->mean, epilogue, sums_type::g, sums_type::g_xmu);
      add(sums_type::g), add(sums_type::g_xmu);
      auto const u = of(in_.u, k);
      if (!given(u)) continue;
      bool const zeroes = epilogue.written() != nullptr;
      sum(u, g_[k], zero, zeroes ? epilogue.mask_alone() : host::prepared_epilogue<T>{}, sums_type::u, sums_type::u_g);
      sum(u, x, saved_->mean, epilogue.mask_alone(), sums_type::u, sums_type::u_xmu);
      add(sums_type::u), add(sums_type::u_xmu), add(sums_type::u_g);
    }
    for (std::size_t c = 0; c < length_; ++c) {
      double const a = value_of(in_.a, c, 0);
      own_.of[sums_type::a_g][c] = a * own_.at(sums_type::g, c);
      own_.of[sums_type::a_g_xmu][c] = a * own_.at(sums_type::g_xmu, c);
    }
  }

  void apply() {
    double const per_count = saved_->count > 0 ? 1.0 / static_cast<double>(saved_->count) : 0; // 0: constant statistics
    std::vector<host::combination> for_dy(length_), for_x(length_);
    for (std::size_t c = 0; c < length_; ++c) {
      double const r = saved_->inv_std[c], mean = saved_->mean[c], scale = value_of(in_.affine.gamma, c, 1) * r;
      double const rn = r * per_count, a = value_of(in_.a, c, 0), b = value_of(in_.b, c, 0);
      double const sg = all_.at(sums_type::g, c), sgx = r * all_.at(sums_type::g_xmu, c);
      double const su = all_.at(sums_type::u, c), sux = r * all_.at(sums_type::u_xmu, c);
      double const sug = all_.at(sums_type::u_g, c), ag = all_.at(sums_type::a_g, c);
      double const agx = r * all_.at(sums_type::a_g_xmu, c);
      double const spread = sug - (su * sg + 3 * sux * sgx) * per_count;
      for_dy[c] = {scale, 1, mean, r * (a - scale * sux * per_count), b - scale * su * per_count};
      for_x[c] = {-scale * rn * sgx, a * r - scale * rn * sux, mean, -r * rn * (agx + scale * spread),
                  scale * rn * per_count * (su * sgx + sg * sux) - rn * ag};
      if (in_.gamma_gradient.empty()) continue;
      double const through = own_.at(sums_type::u, c) * sg + r * own_.at(sums_type::u_xmu, c) * sgx;
      double const term = own_.at(sums_type::u_g, c) - through * per_count;
      in_.gamma_gradient[c] = from_double<P>(as_double(in_.gamma_gradient[c]) + r * term);
    }
    for (std::size_t k = 0; k < in_.x.size(); ++k) {
      auto const u = of(in_.u, k), v = of(in_.v, k);
      auto const to_dy = of(in_.to_dy, k), to_x = of(in_.to_x, k);
      bool const has_u = given(u), has_v = given(v);
      auto const used = [&](std::vector<host::combination> all, bool a, bool b) {
        for (auto& each : all) each.scale_a *= a ? 1 : 0, each.scale_b *= b ? 1 : 0;
        return all;
      };
      // What is not given is another, times 0. The gradient to x comes first, since the other may overwrite g.
      if (given(to_x))
        host::combine_counted(*exec_, has_u ? u : g_[k], g_[k], in_.x[k], to_x, used(for_x, has_u, true),
                              (*epilogues_)[k].counted());
      if (!given(to_dy)) continue;
      host::combine(*exec_, has_u ? u : in_.dy[k], has_v ? v : in_.dy[k], in_.x[k], to_dy, used(for_dy, has_u, has_v));
      if ((*epilogues_)[k].gates()) gate(k, to_dy, to_dy);
    }
  }

  E const* exec_;
  std::int64_t channels_;
  std::size_t length_;
  double_backward_operands<T, P> in_;
  batch_norm_saved const* saved_;
  call_check check_;
  std::optional<pass_epilogues<T>> epilogues_;
  std::vector<tensor_view<T const>> g_;
  std::vector<std::unique_ptr<T[]>> memory_;
  double_backward_sums own_, all_;
};

} // namespace syncnorm::detail
