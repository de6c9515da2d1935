#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/host/group_scaling.hpp>
#include <syncnorm/host/power_backward.hpp>
#include <syncnorm/host/power_forward.hpp>

#include <host/tensors.hpp>

#include <support/message_of.hpp>

using namespace syncnorm;

namespace {

enum class masking { none, some, all };
constexpr masking maskings[] = {masking::none, masking::some, masking::all};

/// The numbers of groups to try for so many channels: none, one, as many as there are channels, and one between.
std::vector<std::int64_t> groupings(std::int64_t channels) {
  std::vector<std::int64_t> counts{0, 1};
  if (channels > 1) counts.push_back(channels);
  for (std::int64_t const divisor : {2, 3, 5, 7})
    if (channels % divisor == 0 && channels > divisor) return counts.push_back(divisor), counts;
  return counts;
}

/// Inputs, dense `[N, C, S]`, and what the passes make of them, by the definitions, in long double.
template <class T>
struct power_problem {
  using A = accumulate_t<T>;
  std::int64_t n, c, s, width;
  host::channel_scaling scaling;
  bool masks;
  std::vector<T> x, dy;
  std::vector<std::uint8_t> mask; // a hole after each sample, and samples inside
  std::vector<double> inv_root, dy_scale, u_scale;
  std::vector<A> gamma, beta;
  std::vector<long double> counted, masked, y, sum_dy, sum_dy_u, dx, products;
  std::int64_t positions = 0;
  long double dx_terms = 0; // what the terms of dx, which may cancel, amount to

  power_problem(test::extents const& e, std::int64_t groups, masking how)
      : n{e.n}, c{e.c}, s{e.s}, width{groups == 0 ? 0 : e.c / groups}, scaling{groups, 1e-3},
        masks{how != masking::none}, x{test::deviates<T>(n, c, s, 1)}, dy{test::deviates<T>(n, c, s, 2, 0.2)},
        mask(static_cast<std::size_t>(n * s * 2), 9) {
    for (std::int64_t i = 0; i < c; ++i) {
      auto const channel = static_cast<double>(i);
      inv_root.push_back(1.5 + std::cos(channel) / 3);
      dy_scale.push_back(0.75 + std::sin(channel) / 4);
      u_scale.push_back(-0.25 + std::cos(channel) / 8);
      gamma.push_back(static_cast<A>(1 + channel / 100));
      beta.push_back(static_cast<A>(-channel / 50));
    }
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < s; ++j) {
        bool const is_masked = how == masking::all || (how == masking::some && (3 * j + i) % 4 == 0);
        mask[static_cast<std::size_t>(2 * (j * n + i))] = is_masked ? 0 : 7;
        positions += is_masked ? 0 : 1;
        if (!is_masked) continue;
        for (std::int64_t k = 0; k < c; k += 2) spoil(i, k, j);
      }
    solve();
  }

  /// What is not in a mask is not read from it.
  [[nodiscard]] mask_view view() const {
    if (!masks) return {};
    return {mask.data(), n, s, 2, 2 * n};
  }
  [[nodiscard]] bool is_masked(std::int64_t i, std::int64_t j) const { return masks && !view()(i, j); }
  [[nodiscard]] affine_parameters<A> affine(bool given) const {
    return {given ? std::span<A const>{gamma} : std::span<A const>{},
            given ? std::span<A const>{beta} : std::span<A const>{}};
  }

private:
  std::size_t at(std::int64_t i, std::int64_t k, std::int64_t j) const {
    return static_cast<std::size_t>((i * c + k) * s + j);
  }
  /// Makes padding stand out.
  void spoil(std::int64_t i, std::int64_t k, std::int64_t j) {
    x[at(i, k, j)] = T(A{30});
    dy[at(i, k, j)] = T(A{-20});
  }

