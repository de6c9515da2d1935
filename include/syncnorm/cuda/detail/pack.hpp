#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <syncnorm/config.hpp>

namespace syncnorm::cuda::detail {

/// As many elements as a thread accesses at once.
template <class T>
inline constexpr int pack_length = 16 / static_cast<int>(sizeof(T));

/// Elements that are loaded or stored at once. Those of 16 bits stay in words until they are asked for: compilers take elements apart
/// where they are loaded, which waits for the load, and takes twice the registers.
template <class T, int Bytes = 16>
class alignas(Bytes) pack {
public:
  static constexpr int length = Bytes / static_cast<int>(sizeof(T));

  pack() = default;
  explicit SYNCNORM_HOST_DEVICE pack(T const (&elements)[static_cast<std::size_t>(length)]) {
    std::memcpy(static_cast<void*>(this), elements, sizeof elements);
  }

  [[nodiscard]] SYNCNORM_HOST_DEVICE T operator[](int e) const {
    if constexpr (per_word == 1) {
      return words_[e];
    } else {
      auto const bits = static_cast<std::uint16_t>(words_[e / 2] >> e % 2 * 16);
      T element;
      std::memcpy(static_cast<void*>(&element), &bits, sizeof bits);
      return element;
    }
  }

private:
  static constexpr int per_word = sizeof(T) == 2 && Bytes >= 4 ? 2 : 1;
  using word = std::conditional_t<per_word == 2, std::uint32_t, T>;

  word words_[static_cast<std::size_t>(length / per_word)];
};

template <class T>
[[nodiscard]] SYNCNORM_HOST_DEVICE inline bool is_aligned(T const* at) {
  return (reinterpret_cast<std::uintptr_t>(at) & 15) == 0;
}

/// A pack's elements that exist, [first, last).
struct extent_of_pack {
  int first, last;

  template <class T>
  [[nodiscard]] SYNCNORM_DEVICE bool full() const {
    return first == 0 && last == pack_length<T>;
  }
};

/// How a kernel's accesses treat the cache. `last`: what is read or written is not needed again soon.
enum class cached : bool { normally, last };

/// What is known of packs where a kernel is compiled. `whole`: each is there in full, and one access; `aligned`: each is one access,
/// and may be there in part, or not at all.
enum class known : std::uint8_t { nothing, aligned, whole };

/// One element; of a complex number each component, to which alone it has to be aligned.
template <class Hw, class T>
SYNCNORM_DEVICE void load_element(Hw const& hw, T const* at, T& value) {
  if constexpr (requires { at->im; }) {
    value.re = hw.load(&at->re);
    value.im = hw.load(&at->im);
  } else {
    value = hw.load(at);
  }
}
template <class Hw, class T>
SYNCNORM_DEVICE void store_element(Hw const& hw, T* at, T const& value) {
  if constexpr (requires { at->im; }) {
    hw.store(&at->re, value.re);
    hw.store(&at->im, value.im);
  } else {
    hw.store(at, value);
  }
}

/// The elements of `part`, `step` apart, of which `at` is number 0; the others are unspecified. What is aligned is one access of 16
/// bytes that are all the tensor's: see `walk::within`.
template <known K, class Hw, class T>
[[nodiscard]] SYNCNORM_DEVICE pack<T> load_pack(Hw const& hw, T const* at, std::int64_t step,
                                                extent_of_pack const& part, cached use) {
  if constexpr (K == known::whole) {
    return hw.load_pack(at, use);
  } else if constexpr (K == known::aligned) {
    pack<T> some{};
    if (part.last > part.first) some = hw.load_part(at, part, use);
    return some;
  } else {
    if (step == 1 && part.template full<T>() && is_aligned(at)) return hw.load_pack(at, use);
    T some[pack_length<T>]{};
    SYNCNORM_UNROLL
    for (int e = 0; e < pack_length<T>; ++e)
      if (e >= part.first && e < part.last) load_element(hw, at + e * step, some[e]);
    return pack<T>{some};
  }
}

template <known K, class Hw, class T>
SYNCNORM_DEVICE void store_pack(Hw const& hw, T* at, std::int64_t step, extent_of_pack const& part, pack<T> const& some,
                                cached use) {
  if constexpr (K == known::whole) {
    hw.store_pack(at, some, use);
  } else {
    bool const one_access = K == known::aligned || (step == 1 && is_aligned(at));
    if (one_access && part.template full<T>()) return hw.store_pack(at, some, use);
    SYNCNORM_UNROLL
    for (int e = 0; e < pack_length<T>; ++e)
      if (e >= part.first && e < part.last) store_element(hw, K == known::aligned ? at + e : at + e * step, some[e]);
  }
}

} // namespace syncnorm::cuda::detail
