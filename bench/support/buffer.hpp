#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include <syncnorm/core/element.hpp>

namespace bench {

/// The elements of a tensor, on memory that no count of allocations sees.
template <class T>
class buffer {
public:
  /// Elements, or both components of complex ones, that look random, deterministic, with mean 0.25 and deviation 0.58; distinct for distinct seeds.
  explicit buffer(std::int64_t size, std::uint32_t seed = 1) : size_{size} {
    auto const bytes = (static_cast<std::size_t>(size) * sizeof(T) + page - 1) / page * page;
    data_ = static_cast<T*>(std::aligned_alloc(page, bytes == 0 ? page : bytes));
    if (data_ == nullptr) throw std::bad_alloc{};
    for (std::int64_t i = 0; i < size; ++i) data_[i] = value(static_cast<std::uint32_t>(i) + seed * 0x9e3779b9u);
  }
  buffer(buffer&& other) noexcept : data_{std::exchange(other.data_, nullptr)}, size_{other.size_} {}
  buffer& operator=(buffer&&) = delete;
  ~buffer() { std::free(data_); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::int64_t size() const { return size_; }

private:
  static constexpr std::size_t page = 4096;

  static T value(std::uint32_t i) {
    if constexpr (syncnorm::element<T>) {
      return syncnorm::from_double<T>(number(i));
    } else { // complex
      using component = typename T::value_type;
      return {static_cast<component>(number(i)), static_cast<component>(number(~i))};
    }
  }
  static double number(std::uint32_t i) {
    i = (i ^ (i >> 16)) * 0x7feb352du;
    i = (i ^ (i >> 15)) * 0x846ca68bu;
    return static_cast<double>(static_cast<std::int32_t>(i ^ (i >> 16))) / 2147483648.0 + 0.25;
  }

  T* data_;
  std::int64_t size_;
};

} // namespace bench
