#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/batch_norm.hpp>

namespace test {

using layer_of_floats = syncnorm::batch_norm<float, syncnorm::thread_communicator>;

/// The inputs of a step, which a case spoils on one rank.
struct step_inputs {
  std::vector<float> x, y, dy, dx;
  syncnorm::tensor_view<float> x_view, y_view, dy_view, dx_view;

  explicit step_inputs(std::int64_t channels)
      : x(static_cast<std::size_t>(4 * channels * 5)), y(x.size()), dy(x.size(), 1),
        dx(x.size()), x_view{syncnorm::nchw(x.data(), 4, channels, 5)}, y_view{syncnorm::nchw(y.data(), 4, channels,
                                                                                              5)},
        dy_view{syncnorm::nchw(dy.data(), 4, channels, 5)}, dx_view{syncnorm::nchw(dx.data(), 4, channels, 5)} {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7);
  }
};

} // namespace test
