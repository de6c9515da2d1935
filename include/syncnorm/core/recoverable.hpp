#pragma once

#include <cmath>

#include <syncnorm/config.hpp>
#include <syncnorm/core/epilogue.hpp>

namespace syncnorm {

/// How many times |gamma| is |beta| at most where x is recovered from y. The error of (x − mean)·inv_std is that of rounding y,
/// over |gamma|: the last bit times |beta/gamma| + |(x − mean)·inv_std|. A residual is not looked at: it adds the last bit times
/// |residual/gamma|, so that one far larger than gamma takes bits of x.
template <class T>
inline constexpr double recoverable_ratio = sizeof(T) == 2 ? 1 : 16;

/// The slope by which v < 0 is recovered from f(v); 0: it is not, as from an exponential, which takes what is far below 0 to the same.
[[nodiscard]] constexpr double recoverable_slope(activation const& of) {
  return of.exponential ? 0 : of.negative_slope;
}

/// Whether a channel of x is recovered from y, where `ratio` is `recoverable_ratio`: gamma neither takes what x had away, nor does
/// beta outweigh it, and the `recoverable_slope` is none too small. What no y tells is not recovered: elements whose y was too great for
/// its type, as of float16 beyond 65504.
[[nodiscard]] SYNCNORM_HOST_DEVICE inline bool is_recoverable(double gamma, double beta, double slope, double ratio) {
  constexpr double least = 1.0 / 256;
  return std::abs(gamma) >= least && std::abs(beta) <= ratio * std::abs(gamma) && slope >= least;
}

} // namespace syncnorm
