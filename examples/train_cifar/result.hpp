#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <syncnorm/core/error.hpp>

#include "files.hpp"

namespace train_cifar {

/// What a run ends with.
struct run_result {
  std::string title;
  std::size_t train_images = 0, test_images = 0;
  /// Share of the test images that are told right, in [0, 1]; negative where they were not looked at.
  double test_accuracy = -1;
  double train_loss = 0;
  /// Mean between the 10th and the 90th percentile of the epochs.
  double epoch_seconds = 0;
  /// Of the process that held most.
  std::int64_t peak_memory = 0;
};

/// Prints the results below one another, one line each.
inline void print_results(std::span<run_result const> results) {
  std::size_t width = 4;
  for (auto const& result : results) width = std::max(width, result.title.size());
  int const column = static_cast<int>(width);
  std::printf("\n%-*s  test accuracy  train loss  epoch time  peak memory  images (train/test)\n", column, "run");
  for (auto const& result : results) {
    char accuracy[32] = "not tested";
    if (result.test_accuracy >= 0) std::snprintf(accuracy, sizeof accuracy, "%.2f %%", 100 * result.test_accuracy);
    std::printf("%-*s  %13s  %10.4f  %8.2f s  %7.0f MiB  %zu/%zu\n", column, result.title.c_str(), accuracy,
                result.train_loss, result.epoch_seconds, static_cast<double>(result.peak_memory) / 1048576,
                result.train_images, result.test_images);
  }
  std::printf(
      "Epoch time is the mean between the 10th and the 90th percentile, peak memory that of the largest process.\n");
}

/// Writes one result as a file for `read_result`.
inline void write_result(std::filesystem::path const& path, run_result const& result) {
  std::ofstream file{path};
  file.precision(17);
  file << result.title << '\n'
       << result.train_images << ' ' << result.test_images << ' ' << result.test_accuracy << ' ' << result.train_loss
       << ' ' << result.epoch_seconds << ' ' << result.peak_memory << '\n';
  if (!file.flush()) throw syncnorm::error{path.string() + ": cannot be written"};
}

[[nodiscard]] inline run_result read_result(std::filesystem::path const& path) {
  std::ifstream file = open_to_read(path);
  run_result result;
  std::getline(file, result.title);
  file >> result.train_images >> result.test_images >> result.test_accuracy >> result.train_loss >>
      result.epoch_seconds >> result.peak_memory;
  if (!file) throw syncnorm::error{path.string() + ": is no result of a run"};
  return result;
}

} // namespace train_cifar
