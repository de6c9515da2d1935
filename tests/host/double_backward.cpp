#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/double_backward.hpp>

#include <host/tensors.hpp>

using namespace syncnorm;

namespace {

enum class mask_kind { none, normalized, zeroed };

/// Of a double backward pass what the local halves take, and what they come to, in long double.
template <class T>
struct second_order_problem {
  std::int64_t n, c, s;
  bool has_u, has_v, has_residual;
  mask_kind masked;
  double slope;

  std::vector<T> dy = test::deviates<T>(n, c, s, 1), x = test::deviates<T>(n, c, s, 2, 100),
                 u = test::deviates<T>(n, c, s, 3), v = test::deviates<T>(n, c, s, 4),
                 residual = test::deviates<T>(n, c, s, 5);
  std::vector<std::uint8_t> mask = std::vector<std::uint8_t>(static_cast<std::size_t>(n * s));
  std::vector<float> gamma{}, beta{};
  std::vector<double> mean{}, inv_std{};
  std::vector<combination> for_dy{}, for_x{};

  void prepare() {
    for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = i % 3 != 0;
    for (std::int64_t i = 0; i < c; ++i) {
      auto const channel = static_cast<double>(i);
      gamma.push_back(static_cast<float>(i % 4) - 1.5F);
      beta.push_back(static_cast<float>(i % 3) / 8 - 0.0625F);
      mean.push_back(100.1 + channel / 8);
      inv_std.push_back(0.5 + channel / 64);
      for_dy.push_back({1.5 + std::sin(channel), channel / 10 - 0.5, mean.back(), 0.75, channel / 7 - 1});
      for_x.push_back({std::cos(channel), 0.5 - channel / 9, mean.back(), -0.25, channel / 5});
    }
    // Which side of the kink a value very near to it is on, rounding may tell.
    for (std::size_t i = 0; i < x.size(); ++i)
      while (std::abs(activated(i)) < 1e-3) x[i] = static_cast<T>(static_cast<accumulate_t<T>>(x[i]) + 1);
  }

  [[nodiscard]] bool counts(std::size_t i) const {
    auto const [rows, length] = std::array{static_cast<std::size_t>(c * s), static_cast<std::size_t>(s)};
    return masked == mask_kind::none || mask[i / rows * length + i % length] != 0;
  }
  [[nodiscard]] std::size_t channel_of(std::size_t i) const {
    return i / static_cast<std::size_t>(s) % static_cast<std::size_t>(c);
  }
  [[nodiscard]] static long double wide(T const& value) {
    return static_cast<long double>(static_cast<accumulate_t<T>>(value));
  }
  /// What is activated.
  [[nodiscard]] long double activated(std::size_t i) const {
    auto const of = channel_of(i);
    return (wide(x[i]) - mean[of]) * inv_std[of] * gamma[of] + beta[of] + (has_residual ? wide(residual[i]) : 0);
  }
  /// What `gradient` is before the epilogue of element `i`.
  [[nodiscard]] long double back(std::size_t i, long double gradient) const {
    if (masked == mask_kind::zeroed && !counts(i)) return 0;
    return activated(i) > 0 ? gradient : gradient * slope;
  }
  [[nodiscard]] batch_norm_epilogue<T> epilogue(tensor_view<T const> const& of_residual) const {
    batch_norm_epilogue<T> with{{slope}};
    if (has_residual) with.residual = of_residual;
    if (masked != mask_kind::none) with.mask = mask_of(mask.data(), n, s);
    with.masked = masked == mask_kind::zeroed ? masked_outputs::zero : masked_outputs::normalized;
    return with;
  }
};

/// Calls f(problem) of each mask with each slope, of which all that may be given takes turns.
template <class T, class F>
void for_each_second_order_problem(F const& f) {
  int given = 0;
  for (auto const& e : {test::extents{3, 19, 23}, {2, 5, 7}, {11, 3, 16}, {2, 2, 301}, {2, 1, 2500}})
    for (auto const masked : {mask_kind::none, mask_kind::normalized, mask_kind::zeroed})
      for (double const slope : {1.0, 1.0 / 3, 0.0})
        for (int k = 0; k < 2; ++k) {
          given = (given + 3) % 8;
          second_order_problem<T> p{e.n, e.c, e.s, (given & 1) != 0, (given & 2) != 0, (given & 4) != 0, masked, slope};
          CAPTURE(test::name_of(e));
          CAPTURE(given);
          CAPTURE(static_cast<int>(masked));
          CAPTURE(slope);
          p.prepare();
          f(p);
        }
}

/// The tensors of a problem in one arrangement.
template <class T>
struct second_order_tensors {
  second_order_tensors(test::arrangement order, second_order_problem<T> const& p)
      : dy{order, p.n, p.c, p.s, p.dy}, x{order, p.n, p.c, p.s, p.x}, u{order, p.n, p.c, p.s, p.u}, v{order, p.n, p.c,
                                                                                                      p.s, p.v},
        residual{order, p.n, p.c, p.s, p.residual}, to_dy{order, p.n, p.c, p.s}, to_x{order, p.n, p.c, p.s} {}