  void solve() {
    auto const channels = static_cast<std::size_t>(c);
    for (auto* sums : {&counted, &masked, &sum_dy, &sum_dy_u, &products}) sums->assign(channels, 0);
    y.resize(x.size());
    dx.resize(x.size());
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < s; ++j) {
        bool const out = is_masked(i, j);
        for (std::int64_t begin = 0; begin < c; begin += width == 0 ? c : width) {
          std::int64_t const end = width == 0 ? c : begin + width;
          long double root = 1, along = 0;
          if (width != 0) {
            long double squares = 0;
            for (auto k = begin; k < end; ++k) squares += std::pow(static_cast<long double>(x[at(i, k, j)]), 2);
            root = 1 / std::sqrt(squares / width + 1e-3L);
          }
          auto const u = [&](std::int64_t k) { return static_cast<long double>(x[at(i, k, j)]) * root; };
          auto const du = [&](std::int64_t k) {
            auto const ch = static_cast<std::size_t>(k);
            return static_cast<long double>(dy[at(i, k, j)]) * dy_scale[ch] + u(k) * u_scale[ch];
          };
          for (auto k = begin; width != 0 && k < end; ++k) along += du(k) * u(k) / width;
          for (auto k = begin; k < end; ++k) {
            auto const ch = static_cast<std::size_t>(k);
            auto const g = static_cast<long double>(dy[at(i, k, j)]);
            (out ? masked : counted)[ch] += u(k) * u(k);
            y[at(i, k, j)] =
                u(k) * inv_root[ch] * static_cast<long double>(gamma[ch]) + static_cast<long double>(beta[ch]);
            dx[at(i, k, j)] = out ? 0 : width == 0 ? du(k) : root * (du(k) - u(k) * along);
            if (out) continue;
            dx_terms = std::max(dx_terms, root * (std::abs(du(k)) + std::abs(u(k) * along)));
            sum_dy[ch] += g;
            sum_dy_u[ch] += g * u(k);
            products[ch] += std::abs(g) * (1 + std::abs(u(k)));
          }
        }
      }
  }
};

/// Sums are as accurate as their terms allow, which may cancel.
template <class T>
bool close_sums(std::vector<double> const& got, std::vector<long double> const& expected,
                std::vector<long double> const& scale) {
  double const tolerance = sizeof(T) == 8 ? 1e-12 : 1e-5; // sums of the 16-bit type are those of its floats
  for (std::size_t i = 0; i < got.size(); ++i)
    if (!(std::abs(static_cast<long double>(got[i]) - expected[i]) <= tolerance * scale[i])) return false;
  return got.size() == expected.size();
}

template <class T>
bool close_dx(std::vector<T> const& got, power_problem<T> const& p) {
  for (std::size_t i = 0; i < got.size(); ++i)
    if (!(std::abs(static_cast<long double>(got[i]) - p.dx[i]) <= test::accuracy<T> * p.dx_terms)) return false;
  return got.size() == p.dx.size();
}

