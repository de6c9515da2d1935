#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <syncnorm/core/element.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/core/tensor_view.hpp>

#include <host/executors.hpp>
#include <support/noise.hpp>
#include <support/sanitized.hpp>
#ifdef SYNCNORM_TEST_SANITIZED
#include <syncnorm/host/compiled_primitives.hpp>
#endif

namespace test {

/// The upper half of a float: an element type of a user's own.
struct brief {
  std::uint16_t bits = 0;

  brief() = default;
  explicit brief(float value) {
    std::uint32_t all;
    std::memcpy(&all, &value, sizeof all);
    bits = static_cast<std::uint16_t>((all + 0x7fff + ((all >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    std::uint32_t const all = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &all, sizeof value);
    return value;
  }
  explicit operator double() const { return static_cast<double>(static_cast<float>(*this)); }
  explicit operator long double() const { return static_cast<long double>(static_cast<float>(*this)); }
};

enum class arrangement {
  nchw,
  nhwc,
  tbc,
  padded_rows,
  padded_channels,
  padded_samples,
  samples_inside,
  every_other,
  every_other_channel
};

inline constexpr arrangement arrangements[] = {
    arrangement::nchw,
    arrangement::nhwc,
    arrangement::tbc,
    arrangement::padded_rows,
    arrangement::padded_channels,
    arrangement::padded_samples,
    arrangement::samples_inside,
    arrangement::every_other,
    arrangement::every_other_channel,
};

inline std::string name_of(arrangement order) {
  switch (order) {
  case arrangement::nchw:
    return "nchw";
  case arrangement::nhwc:
    return "nhwc";
  case arrangement::tbc:
    return "tbc";
  case arrangement::padded_rows:
    return "padded rows";
  case arrangement::padded_channels:
    return "padded channels";
  case arrangement::padded_samples:
    return "padded samples";
  case arrangement::samples_inside:
    return "samples inside";
  case arrangement::every_other:
    return "every other";
  case arrangement::every_other_channel:
    return "every other channel";
  }
  return "";
}

/// Elements that are read. Under the sanitizers, whose programs call the compiled primitives, these are constant, as theirs are.
template <class T>
using read = std::conditional_t<sanitized, T const, T>;

/// A tensor that owns its memory, of which it fills more than its elements: what lies between must stay as it was.
template <class T>
class tensor {
public:
  tensor(arrangement order, std::int64_t n, std::int64_t c, std::int64_t s, std::int64_t offset = 0) : offset_{offset} {
    syncnorm::tensor_view<T> v{nullptr, n, c, s, c * s, s, 1};
    switch (order) {
    case arrangement::nchw:
      break;
    case arrangement::nhwc:
      v = syncnorm::nhwc<T>(nullptr, n, c, s);
      break;
    case arrangement::tbc:
      v = syncnorm::tbc<T>(nullptr, s, n, c);
      break;
    case arrangement::padded_rows:
      v.stride_c = s + 3, v.stride_n = c * v.stride_c + 5;
      break;
    case arrangement::padded_channels:
      v.stride_c = 1, v.stride_s = c + 3, v.stride_n = s * v.stride_s + 1;
      break;
    case arrangement::padded_samples:
      v = syncnorm::nhwc<T>(nullptr, n, c, s), v.stride_n += 5;
      break;
    case arrangement::samples_inside:
      v.stride_n = 1, v.stride_s = n, v.stride_c = s * n;
      break;
    case arrangement::every_other:
      v.stride_s = 2, v.stride_c = 2 * s, v.stride_n = 2 * c * s + 1;
      break;
    case arrangement::every_other_channel:
      v.stride_c = 2, v.stride_s = 2 * c + 1, v.stride_n = s * v.stride_s + 3;
      break;
    }
    auto const reach = v.size() == 0 ? 0 : (n - 1) * v.stride_n + (c - 1) * v.stride_c + (s - 1) * v.stride_s + 1;
    memory_.assign(static_cast<std::size_t>(offset + reach + guard), T(untouched));
    shape_ = v;
  }

  /// With the elements of `values`, dense `[N, C, S]`.
  tensor(arrangement order, std::int64_t n, std::int64_t c, std::int64_t s, std::vector<T> const& values,
         std::int64_t offset = 0)
      : tensor{order, n, c, s, offset} {
    auto const v = view();
    std::size_t i = 0;
    for_each([&](auto... at) { v(at...) = values[i++]; });
  }

  [[nodiscard]] syncnorm::tensor_view<T> view() {
    auto v = shape_;
    v.data = memory_.data() + offset_;
    return v;
  }

  [[nodiscard]] syncnorm::tensor_view<read<T>> input() { return view(); }

  /// The elements, dense `[N, C, S]`.
  [[nodiscard]] std::vector<T> values() {
    auto const v = view();
    std::vector<T> all;
    for_each([&](auto... at) { all.push_back(v(at...)); });
    return all;
  }

  /// Whether all memory that is not of an element is as it was.
  [[nodiscard]] bool intact() {
    auto copy = *this;
    auto const v = copy.view();
    for_each([&](auto... at) { v(at...) = T(untouched); });
    return std::ranges::all_of(copy.memory_, [](T const& value) { return static_cast<float>(value) == untouched; });
  }

private:
  static constexpr float untouched = 8192;
  static constexpr std::int64_t guard = 64;

  template <class F>
  void for_each(F const& f) const {
    for (std::int64_t n = 0; n < shape_.samples; ++n)
      for (std::int64_t c = 0; c < shape_.channels; ++c)
        for (std::int64_t s = 0; s < shape_.spatial; ++s) f(n, c, s);
  }

  std::int64_t offset_;
  std::vector<T> memory_;
  syncnorm::tensor_view<T> shape_;
};

/// Uniform deviates of a mean and deviation that differ by channel; dense `[N, C, S]`.
template <class T>
std::vector<T> deviates(std::int64_t n, std::int64_t c, std::int64_t s, unsigned seed, double mean = 0.5,
                        double deviation = 1) {
  std::vector<T> values(static_cast<std::size_t>(n * c * s));
  auto* at = values.data();
  std::uint64_t drawn = 0;
  using A = syncnorm::accumulate_t<T>;
  for (std::int64_t i = 0; i < n * c; ++i) {
    auto const channel = static_cast<double>(i % c);
    double const middle = mean * (1 + std::sin(channel) / 8),
                 half_width = std::sqrt(3.0) * deviation * (1 + channel / 64);
    for (std::int64_t j = 0; j < s; ++j)
      *at++ = static_cast<T>(static_cast<A>(middle + half_width * noise(seed, drawn++)));
  }
  return values;
}

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Greatest difference relative to the greatest magnitude expected; infinite where a value is no number.
template <class Got, class Expected>
double error_of(Got const& got, Expected const& expected) {
  if (std::size(got) != std::size(expected)) return INFINITY;
  long double worst = 0, scale = 0;
  for (std::size_t i = 0; i < std::size(got); ++i) {
    auto const difference = std::abs(static_cast<long double>(got[i]) - static_cast<long double>(expected[i]));
    if (!(difference < INFINITY)) return INFINITY;
    worst = std::max(worst, difference);
    scale = std::max(scale, std::abs(static_cast<long double>(expected[i])));
  }
  return scale == 0 ? static_cast<double>(worst) : static_cast<double>(worst / scale);
}

/// The accuracy asked of everything, relative to the scale of a result.
template <class T>
inline constexpr double accuracy = sizeof(T) == 8 ? 1e-12 : 1e-5;
/// Outputs of 16-bit types are rounded to their bits, by half of the last one at most.
template <>
inline constexpr double accuracy<brief> = 0x1p-8 + 1e-5;
template <>
inline constexpr double accuracy<syncnorm::bfloat16> = 0x1p-8 + 1e-5;
template <>
inline constexpr double accuracy<syncnorm::float16> = 0x1p-11 + 1e-5;

struct extents {
  std::int64_t n, c, s;
};

/// Pieces shorter than, equal to and longer than a vector and the longest piece; few, odd and many channels; several
/// groups of pieces; several chunks of channels.
inline std::vector<extents> const shapes = [] {
  std::vector<extents> all{
      {1, 1, 2},    {2, 3, 1},    {7, 5, 4},     {3, 17, 7},   {2, 16, 8},   {5, 3, 49},   {64, 19, 1},
      {1100, 3, 1}, {33, 40, 15}, {1, 2, 127},   {2, 37, 129}, {70, 12, 16}, {3, 4, 1024}, {2, 3, 2049},
      {1, 1, 4101}, {2, 1040, 2}, {1100, 17, 1}, {320, 18, 3}, {2, 1040, 9}, {1, 2051, 2}, {130, 1, 1},
      {40, 1, 200}, {5, 11, 333}, {9, 5, 17},    {41, 23, 49},
  };
  if (sanitized) std::erase_if(all, [](extents const& e) { return e.n * e.c * e.s > 7000; });
  return all;
}();

inline std::string name_of(extents const& e) {
  std::string name = std::to_string(e.n);
  name += " x " + std::to_string(e.c) + " x " + std::to_string(e.s);
  return name;
}

} // namespace test

template <>
struct syncnorm::element_traits<test::brief> {
  using accumulate_type = float;
  static constexpr std::string_view name = "brief";
};
