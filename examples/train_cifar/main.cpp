// Trains a small convolutional network on CIFAR-10, CIFAR-100 or drawn shapes, on one rank or many.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>

#include "command_line.hpp"
#include "communicators.hpp"
#include "compare.hpp"
#include "launch.hpp"
#include "membership.hpp"
#include "train.hpp"

namespace train_cifar {

namespace {

/// The folder that the data is read from; the drawn shapes are made where there is no other.
std::filesystem::path data_directory(options const& opts) {
  if (!opts.data.empty()) return opts.data;
  auto const cache = opts.data_cache.empty() ? temporary_directory() : opts.data_cache;
  auto directory = shapes_directory(cache, opts.shapes);
  make_shapes(directory, opts.shapes);
  return directory;
}

int run(int argc, char** argv) {
  command const request = read_command_line(argc, argv);
  switch (request.kind) {
  case command::kind_type::help:
    return request.status;
  case command::kind_type::compare: {
    run_record const record = read_record(request.record), reference = read_record(request.reference);
    return compare_records(record, reference) ? 0 : 1;
  }
  case command::kind_type::table: {
    std::vector<run_result> results;
    for (auto const& path : request.results) results.push_back(read_result(path));
    print_results(results);
    return 0;
  }
  case command::kind_type::train:
    break;
  }

  options const& opts = request.train;
  membership const member =
      find_membership(opts, request.backend_chosen, [](char const* name) { return std::getenv(name); });
  auto const directory = data_directory(opts);
  if (member.kind == membership_kind::starter) return start_ranks(member.ranks, {argv, static_cast<std::size_t>(argc)});

  data_set const data = read_data_set(directory);
  run_as_member(member, opts, [&](syncnorm::any_communicator const& comm) {
    auto const result = train(comm, member, opts, data);
    if (!result) return;
    if (opts.result.empty()) return print_results({&*result, 1});
    try {
      write_result(opts.result, *result);
    } catch (syncnorm::error const&) {
      print_results({&*result, 1});
      throw;
    }
  });
  return 0;
}

} // namespace

} // namespace train_cifar

int main(int argc, char** argv) try {
  train_cifar::end_with_starter();
  int const status = train_cifar::run(argc, argv);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw syncnorm::error{"standard output cannot be written"};
  return status;
} catch (std::exception const& failure) {
  char const* const rank = std::getenv("RANK");
  std::fprintf(stderr, "train_cifar: %s%s%s%s\n", rank != nullptr ? "rank " : "", rank != nullptr ? rank : "",
               rank != nullptr ? ": " : "", failure.what());
  return 1;
}