template <class T>
void check_problem(power_problem<T> const& p, test::arrangement order) {
  constexpr host::serial_executor serial{};
  test::shuffling_executor const shuffled{};
  auto const channels = static_cast<std::size_t>(p.c);
  std::vector<double> counted(channels, -1), masked(counted), again(counted), more(counted);
  test::tensor<T> x{order, p.n, p.c, p.s, p.x}, y{order, p.n, p.c, p.s, 1}, z{order, p.n, p.c, p.s};

  CHECK(host::count_positions(p.n, p.s, p.view()) == p.positions);
  host::second_moments(serial, x.input(), p.view(), p.scaling, counted, masked);
  CHECK(close_sums<T>(counted, p.counted, p.counted));
  CHECK(close_sums<T>(masked, p.masked, p.masked));
  host::power_forward<T>(shuffled, x.view(), y.view(), p.view(), p.scaling, p.inv_root, p.affine(true), again, more);
  CHECK(close_sums<T>(again, p.counted, p.counted));
  CHECK(close_sums<T>(more, p.masked, p.masked));
  CHECK(test::error_of(y.values(), p.y) <= test::accuracy<T>);
  CHECK(y.intact());
  host::power_normalize<T>(serial, x.view(), z.view(), p.scaling, p.inv_root, p.affine(true));
  CHECK(test::error_of(z.values(), p.y) <= test::accuracy<T>);
  auto in_place = x;
  host::power_forward<T>(serial, in_place.view(), in_place.view(), p.view(), p.scaling, p.inv_root, p.affine(true),
                         counted, masked);
  CHECK(test::error_of(in_place.values(), y.values()) == 0);
  CHECK(counted == again); // the same bits, whatever the executor
  CHECK(masked == more);

  test::tensor<T> dy{order, p.n, p.c, p.s, p.dy}, dx{order, p.n, p.c, p.s, 1}, same{order, p.n, p.c, p.s};
  host::power_backward<T>(serial, dy.view(), x.view(), dx.view(), p.view(), p.scaling, p.dy_scale, p.u_scale, counted,
                          masked);
  CHECK(close_sums<T>(counted, p.sum_dy, p.products));
  CHECK(close_sums<T>(masked, p.sum_dy_u, p.products));
  CHECK(close_dx(dx.values(), p));
  CHECK(dx.intact());
  host::power_backward<T>(shuffled, dy.view(), x.view(), same.view(), p.view(), p.scaling, p.dy_scale, p.u_scale, again,
                          more);
  CHECK((test::error_of(same.values(), dx.values()) == 0 && again == counted && more == masked));
  host::power_backward<T>(serial, dy.view(), x.view(), syncnorm::tensor_view<T>{}, p.view(), p.scaling, {}, {}, again,
                          more);
  CHECK((close_sums<T>(again, p.sum_dy, p.products) && close_sums<T>(more, p.sum_dy_u, p.products)));
  for (auto* const overwritten : {&dy, &x}) {
    auto const before = *overwritten;
    host::power_backward<T>(serial, dy.view(), x.view(), overwritten->view(), p.view(), p.scaling, p.dy_scale,
                            p.u_scale, again, more);
    CHECK((test::error_of(overwritten->values(), dx.values()) == 0 && again == counted && more == masked));
    *overwritten = before;
  }
}

} // namespace

TEST_CASE_TEMPLATE("the passes of power norm are those of their definitions", T, float,
                   test::if_sanitized<bfloat16, test::brief> AND_UNSANITIZED(double)) {
  std::size_t turn = 0, problems = 0;
  for (auto const& shape : test::shapes)
    for (auto const groups : groupings(shape.c))
      for (auto const how : maskings) {
        if (test::sanitized && problems++ % 5 > 0) continue;
        power_problem<T> const p{shape, groups, how};
        // Every arrangement for small shapes; for the others they take turns.
        bool const all = !test::sanitized && shape.n * shape.c * shape.s < 4000;
        for (std::size_t i = 0; i < (all ? std::size(test::arrangements) : 2); ++i) {
          auto const order = test::arrangements[++turn % std::size(test::arrangements)];
          CAPTURE(test::name_of(shape));
          CAPTURE(test::name_of(order));
          CAPTURE(groups);
          CAPTURE(static_cast<int>(how));
          check_problem(p, order);
        }
      }
}

