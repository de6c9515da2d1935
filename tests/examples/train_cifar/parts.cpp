#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "../../../examples/train_cifar/compare.hpp"
#include "../../../examples/train_cifar/cores.hpp"
#include "../../../examples/train_cifar/files.hpp"
#include "../../../examples/train_cifar/measure.hpp"
#include "../../../examples/train_cifar/membership.hpp"
#include "../../../examples/train_cifar/random.hpp"
#include "../../../examples/train_cifar/result.hpp"
#include "../../../examples/train_cifar/shares.hpp"
#include "temporary_folder.hpp"

using namespace train_cifar;

TEST_CASE("Shares cover every sample once, in order, and differ by at most one") {
  for (std::size_t const count : {0u, 1u, 2u, 7u, 64u, 65u})
    for (int const ranks : {1, 2, 3, 7}) {
      std::vector<std::int64_t> const samples = shuffled(count, random_source{count});
      std::vector<std::int64_t> seen;
      std::size_t shortest = count, longest = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        auto const share = share_of(std::span{samples}, rank, ranks);
        seen.insert(seen.end(), share.begin(), share.end());
        shortest = std::min(shortest, share.size());
        longest = std::max(longest, share.size());
      }
      CHECK(seen == samples);
      CHECK(longest - shortest <= 1);
      CHECK(longest == share_of(std::span{samples}, 0, ranks).size());
    }
}

TEST_CASE("What is started as a rank has its share of the cores, if there is one for each") {
  auto const cores = usable_cores();
  REQUIRE(!cores.empty());
  auto const all = static_cast<int>(cores.size());
  for (int const ranks : {1, all, all + 1}) {
    std::vector<int> given;
    {
      core_shares const shares;
      for (int rank = 0; rank < ranks; ++rank) {
        shares.enter(rank, ranks);
        std::jthread const started{[&] {
          auto const own = usable_cores();
          given.insert(given.end(), own.begin(), own.end());
        }};
      }
    }
    CHECK(given.size() == (ranks > all ? cores.size() * static_cast<std::size_t>(ranks) : cores.size()));
    given.resize(cores.size());
    CHECK(given == cores);
    CHECK(usable_cores() == cores);
  }
}

TEST_CASE("A step has as many samples as its passes, but no more than there are") {
  options opts;
  opts.batch_size = 8;
  CHECK(opts.step_samples(100) == 8);
  opts.grad_accumulation = 3;
  CHECK(opts.step_samples(100) == 24);
  CHECK(opts.step_samples(24) == 24);
  CHECK(opts.step_samples(23) == 23);
  opts.batch_size = opts.grad_accumulation = std::size_t{1} << 40;
  CHECK(opts.step_samples(100) == 100);
}

TEST_CASE("Shuffling keeps every number, and the seed decides the order") {
  auto const order = shuffled(1000, random_source{1, 2});
  auto sorted = order;
  std::ranges::sort(sorted);
  std::vector<std::int64_t> expected(1000);
  std::iota(expected.begin(), expected.end(), 0);
  CHECK(sorted == expected);
  CHECK(order != expected);
  CHECK(order == shuffled(1000, random_source{1, 2}));
  CHECK(order != shuffled(1000, random_source{1, 3}));
  CHECK(order != shuffled(1000, random_source{2, 2}));
}

TEST_CASE("Padding makes equal blocks and loses no sample") {
  CHECK(padded_indices(5, 3) == std::vector<std::int64_t>{0, 1, 2, 3, 4, no_sample});
  CHECK(padded_indices(4, 2) == std::vector<std::int64_t>{0, 1, 2, 3});
  CHECK(padded_indices(1, 3) == std::vector<std::int64_t>{0, no_sample, no_sample});
}

TEST_CASE("The mean between the 10th and the 90th percentile leaves outliers out") {
  auto const mean = [](std::vector<double> const& values) { return mean_between_percentiles(values); };
  CHECK(mean({}) == 0);
  CHECK(mean({3}) == 3);
  CHECK(mean({1, 2, 6}) == 3);
  CHECK(mean({1000, 2, 3, 4, 5, 6, 7, 8, 9, -50}) == 5.5);
  std::vector<double> twenty(20, 7.0);
  twenty[3] = twenty[17] = 1e9;
  CHECK(mean(twenty) == 7);
  CHECK(peak_memory() > 1 << 20);
}