  [[nodiscard]] host::second_order_operands<T> operands(second_order_problem<T> const& p) {
    host::second_order_operands<T> of{dy.view(),
                                      x.view(),
                                      {},
                                      {},
                                      to_dy.view(),
                                      to_x.view(),
                                      p.mean,
                                      p.inv_std,
                                      affine_parameters<float>{p.gamma, p.beta},
                                      p.epilogue(residual.view())};
    if (p.has_u) of.u = u.view();
    if (p.has_v) of.v = v.view();
    return of;
  }

  test::tensor<T> dy, x, u, v, residual, to_dy, to_x;
};

} // namespace

TEST_CASE_TEMPLATE("the sums of a double backward pass are of numbers that nothing has rounded", T, float,
                   float16 AND_UNSANITIZED(double)) {
  for_each_second_order_problem<T>([](second_order_problem<T> const& p) {
    std::array<std::vector<long double>, 5> expected, scale;
    for (auto* const sums : {&expected, &scale})
      for (auto& each : *sums) each.assign(static_cast<std::size_t>(p.c), 0);
    for (std::size_t i = 0; i < p.x.size(); ++i) {
      auto const of = p.channel_of(i);
      long double const g = p.back(i, p.wide(p.dy[i])), u = p.has_u ? p.wide(p.u[i]) : 0,
                        d = p.wide(p.x[i]) - p.mean[of], m = p.counts(i) ? 1 : 0;
      long double const terms[] = {g, g * d, m * u, m * u * d, u * g};
      for (std::size_t j = 0; j < 5; ++j) {
        expected[j][of] += terms[j];
        scale[j][of] += std::abs(terms[j]);
      }
    }
    for (auto const order : test::arrangements) {
      CAPTURE(test::name_of(order));
      second_order_tensors<T> tensors{order, p};
      std::array<std::vector<double>, 5> sums;
      for (auto& each : sums) each.assign(static_cast<std::size_t>(p.c), -1);
      host::double_backward_reduce<T>(host::serial_executor{}, tensors.operands(p),
                                      {sums[0], sums[1], sums[2], sums[3], sums[4]});
      constexpr double tolerance = sizeof(T) == 8 ? 1e-12 : 1e-5; // of 16 bits, too: sums are of floats
      for (std::size_t j = 0; j < 5; ++j)
        for (std::size_t of = 0; of < sums[j].size(); ++of) {
          CAPTURE(j);
          CHECK(std::abs(static_cast<long double>(sums[j][of]) - expected[j][of]) <= tolerance * scale[j][of]);
        }
      auto const once = sums;
      host::double_backward_reduce<T>(test::shuffling_executor{}, tensors.operands(p),
                                      {sums[0], sums[1], sums[2], sums[3], sums[4]});
      CHECK(sums == once);
      CHECK(tensors.to_dy.intact());
    }
  });
}