TEST_CASE_TEMPLATE("large outputs, which are written past the cache, have the same bits", T,
                   float AND_UNSANITIZED(bfloat16)) {
  constexpr std::int64_t line = 64 / static_cast<std::int64_t>(sizeof(T)), channels = 20, positions = line;
  std::int64_t const n = host::streaming_bytes / (channels * positions * static_cast<std::int64_t>(sizeof(T))) + 40;
  auto const size = static_cast<std::size_t>(n * channels * positions);
  std::vector<T> x(size), dy(size), memory(size + 2 * line);
  for (std::size_t i = 0; i < size; ++i) {
    x[i] = T(static_cast<float>(i % 1013) / 512);
    dy[i] = T(static_cast<float>(i % 769) / 512 - 1);
  }
  auto* const first_line = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) / sizeof(T);
  auto const check = [&](auto const& view, std::size_t of_channels, std::initializer_list<std::int64_t> all_groups) {
    std::vector<double> ones(of_channels, 1.0), a(of_channels), b(of_channels);
    auto const read = [&](std::vector<T> const& values) { return view(values.data()); };
    for (auto const groups : all_groups) {
      std::vector<std::vector<T>> y, dx;
      std::vector<std::vector<double>> sums;
      for (T* const out : {first_line, first_line + 1}) { // of which the second begins in the middle of a line
        host::channel_scaling const scaling{groups, 1e-3};
        host::power_forward<T>(host::serial_executor{}, read(x), view(out), {}, scaling, ones, {}, a, b);
        y.emplace_back(out, out + view(out).size());
        sums.push_back(a);
        host::power_backward<T>(host::serial_executor{}, read(dy), read(x), view(out), {}, scaling, ones, ones, a, b);
        dx.emplace_back(out, out + view(out).size());
        for (auto const& each : {a, b}) sums.push_back(each);
      }
      for (std::size_t i = 0; i < 3; ++i) CHECK(sums[i] == sums[i + 3]);
      for (auto const& two : {y, dx})
        CHECK(std::ranges::equal(std::as_bytes(std::span{two[0]}), std::as_bytes(std::span{two[1]})));
    }
  };
  // Groups of whole lines or not, where channels are contiguous.
  check([&](auto* data) { return nhwc(data, n, channels * positions, 1); }, channels * positions, {5, 1});
  if (!test::sanitized) {
    check([&](auto* data) { return nhwc(data, n, channels * positions, 1); }, channels * positions, {0, 16});
    check([&](auto* data) { return nhwc(data, n, channels * positions - 1, 1); }, channels * positions - 1, {0, 1});
    check([&](auto* data) { return nchw(data, n, 2, channels * positions / 2); }, 2, {0});
    check([&](auto* data) { return nchw(data, n, 1, channels * positions - 1); }, 1, {0});
    check([&](auto* data) { return nc(data, n, channels * positions); }, channels * positions, {0, 16});
  }
  check([&](auto* data) { return nchw(data, n, channels, positions); }, channels, {4});
  check([&](auto* data) { return nchw(data, n, 1, channels * positions); }, 1, {1});
  if (!test::sanitized) check([&](auto* data) { return nchw(data, n, channels, positions); }, channels, {0});
}

TEST_CASE("without parameters y is u by its root") {
  power_problem<double> p{{3, 4, 5}, 2, masking::none};
  test::tensor<double> x{test::arrangement::nhwc, 3, 4, 5, p.x}, with{test::arrangement::nhwc, 3, 4, 5},
      without{test::arrangement::nhwc, 3, 4, 5};
  p.gamma.assign(4, 1);
  p.beta.assign(4, 0);
  host::power_normalize<double>(host::serial_executor{}, x.view(), with.view(), p.scaling, p.inv_root, p.affine(true));
  host::power_normalize<double>(host::serial_executor{}, x.view(), without.view(), p.scaling, p.inv_root,
                                p.affine(false));
  CHECK(with.values() == without.values());
}

