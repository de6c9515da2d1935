#include <cstddef>
#include <string>
#include <type_traits>

#include <doctest/doctest.h>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/error.hpp>

namespace {

struct half {
  unsigned short bits;
  half() = default;
  explicit half(float value) : bits{static_cast<unsigned short>(value)} {}
  explicit operator float() const { return bits; }
};

/// Cannot be made of nothing.
struct never_empty {
  unsigned short bits;
  explicit never_empty(float value) : bits{static_cast<unsigned short>(value)} {}
  explicit operator float() const { return bits; }
};

/// Its sums are of type `A`.
template <class A>
struct counted_in {
  explicit counted_in(A = {}) {}
  explicit operator A() const { return {}; }
};

struct one_way {
  explicit operator float() const { return 0; }
};

struct undescribed {};

/// Has no conversions of its own.
struct plain {
  unsigned short bits;
};

struct half_described {};

template <std::size_t Bytes>
struct of_bytes {
  unsigned char bytes[Bytes];
};

} // namespace

template <>
struct syncnorm::element_traits<half> {
  using accumulate_type = float;
  static constexpr std::string_view name = "half";
};

template <>
struct syncnorm::element_traits<never_empty> {
  using accumulate_type = float;
  static constexpr std::string_view name = "never empty";
};

template <class A>
struct syncnorm::element_traits<counted_in<A>> {
  using accumulate_type = A;
  static constexpr std::string_view name = "counted in";
};

template <>
struct syncnorm::element_traits<one_way> {
  using accumulate_type = float;
  static constexpr std::string_view name = "one way";
};

template <>
struct syncnorm::element_traits<plain> {
  using accumulate_type = float;
  static constexpr std::string_view name = "plain";
  static float to_accumulate(plain value) { return static_cast<float>(value.bits) / 4; }
  static plain from_accumulate(float sum) { return {static_cast<unsigned short>(sum * 4)}; }
};

template <>
struct syncnorm::element_traits<half_described> {
  using accumulate_type = float;
  static constexpr std::string_view name = "half described";
  static float to_accumulate(half_described) { return 0; }
};

template <std::size_t Bytes>
struct syncnorm::element_traits<of_bytes<Bytes>> {
  using accumulate_type = float;
  static constexpr std::string_view name = "of bytes";
  static float to_accumulate(of_bytes<Bytes> value) { return value.bytes[0]; }
  static of_bytes<Bytes> from_accumulate(float sum) { return {{static_cast<unsigned char>(sum)}}; }
};

TEST_CASE("elements are what element_traits describes and what converts both ways") {
  static_assert(syncnorm::element<float> && syncnorm::element<double>);
  static_assert(syncnorm::element<float const> && syncnorm::element<half> && syncnorm::element<half const>);
  static_assert(!syncnorm::element<undescribed> && !syncnorm::element<int> && !syncnorm::element<one_way>);
  static_assert(!syncnorm::element<never_empty>);
  static_assert(!syncnorm::element<counted_in<int>> && !syncnorm::element<counted_in<long double>>);
  static_assert(syncnorm::element<counted_in<double>>);
  static_assert(syncnorm::element<of_bytes<1>> && syncnorm::element<of_bytes<16>> && syncnorm::element<of_bytes<64>>);
  static_assert(!syncnorm::element<of_bytes<3>> && !syncnorm::element<of_bytes<12>> &&
                !syncnorm::element<of_bytes<128>>);
  static_assert(syncnorm::mutable_element<half> && !syncnorm::mutable_element<half const>);
  CHECK(syncnorm::element_traits<never_empty>::name == "never empty");
  static_assert(std::is_same_v<syncnorm::accumulate_t<half const>, float>);
  static_assert(std::is_same_v<syncnorm::accumulate_t<double>, double>);
  CHECK(syncnorm::element_traits<float>::name == "float");
  CHECK(syncnorm::element_traits<double>::name == "double");
}

TEST_CASE("the traits convert elements that do not convert by themselves") {
  static_assert(syncnorm::element<plain> && syncnorm::element<plain const> && !syncnorm::element<half_described>);
  CHECK(syncnorm::to_accumulate(plain{5}) == 1.25F);
  CHECK(syncnorm::from_accumulate<plain>(1.25F).bits == 5);
  CHECK(syncnorm::as_double(plain{5}) == 1.25);
  CHECK(syncnorm::from_double<plain>(1.25).bits == 5);
  CHECK(syncnorm::to_accumulate(syncnorm::from_accumulate<half>(7)) == 7);
}

TEST_CASE("errors know where they were thrown and what a backend said") {
  unsigned const line = __LINE__ + 2;
  try {
    throw syncnorm::timeout_error{"wire", "rank 3 is late", 7};
  } catch (syncnorm::error const& e) {
    CHECK(std::string{e.what()} == "wire: rank 3 is late");
    CHECK(std::string{e.where().file_name()}.ends_with("element.cpp"));
    CHECK(e.where().line() == line);
    auto const* const from_wire = dynamic_cast<syncnorm::communicator_error const*>(&e);
    REQUIRE(from_wire != nullptr);
    CHECK(from_wire->backend() == "wire");
    CHECK(from_wire->native_code() == 7);
  }
}
