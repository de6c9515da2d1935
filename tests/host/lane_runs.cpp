#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/core/half.hpp>
#include <syncnorm/host/detail/boxes.hpp>
#include <syncnorm/host/detail/lane_runs.hpp>

using namespace syncnorm;
using host::detail::boxes;
using host::detail::lane_runs;
using host::detail::lanes_at_hand;
using host::detail::line_elements;

namespace {

/// A box of so many channels of `x`, of which position 0 is so many elements after the begin of a line.
template <class T>
void check_runs(tensor_view<T const> const& x, lanes_at_hand const& is, std::int64_t channels, std::int64_t offset) {
  lane_runs<T> const runs{x, is};
  bool const whole = channels == x.channels;
  if (!whole && runs.positions() != 1) return;
  constexpr std::int64_t line = line_elements<T>;
  std::int64_t const first_position = 2, positions = x.spatial - 2;
  boxes::box const box{0, channels, 0, 1, first_position, positions};
  std::vector<int> times(static_cast<std::size_t>(channels * positions));
  bool in_lines = true, in_box = true, in_table = true;
  std::int64_t const part = runs.part_of(channels);
  for (std::int64_t first = 0; first < channels; first += part)
    for (std::int64_t s = first_position; s < first_position + positions; s += runs.positions()) {
      std::int64_t const some = std::min(runs.positions(), first_position + positions - s),
                         last = std::min(channels, first + part), since = (offset + s * x.stride_s) % line;
      auto const lanes = runs(box, s, some, first, last, [&] { return is.streamed ? since : -1; });
      in_table = in_table && lanes.end <= runs.period();
      for (std::int64_t const end : {lanes.begin, lanes.end}) {
        std::int64_t const place = (s - first_position) * channels + end;
        bool const joined = is.follow && whole && channels <= 511;
        if (lanes.begin >= lanes.end || (joined ? place == 0 || place == channels * positions : end % channels == 0))
          continue;
        in_lines = in_lines && (!is.streamed || (since + end) % line == 0);
      }
      for (std::int64_t lane = lanes.begin; lane < lanes.end; ++lane) {
        std::int64_t const place = (s - first_position) * channels + lane;
        in_box =
            in_box && place >= 0 && place < channels * positions && ((is.follow && whole) || lane < some * channels);
        if (in_box) ++times[static_cast<std::size_t>(place)];
      }
    }
  CAPTURE(channels);
  CAPTURE(positions);
  CAPTURE(offset);
  CHECK(in_box);
  CHECK(in_table);
  CHECK(in_lines);
  CHECK(std::ranges::all_of(times, [](int n) { return n == 1; }));
}

} // namespace

TEST_CASE_TEMPLATE("runs take each lane once, by lines of the cache that are streamed", T, float, double, bfloat16) {
  T const nothing{};
  for (std::int64_t const channels : {1, 3, 24, 100, 511, 1000, 1025, 1200, 2561, 5000, 8192, 8193, 32'771})
    for (std::int64_t const positions : {1, 2, 41})
      for (bool const streamed : {false, true})
        for (bool const masked : {false, true})
          for (bool const follow : {false, true})
            for (bool const folded : {false, true})
              for (std::int64_t const offset : {0, 1, 5}) {
                if (positions * channels > 100'000 || (follow && masked && folded)) continue;
                std::int64_t const stride = channels + (follow ? 0 : 7);
                tensor_view<T const> const x{&nothing, 1, channels, positions + 2, 0, 1, stride};
                for (std::int64_t const of_box : {channels, (channels + 1) / 2})
                  check_runs<T>(x, {folded, follow, streamed, offset == 0, masked, false, true}, of_box, offset);
              }
}
