#include "support/harness.hpp"

#include <algorithm>
#include <array>
#include <barrier>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <ostream>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include <benchmark/benchmark.h>

#include "support/allocations.hpp"

namespace bench {

namespace {

/// Keeps the time of a step instead of printing it.
class collector : public benchmark::BenchmarkReporter {
public:
  explicit collector(bool cpu_clock) : cpu_clock_{cpu_clock} {}

  bool ReportContext(Context const&) override { return true; }
  void ReportRuns(std::vector<Run> const& runs) override {
    for (auto const& run : runs) {
      if (run.error_occurred) throw std::runtime_error{run.benchmark_name() + ": " + run.error_message};
      // Google Benchmark gives the mean time of its threads, and the iterations of all.
      seconds = (cpu_clock_ ? run.cpu_accumulated_time : run.real_accumulated_time * static_cast<double>(run.threads)) /
                static_cast<double>(run.iterations);
    }
  }

  double seconds = 0;

private:
  bool cpu_clock_;
};

struct measured {
  std::string name;
  std::vector<double> samples;

  [[nodiscard]] double quantile(double q) const {
    auto sorted = samples;
    std::ranges::sort(sorted);
    double const at = q * static_cast<double>(sorted.size() - 1);
    auto const below = static_cast<std::size_t>(at);
    auto const above = std::min(below + 1, sorted.size() - 1);
    return sorted[below] + (at - std::floor(at)) * (sorted[above] - sorted[below]);
  }
  [[nodiscard]] double median() const { return quantile(0.5); }
};

struct memory_use {
  std::int64_t allocations = 0;         ///< of the steps after the first
  std::int64_t backend_allocations = 0; ///< of the backend in these
  std::int64_t peak = 0;                ///< bytes beside the tensors, construction and first step included
};

/// Ten steps after the first of a new instance, on threads that go on.
memory_use probe(std::function<contender::step()> const& make, int rank_threads) {
  constexpr int steps = 10;
  memory_use found;
  std::exception_ptr failure;
  std::barrier meet{rank_threads};
  std::vector<std::thread> threads;
  reset_peak();
  auto const before = count_allocations();
  auto const step = make();
  allocation_count warm, done;
  auto const work = [&](int rank) {
    try {
      step(rank);
      meet.arrive_and_wait();
      if (rank == 0) warm = count_allocations();
      meet.arrive_and_wait();
      for (int i = 0; i < steps; ++i) step(rank);
      meet.arrive_and_wait();
      if (rank == 0) done = count_allocations();
      meet.arrive_and_wait();
    } catch (...) {
      failure = std::current_exception();
      meet.arrive_and_drop();
    }
  };
  for (int r = 1; r < rank_threads; ++r) threads.emplace_back(work, r);
  work(0);
  for (auto& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  found.allocations = done.allocations - warm.allocations;
  found.backend_allocations = done.backend_allocations - warm.backend_allocations;
  found.peak = count_allocations().peak - before.live;
  return found;
}

std::string name_of(row_key const& key) {
  std::ostringstream text;
  text << key.op << '/' << key.layout << '/' << key.type << '/' << key.shape[0] << 'x' << key.shape[1] << 'x'
       << key.shape[2] << '/' << key.comm << '/' << key.ranks << 'x' << key.threads;
  return text.str();
}

void write_json(std::ostream& out, row const& what, std::vector<measured> const& results, memory_use memory) {
  auto const& key = what.key;
  auto const quoted = [](std::string const& text) { return '"' + text + '"'; };
  auto const find = [&](std::string const& name) {
    auto const at = std::ranges::find(results, name, &measured::name);
    return at == results.end() ? nullptr : &*at;
  };
  auto const* ours = find("ours");
  out << "{\"op\": " << quoted(key.op) << ", \"layout\": " << quoted(key.layout) << ", \"type\": " << quoted(key.type)
      << ", \"shape\": [" << key.shape[0] << ", " << key.shape[1] << ", " << key.shape[2]
      << "], \"comm\": " << quoted(key.comm) << ", \"ranks\": " << key.ranks << ", \"threads\": " << key.threads
      << ", \"seconds\": " << ours->median();
  if (auto const* floor = find("floor")) out << ", \"floor_seconds\": " << floor->median();
  if (auto const* once = find("floor_once")) out << ", \"floor_once_seconds\": " << once->median();
  std::map<std::string, double> peers, variants;
  for (auto const& result : results) {
    constexpr std::array own{"ours", "floor", "floor_once", "alone", "exchange"};
    if (std::ranges::find(own, result.name) != own.end()) continue;
    auto const slash = result.name.find('/');
    if (slash != std::string::npos) variants[result.name] = result.median();
    auto const [at, added] = peers.emplace(result.name.substr(0, slash), result.median());
    if (!added) at->second = std::min(at->second, result.median());
  }
  auto const object = [&](std::map<std::string, double> const& values) {
    std::string separator;
    out << '{';
    for (auto const& [name, seconds] : values) {
      out << separator << quoted(name) << ": " << seconds;
      separator = ", ";
    }
    out << '}';
  };
  out << ", \"peers\": ";
  object(peers);
  if (!variants.empty()) {
    out << ", \"variants\": ";
    object(variants);
  }
  std::map<std::string, double> fastest;
  for (auto const& result : results) fastest[result.name] = result.quantile(0);
  out << ", \"fastest\": ";
  object(fastest);
  if (auto const* alone = find("alone")) out << ", \"alone_seconds\": " << alone->median();
  if (auto const* exchange = find("exchange")) out << ", \"exchange_seconds\": " << exchange->median();
  out << ", \"quartiles\": [" << ours->quantile(0.25) << ", " << ours->quantile(0.75)
      << "], \"floor_bytes\": " << what.floor_bytes << ", \"allocations\": " << memory.allocations
      << ", \"backend_allocations\": " << memory.backend_allocations << ", \"peak_bytes\": " << memory.peak << '}';
}

/// The text of one row for people who watch.
std::string summary(std::vector<measured> const& results) {
  std::ostringstream text;
  for (auto const& result : results) {
    char time[64];
    std::snprintf(time, sizeof time, "  %s %.4g ms", result.name.c_str(), result.median() * 1e3);
    text << time;
  }
  return text.str();
}

/// Whether another variant of the same peer took so much less time that this one is out of the race.
bool is_slow_variant(std::vector<measured> const& results, measured const& one) {
  constexpr double hopeless = 1.3;
  auto const slash = one.name.find('/');
  if (slash == std::string::npos) return false;
  auto const is_beaten_by = [&](measured const& other) {
    return other.name.compare(0, slash + 1, one.name, 0, slash + 1) == 0 && !other.samples.empty() &&
           one.samples.front() > hopeless * other.samples.front();
  };
  return !one.samples.empty() && std::ranges::any_of(results, is_beaten_by);
}

std::vector<measured> measure(row const& what, std::vector<contender> const& contenders, settings const& how,
                              process_group const& group) {
  // A quick run is content with fewer rounds of what takes long.
  constexpr int quick_rounds = 3;
  constexpr double long_seconds = 0.5;
  std::vector<measured> results;
  for (auto const& each : contenders) results.push_back({each.name, {}});
  std::vector<contender::step> steps;
  for (auto const& each : contenders) steps.push_back(each.make());
  auto const began = std::chrono::steady_clock::now();
  for (int round = 0; round < how.rounds; ++round) {
    std::chrono::duration<double> const took = std::chrono::steady_clock::now() - began;
    if (how.quick && round == quick_rounds && group.mean(took.count()) > long_seconds) break;
    for (std::size_t i = 0; i < contenders.size(); ++i) {
      if (round > 0 && is_slow_variant(results, results[i])) continue;
      auto const& [name, make, iterations, warm_up] = contenders[i];
      auto const body = [&step = steps[i], &group, warm_up = warm_up](benchmark::State& state) {
        for (std::int64_t k = 0; k < warm_up; ++k) step(state.thread_index());
        group.barrier();
        for (auto _ : state) step(state.thread_index());
      };
      benchmark::ClearRegisteredBenchmarks();
      auto* const registered = benchmark::RegisterBenchmark((name_of(what.key) + '/' + name).c_str(), body);
      registered->Iterations(iterations)->UseRealTime();
      if (what.rank_threads > 1) registered->Threads(what.rank_threads);
      collector collected{how.cpu_clock};
      benchmark::RunSpecifiedBenchmarks(&collected, ".");
      results[i].samples.push_back(group.mean(collected.seconds));
    }
  }
  benchmark::ClearRegisteredBenchmarks();
  return results;
}

} // namespace

int whole_number(std::string const& option, std::string const& text, int least) {
  int value = 0;
  auto const [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size() || value < least)
    throw std::invalid_argument{option + ": '" + text + "' is not a whole number from " + std::to_string(least) +
                                " on"};
  return value;
}

settings parse(int argc, char** argv, std::vector<std::string> const& own_options) {
  benchmark::Initialize(&argc, argv);
  settings how;
  bool rounds_given = false;
  for (int i = 1; i < argc; ++i) {
    std::string const option = argv[i];
    if (option == "--quick") {
      how.quick = true;
      continue;
    }
    if (!option.starts_with("--") || i + 1 == argc) throw std::invalid_argument{"unknown argument '" + option + "'"};
    std::string const value = argv[++i];
    if (option == "--rounds") {
      how.rounds = whole_number(option, value);
      rounds_given = true;
    } else if (option == "--clock") {
      if (value != "cpu" && value != "wall") throw std::invalid_argument{"--clock: '" + value + "' is not cpu or wall"};
      how.cpu_clock = value == "cpu";
    } else if (option == "--json") {
      how.json = value;
    } else if (option == "--filter") {
      how.filter = value;
    } else if (std::ranges::find(own_options, option.substr(2)) == own_options.end()) {
      throw std::invalid_argument{"unknown option '" + option + "'"};
    } else {
      how.others[option.substr(2)] = value;
    }
  }
  if (how.quick && !rounds_given) how.rounds = 5;
  return how;
}

int run(settings const& how, std::vector<row> const& rows, process_group const& group) {
  std::regex const filter{how.filter};
  std::vector<row const*> chosen;
  for (auto const& each : rows)
    if (std::regex_search(name_of(each.key), filter)) chosen.push_back(&each);

  std::ostringstream json;
  std::string separator;
  // After each row, and for a filter that none matches: whoever ends this program finds the rows so far.
  auto const write = [&] {
    if (group.rank != 0 || how.json.empty()) return true;
    std::string const part = how.json + ".part";
    std::ofstream file{part};
    file << '[' << json.str() << "]\n";
    file.close();
    return file.good() && std::rename(part.c_str(), how.json.c_str()) == 0;
  };
  bool written = write();
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    auto const& what = *chosen[i];
    if (group.rank == 0) std::cerr << '[' << i + 1 << '/' << chosen.size() << "] " << name_of(what.key) << std::flush;
    auto const contenders = what.make();
    auto const results = measure(what, contenders, how, group);
    auto const ours = std::ranges::find(contenders, "ours", &contender::name);
    auto const memory = probe(ours->make, what.rank_threads);
    if (group.rank != 0) continue;
    std::cerr << summary(results) << std::endl;
    json << separator;
    write_json(json, what, results, memory);
    separator = ",\n ";
    written = write();
  }
  if (!written) std::cerr << how.json << ": cannot be written\n";
  return written ? 0 : 1;
}

std::int64_t iterations_for(double bytes) {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(5e8 / bytes), 2, 200);
}

} // namespace bench