TEST_CASE_TEMPLATE("what a double backward pass gives is rounded once", T, float, float16 AND_UNSANITIZED(double)) {
  for_each_second_order_problem<T>([](second_order_problem<T> const& problem) {
    auto p = problem;
    p.for_dy.back().shift += 1e5; // more than float16 holds, before the slope
    std::vector<long double> to_dy, to_x;
    std::vector<long double> scale_of_dy, scale_of_x;
    for (std::size_t i = 0; i < p.x.size(); ++i) {
      auto const of = p.channel_of(i);
      auto const &a = p.for_dy[of], &b = p.for_x[of];
      long double const d = p.wide(p.x[i]) - p.mean[of], g = p.back(i, p.wide(p.dy[i])),
                        u = p.has_u ? p.wide(p.u[i]) : 0, v = p.has_v ? p.wide(p.v[i]) : 0, m = p.counts(i) ? 1 : 0;
      to_dy.push_back(p.back(i, u * a.scale_a + v * a.scale_b + d * a.scale_x + a.shift));
      to_x.push_back(g * b.scale_b + m * (u * b.scale_a + d * b.scale_x + b.shift));
      scale_of_dy.push_back(p.back(i, std::abs(u * a.scale_a) + std::abs(v * a.scale_b) + std::abs(d * a.scale_x) +
                                          std::abs(static_cast<long double>(a.shift))));
      scale_of_x.push_back(std::abs(g * b.scale_b) +
                           m * (std::abs(u * b.scale_a) + std::abs(d * b.scale_x) + std::abs(b.shift)));
    }
    for (auto const order : test::arrangements) {
      CAPTURE(test::name_of(order));
      second_order_tensors<T> tensors{order, p};
      auto const check = [&](test::tensor<T>& got, std::vector<long double> const& expected,
                             std::vector<long double> const& scale) {
        auto const values = got.values();
        // Four products and sums, each rounded to a number of the arithmetic; then once to an element.
        constexpr double arithmetic = 8 * static_cast<double>(std::numeric_limits<accumulate_t<T>>::epsilon());
        constexpr double element = sizeof(T) == 2 ? 0x1p-11 : 0;
        long double worst = 0; // of what is allowed
        for (std::size_t i = 0; i < values.size(); ++i) {
          if (sizeof(T) == 2 && std::abs(expected[i]) > 6e4L) continue; // infinite as it should be, or nearly
          long double const allowed =
              arithmetic * scale[i] + element * std::abs(expected[i]) + (sizeof(T) == 2 ? 0x1p-25L : 0);
          long double const off = std::abs(p.wide(values[i]) - expected[i]);
          if (!(off <= allowed)) worst = std::max(worst, allowed > 0 && off < INFINITY ? off / allowed : INFINITY);
        }
        CHECK(worst <= 1);
        CHECK(got.intact());
      };
      auto of = tensors.operands(p);
      host::double_backward_elemt<T>(host::serial_executor{}, of, p.for_dy, p.for_x);
      check(tensors.to_dy, to_dy, scale_of_dy);
      check(tensors.to_x, to_x, scale_of_x);
      // Over what it reads, and one without the other.
      of.to_x = {}, of.to_dy = tensors.dy.view();
      host::double_backward_elemt<T>(host::serial_executor{}, of, p.for_dy, p.for_x);
      check(tensors.dy, to_dy, scale_of_dy);
      tensors.dy = {order, p.n, p.c, p.s, p.dy};
      of = tensors.operands(p);
      of.to_dy = {}, of.to_x = tensors.x.view();
      host::double_backward_elemt<T>(host::serial_executor{}, of, p.for_dy, p.for_x);
      check(tensors.x, to_x, scale_of_x);
    }
  });
}

TEST_CASE("what a scale of 0 meets in a double backward pass may be anything") {
  second_order_problem<float> p{2, 3, 37, true, true, false, mask_kind::none, 1};
  p.prepare();
  constexpr float infinite = std::numeric_limits<float>::infinity();
  for (auto* const tensor : {&p.dy, &p.x, &p.u, &p.v}) tensor->assign(tensor->size(), infinite);
  for (auto* const combinations : {&p.for_dy, &p.for_x})
    for (auto& each : *combinations) each = {0, 0, each.mean, 0, 2};
  for (auto const order : test::arrangements) {
    CAPTURE(test::name_of(order));
    second_order_tensors<float> tensors{order, p};
    host::double_backward_elemt<float>(host::serial_executor{}, tensors.operands(p), p.for_dy, p.for_x);
    CHECK(tensors.to_dy.values() == std::vector<float>(p.x.size(), 2));
    CHECK(tensors.to_x.values() == std::vector<float>(p.x.size(), 2));
  }
}