TEST_CASE("Options and environment decide what a process is") {
  std::map<std::string, std::string> variables;
  options opts;
  auto const found = [&](bool chosen = true) {
    return find_membership(opts, chosen, [&](char const* name) {
      auto const variable = variables.find(name);
      return variable == variables.end() ? nullptr : variable->second.c_str();
    });
  };
  using syncnorm::invalid_argument_error;

  CHECK(found().kind == membership_kind::starter);
  CHECK(found().ranks == 2);
  opts.backend = backend_kind::threads;
  CHECK(found().kind == membership_kind::threads);
  opts.ranks = 1;
  CHECK(found().kind == membership_kind::alone);
  opts.backend = backend_kind::mpi;
  CHECK_THROWS_WITH_AS(found(), doctest::Contains("mpirun -n 1 train_cifar"), invalid_argument_error);

  variables = {{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_RANK", "5"}};
  CHECK(found().kind == membership_kind::mpi);
  CHECK(found().rank == 5);
  CHECK(found().ranks == 8);
  opts.backend = backend_kind::gloo;
  CHECK(found(false).kind == membership_kind::mpi);
  CHECK_THROWS_WITH_AS(found(), doctest::Contains("only --backend mpi"), invalid_argument_error);

  variables = {{"RANK", "1"}, {"WORLD_SIZE", "3"}};
  CHECK_THROWS_WITH_AS(found(), doctest::Contains("--rendezvous"), invalid_argument_error);
  opts.rendezvous = "redis:host:6379";
  CHECK(found().kind == membership_kind::gloo);
  CHECK(found().rank == 1);
  CHECK(found().ranks == 3);
  opts.backend = backend_kind::threads;
  CHECK_THROWS_WITH_AS(found(), doctest::Contains("--backend gloo"), invalid_argument_error);
  opts.backend = backend_kind::nccl;
  CHECK_THROWS_WITH_AS(found(), doctest::Contains("it needs --device cuda"), invalid_argument_error);
  opts.device = device_kind::cuda;
  CHECK(found().kind == membership_kind::gloo); // over which they meet
  opts.backend = backend_kind::gloo;
  variables["RANK"] = "3";
  CHECK_THROWS_WITH_AS(found(), doctest::Contains("they are 3 and 3"), invalid_argument_error);
  variables["RANK"] = "one";
  CHECK_THROWS_WITH_AS(found(), "RANK is 'one', expected a number", invalid_argument_error);
}

TEST_CASE("Records come back as they were, and differences beyond rounding are told") {
  temporary_folder const folder;
  auto const path = folder / "record";
  run_record const record{0x1p-53, 4096, {{1, "loss", {0.1}}, {1, "outputs", {-2, 1.0 / 3, 0}}, {2, "loss", {1e-300}}}};
  write_record(path, record);
  run_record other = read_record(path);
  REQUIRE(other.entries.size() == 3);
  CHECK(other.roundoff == record.roundoff);
  CHECK(other.longest_sum == 4096);
  CHECK(other.entries[1].quantity == "outputs");
  CHECK(other.entries[1].values == record.entries[1].values);
  CHECK(compare_records(other, record));

  double const tolerance = rounding_tolerance(record, 1);
  CHECK(tolerance == doctest::Approx(256 * 0x1p-53));
  CHECK(rounding_tolerance(record, 3) == doctest::Approx(3 * tolerance));
  other.entries[1].values[2] = 1.9 * tolerance; // relative to the largest value, 2
  CHECK(compare_records(other, record));
  other.entries[1].values[2] = 2.1 * tolerance;
  CHECK_FALSE(compare_records(other, record));
  other.entries[1].values[2] = std::numeric_limits<double>::quiet_NaN();
  CHECK_FALSE(compare_records(other, record));

  other.entries.pop_back();
  CHECK_THROWS_WITH_AS((void)compare_records(other, record), doctest::Contains("not of the same work"),
                       syncnorm::error);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  CHECK_THROWS_WITH_AS((void)read_record(path), doctest::Contains("ends within entry 3"), syncnorm::error);
  write_file(path, "something else");
  CHECK_THROWS_WITH_AS((void)read_record(path), doctest::Contains("is no record"), syncnorm::error);
  CHECK_THROWS_WITH_AS((void)read_record(folder / "none"),
                       doctest::Contains("none: cannot be read: No such file or directory"), syncnorm::error);
}

TEST_CASE("Whether a file can be written is found out without a trace") {
  temporary_folder const folder;
  CHECK(obstacle_to_writing("").empty());
  CHECK(obstacle_to_writing(folder / "new").empty());
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
  write_file(folder / "old", "something");
  CHECK(obstacle_to_writing(folder / "old").empty());
  CHECK(read_file(folder / "old") == "something");
  CHECK(obstacle_to_writing(folder / "none/new") ==
        (folder / "none/new").string() + ": cannot be written: No such file or directory");
  CHECK(obstacle_to_writing(folder.path()) == folder.path().string() + ": cannot be written: Is a directory");
}

TEST_CASE("Paths to one file are known as such") {
  temporary_folder const folder;
  CHECK(same_file("new", "./new"));
  CHECK(same_file(folder / "new", folder / "none/../new"));
  CHECK_FALSE(same_file(folder / "new", folder / "other"));
  CHECK_FALSE(same_file("", ""));
}

TEST_CASE("Results come back as they were") {
  temporary_folder const folder;
  write_result(folder / "result", {"2 ranks (Gloo), synchronized", 20000, 5000, 0.875, 0.25, 1.0 / 3, 123456789});
  run_result const result = read_result(folder / "result");
  CHECK(result.title == "2 ranks (Gloo), synchronized");
  CHECK(result.train_images == 20000);
  CHECK(result.test_images == 5000);
  CHECK(result.test_accuracy == 0.875);
  CHECK(result.epoch_seconds == 1.0 / 3);
  CHECK(result.peak_memory == 123456789);
  CHECK_THROWS_WITH_AS((void)read_result(folder / "none"),
                       doctest::Contains("none: cannot be read: No such file or directory"), syncnorm::error);
}
