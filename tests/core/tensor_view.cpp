#include <numeric>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/core/tensor_view.hpp>

using namespace syncnorm;

namespace {

constexpr std::int64_t n = 2, c = 3, s = 4;

std::vector<int> numbers() {
  std::vector<int> values(n * c * s);
  std::iota(values.begin(), values.end(), 0);
  return values;
}

template <class Index>
void check_elements(tensor_view<int> const& x, Index const& index) {
  for (std::int64_t i = 0; i < x.samples; ++i)
    for (std::int64_t j = 0; j < x.channels; ++j)
      for (std::int64_t k = 0; k < x.spatial; ++k) CHECK(x(i, j, k) == index(i, j, k));
}

} // namespace

TEST_CASE("factories name the layouts") {
  auto memory = numbers();
  check_elements(nchw(memory.data(), n, c, s), [](auto i, auto j, auto k) { return (i * c + j) * s + k; });
  check_elements(nhwc(memory.data(), n, c, s), [](auto i, auto j, auto k) { return (i * s + k) * c + j; });
  check_elements(tbc(memory.data(), s, n, c), [](auto i, auto j, auto k) { return (k * n + i) * c + j; });
  check_elements(nc(memory.data(), n, c), [](auto i, auto j, auto) { return i * c + j; });
  CHECK(nc(memory.data(), n, c).spatial == 1);
  CHECK(tbc(memory.data(), s, n, c).samples == n);
}

TEST_CASE("sizes count elements") {
  constexpr auto x = nchw<float>(nullptr, n, c, s);
  static_assert(x.size() == 24 && x.count() == 8);
  static_assert(nchw<float>(nullptr, 0, 3, 4).size() == 0);
  static_assert(tensor_view<float>{}.size() == 0);
  std::int64_t const large = std::int64_t{1} << 20;
  CHECK(nchw<float>(nullptr, large, 3, large).count() == large * large);
}

TEST_CASE("ranges of channels and samples share the elements") {
  auto memory = numbers();
  for (auto const& x : {nchw(memory.data(), n, c, s), nhwc(memory.data(), n, c, s), tbc(memory.data(), s, n, c)}) {
    auto const channels = x.channel_range(1, 2);
    CHECK(channels.channels == 2);
    CHECK(channels.samples == n);
    check_elements(channels, [&](auto i, auto j, auto k) { return x(i, j + 1, k); });
    auto const samples = x.sample_range(1, 1);
    CHECK(samples.samples == 1);
    CHECK(samples.channels == c);
    check_elements(samples, [&](auto, auto j, auto k) { return x(1, j, k); });
    CHECK(x.channel_range(3, 0).size() == 0);
  }
}

TEST_CASE("ranges of no memory have none") {
  auto const x = nchw<float>(nullptr, n, c, s);
  CHECK(x.channel_range(1, 1).data == nullptr);
  CHECK(x.sample_range(1, 1).data == nullptr);
}

TEST_CASE("a view of mutable elements is one of constant elements") {
  auto memory = numbers();
  tensor_view<int const> const x = nchw(memory.data(), n, c, s);
  CHECK(&x(1, 2, 3) == &memory[23]);
  static_assert(std::is_convertible_v<tensor_view<int>, tensor_view<int const>>);
  static_assert(!std::is_convertible_v<tensor_view<int const>, tensor_view<int>>);
  static_assert(std::is_trivially_copyable_v<tensor_view<int>>);
}
