#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace bench {

/// What a row of the table is about.
struct row_key {
  std::string op, layout, type;
  std::array<std::int64_t, 3> shape{}; ///< [N, C, S] of one rank
  std::string comm = "self";
  int ranks = 1, threads = 1;
};

/// One of those that are compared in a row: "ours", "floor", "floor_once" (without a second reading), "alone" (ours without
/// the exchange), or a peer, whose variants, as in "onednn/nhwc", count as the fastest of them.
struct contender {
  using step = std::function<void(int rank)>;

  std::string name;
  std::function<step()> make;  ///< everything that a first step needs; kept while the row is measured
  std::int64_t iterations = 1; ///< steps of one measurement; the same on every rank
  std::int64_t warm_up = 1;    ///< steps before a measurement
};

struct row {
  row_key key;
  double floor_bytes = 0; ///< per rank
  std::function<std::vector<contender>()> make;
  /// Threads of this process that are ranks. 1: the rank is this process.
  int rank_threads = 1;
};

/// The processes that measure together, for ranks that are processes.
struct process_group {
  int rank = 0;
  std::function<void()> barrier = [] {};
  std::function<double(double)> mean = [](double seconds) { return seconds; };
};

struct settings {
  bool quick = false;
  bool cpu_clock = false; ///< time of the processor that the first thread had, for one thread on a busy machine
  int rounds = 9;
  std::string json, filter = ".";
  std::map<std::string, std::string> others; ///< --NAME VALUE of the program's own
};

/// Throws std::invalid_argument, with the option's name, where `text` is none from `least` on.
[[nodiscard]] int whole_number(std::string const& option, std::string const& text, int least = 1);

/// Reads --quick, --clock cpu or wall, --rounds N, --json FILE, --filter REGEX, Google Benchmark's flags, and those of the program's own. Throws
/// std::invalid_argument.
[[nodiscard]] settings parse(int argc, char** argv, std::vector<std::string> const& own_options = {});

/// Measures the rows one after the other: their contenders in turn, round by round, each a run of Google Benchmark with
/// a fixed number of steps after some that are not timed. What slows the machine for a while so slows all contenders of a
/// round, and a row takes medians over the rounds. Shows progress and writes the rows as JSON on rank 0. Returns the
/// exit status.
int run(settings const& how, std::vector<row> const& rows, process_group const& group = {});

/// Steps before a measurement for contenders that read the same data each time: until the last-level cache holds of them
/// what it will, which a peer with tensors of its own has pushed out.
inline constexpr std::int64_t settling_steps = 8;

/// Steps for one measurement of a contender whose step moves so many bytes.
[[nodiscard]] std::int64_t iterations_for(double bytes);

} // namespace bench