TEST_CASE_TEMPLATE("a double backward pass in blocks gives the bits of its sums and of its map, whoever runs it", T,
                   float, bfloat16 AND_UNSANITIZED(double)) {
  int given = 0;
  // Blocks of several channels and of one, blocks that have to be shared, and tensors that are one block.
  for (auto const& e : {test::extents{4, 37, 1000}, {5, 16, 6000}, {6, 5, 40000}, {130, 70, 19}, {3, 4, 300}})
    for (auto const masked : {mask_kind::none, mask_kind::normalized, mask_kind::zeroed})
      for (auto const order : {test::arrangement::nchw, test::arrangement::nhwc, test::arrangement::padded_rows}) {
        given = (given + 3) % 8;
        bool const masks = masked != mask_kind::none;
        bool const large = e.n * e.c * e.s > 400'000;
        if ((masks && order == test::arrangement::padded_rows) || (large && order != test::arrangement::nchw)) continue;
        if (test::sanitized && large && masks) continue;
        second_order_problem<T> p{
            e.n, e.c, e.s, given < 6, (given & 2) != 0, (given & 1) != 0, masked, masks ? 1.0 / 3 : 1};
        CAPTURE(test::name_of(e));
        CAPTURE(given);
        CAPTURE(static_cast<int>(masked));
        CAPTURE(test::name_of(order));
        p.prepare();
        second_order_tensors<T> tensors{order, p};
        auto const of = tensors.operands(p);
        std::array<std::vector<double>, 5> sums, expected;
        for (auto* const all : {&sums, &expected})
          for (auto& each : *all) each.assign(static_cast<std::size_t>(p.c), -1);
        auto const combine = [&](std::array<std::vector<double>, 5> const& by, std::int64_t first,
                                 std::int64_t length) {
          for (auto c = static_cast<std::size_t>(first); c < static_cast<std::size_t>(first + length); ++c) {
            p.for_dy[c].shift = by[0][c] + by[3][c];
            p.for_x[c].shift = by[1][c] + by[2][c] + by[4][c];
          }
        };
        host::double_backward_reduce<T>(host::serial_executor{}, of,
                                        {expected[0], expected[1], expected[2], expected[3], expected[4]});
        combine(expected, 0, p.c);
        host::double_backward_elemt<T>(host::serial_executor{}, of, p.for_dy, p.for_x);
        auto const to_dy = tensors.to_dy.values(), to_x = tensors.to_x.values();
        auto const run = [&](auto const& exec) {
          tensors.to_dy = tensors.to_x = {order, p.n, p.c, p.s};
          for (auto* const combinations : {&p.for_dy, &p.for_x})
            for (auto& each : *combinations) each.shift = 0;
          std::vector<std::atomic<int>> finished(static_cast<std::size_t>(p.c));
          host::double_backward_in_blocks<T>(exec, tensors.operands(p), {sums[0], sums[1], sums[2], sums[3], sums[4]},
                                             p.for_dy, p.for_x, [&](std::int64_t first, std::int64_t length) {
                                               combine(sums, first, length);
                                               for (std::int64_t c = first; c < first + length; ++c)
                                                 ++finished[static_cast<std::size_t>(c)];
                                             });
          CHECK(std::ranges::all_of(finished, [](auto const& times) { return times == 1; }));
          CHECK(sums == expected);
          CHECK(test::same_bits(tensors.to_dy.values(), to_dy));
          CHECK(test::same_bits(tensors.to_x.values(), to_x));
          CHECK(tensors.to_dy.intact());
          CHECK(tensors.to_x.intact());
        };
        run(host::serial_executor{});
        run(test::shuffling_executor{2});
        run(test::shuffling_executor{4});
        run(test::lone_executor{});
      }
}