TEST_CASE("what is no number in padding leaves no trace in the sums nor in dx") {
  auto const nan = std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t const groups : {0, 3})
    for (auto const order : test::arrangements)
      for (std::int64_t const s : {3, 21}) {
        std::int64_t const n = 2, c = 18;
        std::vector<float> x(static_cast<std::size_t>(n * c * s), 0.5F), dy(x);
        std::vector<std::uint8_t> mask(static_cast<std::size_t>(n * s), 1);
        for (std::int64_t i = 0; i < n; ++i)
          for (std::int64_t j = i + 1; j < s; ++j) {
            mask[static_cast<std::size_t>(i * s + j)] = 0;
            for (std::int64_t k = 0; k < c; ++k)
              x[static_cast<std::size_t>((i * c + k) * s + j)] = dy[static_cast<std::size_t>((i * c + k) * s + j)] =
                  nan;
          }
        test::tensor<float> xs{order, n, c, s, x}, dys{order, n, c, s, dy}, dx{order, n, c, s};
        std::vector<double> a(18), b(18), ones(18, 1.0);
        auto const view = mask_of(mask.data(), n, s);
        host::second_moments(host::serial_executor{}, xs.input(), view, {groups, 0}, a, b);
        for (double const value : a) CHECK(value == doctest::Approx(groups == 0 ? 0.75 : 3.0));
        host::power_backward<float>(host::serial_executor{}, dys.view(), xs.view(), dx.view(), view, {groups, 0}, ones,
                                    ones, a, b);
        for (double const value : a) CHECK(value == doctest::Approx(1.5));
        for (double const value : b) CHECK(value == doctest::Approx(groups == 0 ? 0.75 : 1.5));
        auto const got = dx.values();
        for (std::size_t i = 0; i < got.size(); ++i) {
          auto const j = static_cast<std::int64_t>(i) % s, sample = static_cast<std::int64_t>(i) / (c * s);
          if (j > sample)
            CHECK(got[i] == 0);
          else
            CHECK(std::isfinite(got[i]));
        }
      }
}

TEST_CASE_TEMPLATE("group scaling and its gradient are those of their definitions", T, float,
                   test::brief AND_UNSANITIZED(double)) {
  std::size_t cells = 0;
  for (auto const& shape : test::shapes)
    for (auto const groups : groupings(shape.c)) {
      if (groups == 0 || shape.n * shape.c * shape.s > 9000) continue;
      power_problem<T> p{shape, groups, masking::none};
      std::vector<long double> y, dx;
      auto const width = static_cast<std::size_t>(p.width), s = static_cast<std::size_t>(p.s);
      y.resize(p.x.size()), dx.resize(p.x.size());
      for (std::size_t first = 0; first < p.x.size(); first += width * s)
        for (std::size_t j = 0; j < s; ++j) {
          long double squares = 0, products = 0;
          auto const each = [&](auto const& f) {
            for (std::size_t k = 0; k < width; ++k) f(first + k * s + j);
          };
          each([&](std::size_t i) { squares += std::pow(static_cast<long double>(p.x[i]), 2); });
          each(
              [&](std::size_t i) { products += static_cast<long double>(p.dy[i]) * static_cast<long double>(p.x[i]); });
          auto const m = squares / static_cast<long double>(width) + 1e-3L;
          each([&](std::size_t i) {
            y[i] = static_cast<long double>(p.x[i]) / std::sqrt(m);
            // By the chain rule: the square root's own derivative, and that of the mean of squares.
            dx[i] = static_cast<long double>(p.dy[i]) / std::sqrt(m) -
                    products * static_cast<long double>(p.x[i]) / (static_cast<long double>(width) * m * std::sqrt(m));
          });
        }
      for (auto const order : test::arrangements) {
        if (test::sanitized && cells++ % 5 > 0) continue;
        CAPTURE(test::name_of(shape));
        CAPTURE(test::name_of(order));
        CAPTURE(groups);
        test::tensor<T> x{order, p.n, p.c, p.s, p.x}, dy{order, p.n, p.c, p.s, p.dy}, out{order, p.n, p.c, p.s, 1};
        host::group_scaling<T>(test::shuffling_executor{}, x.view(), out.view(), p.scaling);
        CHECK(test::error_of(out.values(), y) <= test::accuracy<T>);
        CHECK(out.intact());
        host::group_scaling_backward<T>(test::shuffling_executor{}, dy.view(), x.view(), out.view(), p.scaling);
        CHECK(test::error_of(out.values(), dx) <= test::accuracy<T>);
        CHECK(out.intact());
      }
    }
}

