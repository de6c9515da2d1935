#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <typeinfo>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/moments_kernel.hpp>

/// What a source makes of vectors, as it is compiled.
struct vectors_of_source {
  int bytes;
  std::string sums; ///< what the linker knows a type by that has some
  double mean = 0, m2 = 0;

  /// With the moments of one row.
  [[gnu::always_inline]] static vectors_of_source here(std::span<float const> row) {
    using namespace syncnorm::host::detail;
    vectors_of_source found{simd_bytes, typeid(moment_rows<float>).name()};
    auto const x = syncnorm::nchw(row.data(), 1, 1, static_cast<std::int64_t>(row.size()));
    moments_kernel<float>{x, groups{x}}(0, 1, 0, {&found.mean, &found.m2});
    return found;
  }
};

/// `here` of a source that is compiled for this machine.
[[nodiscard]] vectors_of_source of_this_machine(std::span<float const> row);
