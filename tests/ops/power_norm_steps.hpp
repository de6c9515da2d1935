#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include <support/noise.hpp>

namespace test {

using power_layer = syncnorm::power_norm<float, syncnorm::thread_communicator>;

/// Ranks that take steps.
inline constexpr int step_ranks = 3;

/// The inputs of a step of [4, C, 5], which a case spoils on one rank.
struct step_inputs {
  std::vector<float> x, y, dy, dx;
  std::vector<std::uint8_t> mask_values;
  syncnorm::tensor_view<float> x_view, y_view, dy_view, dx_view;
  syncnorm::mask_view mask;

  explicit step_inputs(std::int64_t channels)
      : x(static_cast<std::size_t>(4 * channels * 5)), y(x.size()), dy(x.size()), dx(x.size()),
        mask_values(20, 1), x_view{syncnorm::nchw(x.data(), 4, channels, 5)},
        y_view{syncnorm::nchw(y.data(), 4, channels, 5)}, dy_view{syncnorm::nchw(dy.data(), 4, channels, 5)},
        dx_view{syncnorm::nchw(dx.data(), 4, channels, 5)}, mask{syncnorm::mask_of(mask_values.data(), 4, 5)} {
    for (std::size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>(test::noise(1, i)) + 1;
      dy[i] = static_cast<float>(test::noise(2, i));
    }
    mask_values[3] = 0;
  }
  void forward(power_layer& layer) { layer.forward(x_view, y_view, mask); }
  void backward(power_layer& layer) { layer.backward(x_view, dy_view, dx_view); }
};

/// A layer that knows its state without synchronizing.
struct watched_layer {
  power_layer layer;
  explicit watched_layer(syncnorm::thread_communicator const& comm, std::int64_t channels,
                         syncnorm::power_norm_options const& options = {})
      : layer{comm, channels, {.norm = options}} {}
  std::vector<float> state() {
    std::vector<float> all{static_cast<float>(layer.iters())};
    for (auto const values : {layer.running_phi(), layer.ema_gz()}) all.insert(all.end(), values.begin(), values.end());
    return all;
  }
};

} // namespace test