TEST_CASE("wide groups of equal squares, whose sums all round the same way, have the root that they should") {
  constexpr std::int64_t n = 2, c = 8192, s = 20;
  for (float const value : {0.1F, 0.7F, 1.3F, 3.9F})
    for (bool const rows : {true, false}) {
      std::vector<float> x(static_cast<std::size_t>(n * c * s), value), y(x.size()), dx(x.size());
      for (std::size_t i = 0; i < x.size(); i += 2) x[i] = -value;
      auto const view = [&](auto& of) { return rows ? nchw(of.data(), n, c, s) : nhwc(of.data(), n, c, s); };
      host::channel_scaling const scaling{1, 0};
      host::group_scaling<float>(host::serial_executor{}, view(x), view(y), scaling);
      CHECK(std::abs(std::abs(y[0]) - 1) < 1e-6);
      // dy = u, so that the mean of dy·u is 1 and nothing is left.
      host::group_scaling_backward<float>(host::serial_executor{}, view(y), view(x), view(dx), scaling);
      CHECK(std::abs(dx[0]) < 2e-6 / value);
    }
}

TEST_CASE("what group scaling cannot do is said") {
  std::vector<float> memory(24);
  constexpr host::serial_executor serial{};
  auto const x = nhwc(memory.data(), 2, 4, 3);
  auto const forward = [&](tensor_view<float> in, tensor_view<float> out, host::channel_scaling how) {
    return test_support::message_of<invalid_argument_error>([&] { host::group_scaling<float>(serial, in, out, how); });
  };
  auto null = x;
  null.data = nullptr;
  CHECK(forward(x, x, {3}) == "group_scaling: 4 channels cannot be divided into 3 groups");
  CHECK(forward(x, x, {0}) == "group_scaling: 4 channels cannot be divided into 0 groups");
  CHECK(forward(x, x, {-2}) == "group_scaling: 4 channels cannot be divided into -2 groups");
  CHECK(forward(x, x.sample_range(0, 1), {2}) == "group_scaling: y is [1, 4, 3], expected [2, 4, 3] as x");
  CHECK(forward(null, x, {2}) == "group_scaling: x is null, its extents are [2, 4, 3]");
  CHECK(forward(x, null, {2}) == "group_scaling: y is null, its extents are [2, 4, 3]");
  CHECK(forward(x.sample_range(0, -1), x, {2}).starts_with("group_scaling: x has a negative extent"));
  CHECK(forward(x, x, {2, -1}).starts_with("group_scaling: eps is"));
  CHECK(test_support::message_of<invalid_argument_error>([&] {
          host::group_scaling_backward<float>(serial, x.channel_range(0, 2), x, x, {2});
        }) == "group_scaling_backward: dy is [2, 2, 3], expected [2, 4, 3] as x");
  auto far = x;
  far.stride_n = std::int64_t{1} << 51;
  CHECK(forward(far, x, {2}) ==
        "group_scaling: x has the strides [2251799813685248, 1, 4], which no memory has room for");
  CHECK(forward(x, far, {2}).starts_with("group_scaling: y has the strides [2251799813685248, 1, 4]"));
  auto many = x;
  many.samples = many.spatial = std::int64_t{1} << 32;
  CHECK(forward(many, many, {2}).starts_with("group_scaling: x has more elements than can be counted: [4294967296, "));
  std::vector<float> longer(26);
  auto const before = nhwc(longer.data(), 2, 4, 3), after = nhwc(longer.data() + 2, 2, 4, 3);
  CHECK(forward(before, after, {2}) == "group_scaling: y and x overlap in memory, and are not the same");
  CHECK(forward(nchw(memory.data(), 2, 4, 3), x, {2}).starts_with("group_scaling: y and x overlap in memory"));
  auto one_row = x;
  one_row.stride_n = 0;
  CHECK(forward(before, one_row, {2}) == "group_scaling: y has the strides [0, 1, 4], by which its elements overlap");
  CHECK(forward(one_row, before, {2}) == "nothing was thrown");
  CHECK(test_support::message_of<invalid_argument_error>([&] {
          host::group_scaling_backward<float>(serial, before, x, after, {2});
        }) == "group_scaling_backward: dx and dy overlap in memory, and are not the same");
  CHECK(forward(x, x, {4}) == "nothing was thrown");
  auto const empty = x.sample_range(0, 0);
  CHECK(forward(empty, empty, {2}) == "nothing was thrown");
}
