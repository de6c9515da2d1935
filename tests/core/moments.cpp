#include <cmath>
#include <random>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/core/channel_moments.hpp>
#include <syncnorm/core/moments.hpp>

using syncnorm::moments, syncnorm::merge;

namespace {

moments<double> of(std::vector<double> const& values) {
  moments<double> all;
  for (double const x : values) all = merge(all, moments<double>{1, x, 0});
  return all;
}

void check_same(moments<double> const& a, moments<double> const& b) {
  CHECK(a.count == b.count);
  CHECK(a.mean == doctest::Approx(b.mean).epsilon(1e-14));
  CHECK(a.m2 == doctest::Approx(b.m2).epsilon(1e-13));
}

} // namespace

TEST_CASE("the moments of single values merge to those of the set") {
  auto const all = of({1, 2, 4, 9});
  CHECK(all.count == 4);
  CHECK(all.mean == 4);
  CHECK(all.m2 == doctest::Approx(38));
  CHECK(all.variance() == doctest::Approx(9.5));
  CHECK(all.unbiased_variance() == doctest::Approx(38.0 / 3));
}

TEST_CASE("nothing is the neutral element") {
  moments<double> const nothing, some{3, 2.5, 7};
  for (auto const& all : {merge(nothing, some), merge(some, nothing)}) {
    CHECK(all.count == 3);
    CHECK(all.mean == 2.5);
    CHECK(all.m2 == 7);
  }
  CHECK(merge(nothing, nothing).count == 0);
  CHECK(nothing.variance() == 0);
}

TEST_CASE("an empty set's mean and spread are never read") {
  moments<double> const empty{0, NAN, NAN}, some{3, 2.5, 7};
  CHECK(merge(empty, some).mean == 2.5);
  CHECK(merge(some, empty).m2 == 7);
}

TEST_CASE("merging is associative and commutative up to rounding") {
  std::mt19937 random{1};
  std::normal_distribution<double> normal{3, 2};
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<moments<double>> sets;
    for (int i = 0; i < 3; ++i) {
      std::vector<double> values(random() % 40 + 1);
      for (auto& x : values) x = normal(random);
      sets.push_back(of(values));
    }
    check_same(merge(merge(sets[0], sets[1]), sets[2]), merge(sets[0], merge(sets[1], sets[2])));
    check_same(merge(sets[0], sets[1]), merge(sets[1], sets[0]));
  }
}

TEST_CASE("counts beyond 32 bits merge") {
  std::int64_t const many = std::int64_t{1} << 40;
  auto const all = merge(moments<double>{many, 1, 4}, moments<double>{many, 3, 4});
  CHECK(all.count == 2 * many);
  CHECK(all.mean == 2);
  CHECK(all.m2 == 8 + 2 * static_cast<double>(many));
}

TEST_CASE("moments are constant expressions") {
  static_assert(merge(moments<float>{1, 1, 0}, moments<float>{1, 3, 0}).mean == 2);
  static_assert(merge(moments<float>{1, 1, 0}, moments<float>{1, 3, 0}).m2 == 2);
}

TEST_CASE("channels merge as single channels do, and nothing is read of what has no elements") {
  std::vector<double> const mean{1, -2, 3.5}, m2{4, 0, 0.25}, mean_more{0.5, 7, -1}, m2_more{1, 2, 3};
  auto got_mean = mean, got_m2 = m2;
  syncnorm::merge_channels(5, got_mean, got_m2, 3, mean_more, m2_more);
  for (std::size_t c = 0; c < mean.size(); ++c)
    check_same({8, got_mean[c], got_m2[c]},
               merge(moments<double>{5, mean[c], m2[c]}, moments<double>{3, mean_more[c], m2_more[c]}));

  std::vector<double> const none(3, NAN);
  auto const merged_mean = got_mean, merged_m2 = got_m2;
  syncnorm::merge_channels(8, got_mean, got_m2, 0, none, none);
  CHECK((got_mean == merged_mean && got_m2 == merged_m2));
  auto from_none_mean = none, from_none_m2 = none;
  syncnorm::merge_channels(0, from_none_mean, from_none_m2, 5, mean, m2);
  CHECK((from_none_mean == mean && from_none_m2 == m2));
}
