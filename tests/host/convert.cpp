#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <doctest/doctest.h>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/detail/simd.hpp>
#include <syncnorm/host/detail/streaming.hpp>

using namespace syncnorm;
namespace vectors = syncnorm::host::detail;

namespace {

/// Whether vectors of `Lanes` convert all 65536 patterns, and the floats around each value and each tie, with the bits
/// of the scalar conversion.
template <class T, int Lanes>
int count_wrong() {
  int wrong = 0;
  std::array<T, Lanes> elements, back;
  std::array<float, Lanes> values;
  for (unsigned first = 0; first < 65536; first += Lanes) {
    for (unsigned i = 0; i < Lanes; ++i) elements[i] = T::from_bits(static_cast<std::uint16_t>(first + i));
    auto const wide = vectors::load<Lanes>(elements.data());
    std::memcpy(values.data(), &wide, sizeof wide);
    for (unsigned i = 0; i < Lanes; ++i) {
      float const expected = elements[i];
      wrong += std::isnan(expected) ? !std::isnan(values[i])
                                    : std::bit_cast<unsigned>(values[i]) != std::bit_cast<unsigned>(expected);
    }
    // The last 13, or 16, bits of a float are rounded away: none, one, a tie and its neighbours, all but one.
    for (unsigned const added : {0U, 1U, 0xfffU, 0x1000U, 0x1001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      std::array<unsigned, Lanes> wide_bits{};
      for (unsigned i = 0; i < Lanes; ++i) {
        float const value = elements[i];
        wide_bits[i] = std::bit_cast<unsigned>(value) + (std::isnan(value) ? 0 : added);
      }
      for (unsigned i = 0; i < Lanes; ++i) values[i] = std::bit_cast<float>(wide_bits[i]);
      vectors::vector_t<float, Lanes> v;
      std::memcpy(&v, values.data(), sizeof v);
      vectors::store<Lanes>(back.data(), v);
      for (unsigned i = 0; i < Lanes; ++i) wrong += back[i].bits() != T{values[i]}.bits();
    }
  }
  return wrong;
}

/// Whether vectors of `Lanes` are rounded to 8-bit integers as single numbers are, and become numbers as these do.
template <int Lanes>
int count_wrong_integers() {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> numbers{infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 1e30F, -1e30F, 3e9F, -3e9F};
  for (int eighths = -1100; eighths <= 1100; ++eighths) numbers.push_back(static_cast<float>(eighths) / 8);
  numbers.resize((numbers.size() + Lanes - 1) / Lanes * Lanes);
  int wrong = 0;
  for (std::size_t first = 0; first < numbers.size(); first += Lanes) {
    vectors::vector_t<float, Lanes> v;
    std::memcpy(&v, numbers.data() + first, sizeof v);
    std::array<std::int8_t, Lanes> integers{};
    vectors::store<Lanes>(integers.data(), v);
    auto const wide = vectors::load<Lanes>(integers.data());
    std::array<float, Lanes> back;
    std::memcpy(back.data(), &wide, sizeof wide);
    for (std::size_t i = 0; i < Lanes; ++i)
      wrong += integers[i] != from_accumulate<std::int8_t>(numbers[first + i]) || back[i] != to_accumulate(integers[i]);
  }
  return wrong;
}

} // namespace

TEST_CASE("vectors of every width become 8-bit integers as single numbers do") {
  CHECK(count_wrong_integers<1>() == 0);
  CHECK(count_wrong_integers<2>() == 0);
  CHECK(count_wrong_integers<vectors::native_lanes<double>>() == 0);
  CHECK(count_wrong_integers<vectors::native_lanes<float>>() == 0);
}

TEST_CASE_TEMPLATE("vectors of every width convert as single elements do", T, float16, bfloat16) {
  CHECK(count_wrong<T, 1>() == 0);
  CHECK(count_wrong<T, 2>() == 0);
  CHECK(count_wrong<T, vectors::native_lanes<double>>() == 0);
  CHECK(count_wrong<T, vectors::native_lanes<float>>() == 0);
}

TEST_CASE_TEMPLATE("streamed vectors are the stored ones", T, float16, bfloat16) {
  constexpr int lanes = vectors::native_lanes<float>;
  alignas(64) std::array<T, 2 * lanes> stored{}, streamed{};
  std::array<float, lanes> values;
  for (int i = 0; i < lanes; ++i) values[static_cast<std::size_t>(i)] = 1.0F / static_cast<float>(i - 3);
  auto const v = vectors::load<lanes>(values.data());
  vectors::store<lanes>(stored.data() + lanes, v);
  vectors::stream<lanes>(streamed.data() + lanes, v);
  vectors::stream<1>(streamed.data(), 2.5F);
  vectors::stream_fence();
  stored[0] = T{2.5F};
  bool const same = std::memcmp(stored.data(), streamed.data(), sizeof stored) == 0;
  CHECK(same);
  static_assert(!vectors::can_stream<T> == !vectors::can_stream<float>);
}

TEST_CASE_TEMPLATE("two vectors at once are converted as single elements are", T, float16, bfloat16) {
  constexpr unsigned lanes = vectors::native_lanes<float>;
  using vector = vectors::vector_t<float, static_cast<int>(lanes)>;
  alignas(64) std::array<T, 2 * lanes> streamed{}, streamed_pair{};
  std::array<T, 2 * lanes + 1> stored{}, stored_pair{};
  // Where a pair has which element, told by elements that are their own numbers.
  for (unsigned i = 0; i < 2 * lanes; ++i) stored[i] = T{static_cast<float>(i)};
  auto const numbers = vectors::load_pair<static_cast<int>(lanes)>(stored.data());
  std::array<float, 2 * lanes> places;
  std::memcpy(places.data(), numbers.data(), sizeof places);
  int wrong = 0;
  // Upper halves of all kinds, beside lower halves about none, a tie and all but one; what is no number in either vector,
  // in both, and in none.
  for (unsigned const low : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU})
    for (unsigned first = 0; first < 65536; first += lanes)
      for (unsigned const other : {first, first ^ 0x4000U}) {
        std::array<float, 2 * lanes> values;
        for (unsigned i = 0; i < lanes; ++i) {
          values[i] = std::bit_cast<float>((first + i) << 16 | low);
          values[lanes + i] = std::bit_cast<float>((other + i) << 16 | low);
        }
        std::array<vector, 2> v;
        std::memcpy(v.data(), values.data(), sizeof v);
        vectors::stream_two<static_cast<int>(lanes)>(streamed.data(), v[0], v[1]);
        vectors::store_two<static_cast<int>(lanes)>(stored.data() + 1, v[0], v[1]);
        std::array<float, 2 * lanes> in_places;
        for (unsigned i = 0; i < 2 * lanes; ++i) in_places[i] = values[static_cast<std::size_t>(places[i])];
        std::memcpy(v.data(), in_places.data(), sizeof v);
        vectors::stream_pair<static_cast<int>(lanes)>(streamed_pair.data(), v);
        vectors::store_pair<static_cast<int>(lanes)>(stored_pair.data() + 1, v);
        vectors::stream_fence();
        for (unsigned i = 0; i < 2 * lanes; ++i) {
          auto const expected = T{values[i]}.bits();
          wrong += (streamed[i].bits() != expected) + (stored[i + 1].bits() != expected) +
                   (streamed_pair[i].bits() != expected) + (stored_pair[i + 1].bits() != expected);
        }
      }
  CHECK(wrong == 0);
}
