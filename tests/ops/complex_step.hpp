#pragma once

#include <complex>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include <support/noise.hpp>

namespace test {

/// What a step of one rank reads and writes, which a case spoils.
struct complex_step {
  using number = std::complex<float>;
  static constexpr std::int64_t samples = 3, spatial = 5;

  std::vector<number> x, y, dy, dx;
  syncnorm::tensor_view<number> x_view, y_view, dy_view, dx_view;
  std::vector<std::uint8_t> counts = std::vector<std::uint8_t>(samples * spatial, 1);
  syncnorm::batch_norm_mask mask{};

  explicit complex_step(std::int64_t channels)
      : x(static_cast<std::size_t>(samples * channels * spatial)), y(x.size()), dy(x.size(), {1, -1}), dx(x.size()),
        x_view{view(x, channels)}, y_view{view(y, channels)}, dy_view{view(dy, channels)}, dx_view{view(dx, channels)} {
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = {static_cast<float>(test::noise(1, i)), static_cast<float>(test::noise(2, i))};
  }
  static syncnorm::tensor_view<number> view(std::vector<number>& of, std::int64_t channels) {
    return syncnorm::nchw(of.data(), samples, channels, spatial);
  }
};

} // namespace test
