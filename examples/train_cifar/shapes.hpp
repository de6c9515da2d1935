#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>

#include "data_set.hpp"
#include "random.hpp"

namespace train_cifar {

/// A drawn class is one of five outlines, filled with one of two textures.
inline constexpr int shape_classes = 10;

namespace detail {

struct point {
  float x, y;
};

/// Signed distance to the outline in units of the shape's size, negative inside.
inline float outline_distance(int outline, point p) {
  float const x = std::abs(p.x), y = std::abs(p.y), radius = std::sqrt(p.x * p.x + p.y * p.y);
  switch (outline) {
  case 0:
    return radius - 0.8f; // disc
  case 1:
    return std::abs(radius - 0.7f) - 0.25f; // ring
  case 2:
    return std::max(x, y) - 0.7f; // square
  case 3:
    return std::max(std::min(x, y) - 0.28f, std::max(x, y) - 0.95f); // cross
  default:
    return std::max(0.866f * x + 0.5f * p.y - 0.45f, -p.y - 0.6f); // triangle
  }
}

/// Which of the two colours of a fill covers the point: stripes, or the squares of a chess board.
inline bool fill_is_dark(bool chess, point p, float phase) {
  auto const odd = [](float value) { return static_cast<int>(std::floor(value)) & 1; };
  return (chess ? odd(p.x + phase) ^ odd(p.y + phase) : odd(p.x + phase)) != 0;
}

using colour = std::array<float, 3>;

inline colour random_colour(random_source& random) {
  return {random.uniform(0, 1), random.uniform(0, 1), random.uniform(0, 1)};
}

} // namespace detail

/// Draws image `index` of the data set `seed`, of the class `label`: place, size, angle, colours, lighting and noise
/// are random, so that no single pixel tells the class.
inline void draw_shape(std::uint64_t seed, std::uint64_t index, int label, std::span<std::uint8_t, image_bytes> image) {
  using namespace detail;
  random_source random{seed, index};
  int const outline = label / 2;
  bool const chess = label % 2 != 0;
  point const centre{random.uniform(11, 21), random.uniform(11, 21)};
  float const size = random.uniform(8, 13), angle = random.uniform(0, 6.2831853f),
              fill_angle = random.uniform(0, 6.2831853f);
  float const cosine = std::cos(angle) / size, sine = std::sin(angle) / size;
  float const period = random.uniform(2.2f, 3.2f), phase = random.uniform(0, 2);
  float const fill_cosine = std::cos(fill_angle) / period, fill_sine = std::sin(fill_angle) / period;
  // The light differs so much between images that the statistics of a few of them are a poor guess at those of all.
  float const contrast = random.uniform(0.15f, 1), light = random.uniform(0, 1 - contrast),
              noise = random.uniform(0.05f, 0.2f);
  colour const light_fill = random_colour(random), dark_fill = random_colour(random), ground = random_colour(random);
  point const slope{random.uniform(-0.02f, 0.02f), random.uniform(-0.02f, 0.02f)};

  for (std::size_t row = 0; row < image_side; ++row)
    for (std::size_t column = 0; column < image_side; ++column) {
      float const x = static_cast<float>(column) - centre.x, y = static_cast<float>(row) - centre.y;
      float const distance = outline_distance(outline, {cosine * x + sine * y, cosine * y - sine * x}) * size;
      float const cover = std::clamp(0.5f - distance, 0.f, 1.f);
      bool const dark = fill_is_dark(chess, {fill_cosine * x + fill_sine * y, fill_cosine * y - fill_sine * x}, phase);
      colour const& fill = dark ? dark_fill : light_fill;
      float const shade = slope.x * x + slope.y * y;
      std::uint64_t bits = random();
      for (std::size_t plane = 0; plane < 3; ++plane, bits >>= 16) {
        // The sum of two uniform bytes: noise with a peak, in [-1, 1].
        float const grain = static_cast<float>((bits & 255) + (bits >> 8 & 255)) / 255.f - 1.f;
        float const value = cover * fill[plane] + (1 - cover) * (ground[plane] + shade);
        float const lit = light + contrast * (value + noise * grain);
        image[plane * image_side * image_side + row * image_side + column] =
            static_cast<std::uint8_t>(std::clamp(lit * 255.f, 0.f, 255.f));
      }
    }
}

} // namespace train_cifar
