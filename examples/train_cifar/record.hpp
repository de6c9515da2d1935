#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <syncnorm/core/error.hpp>

#include "files.hpp"

namespace train_cifar {

/// What one quantity was after one step, in full precision.
struct record_entry {
  std::size_t step;
  std::string quantity;
  std::vector<double> values;
};

/// The first steps of a run.
struct run_record {
  /// The unit roundoff of the run's arithmetic.
  double roundoff = 0;
  /// Terms of the longest sums of a step: elements of one channel in the largest layer.
  std::size_t longest_sum = 0;
  std::vector<record_entry> entries;
};

/// Writes a record: a line of text before each array of doubles in the machine's own byte order.
inline void write_record(std::filesystem::path const& path, run_record const& record) {
  std::ofstream file{path, std::ios::binary};
  file.precision(17);
  file << "train_cifar record " << record.roundoff << ' ' << record.longest_sum << ' ' << record.entries.size() << '\n';
  for (auto const& entry : record.entries) {
    file << entry.step << ' ' << entry.quantity << ' ' << entry.values.size() << '\n';
    file.write(reinterpret_cast<char const*>(entry.values.data()),
               static_cast<std::streamsize>(entry.values.size() * sizeof(double)));
  }
  if (!file.flush()) throw syncnorm::error{path.string() + ": cannot be written"};
}

[[nodiscard]] inline run_record read_record(std::filesystem::path const& path) {
  std::ifstream file = open_to_read(path);
  std::string program, kind;
  run_record record;
  std::size_t entries = 0;
  file >> program >> kind >> record.roundoff >> record.longest_sum >> entries;
  if (!file || program != "train_cifar" || kind != "record")
    throw syncnorm::error{path.string() + ": is no record of a run"};
  std::size_t const bytes = std::filesystem::file_size(path);
  for (std::size_t i = 0; i < entries; ++i) {
    record_entry entry{};
    std::size_t count = 0;
    file >> entry.step >> entry.quantity >> count;
    file.ignore(1);
    if (file && count <= bytes / sizeof(double)) {
      entry.values.resize(count);
      file.read(reinterpret_cast<char*>(entry.values.data()), static_cast<std::streamsize>(count * sizeof(double)));
    } else {
      file.setstate(std::ios::failbit);
    }
    if (!file) throw syncnorm::error{path.string() + ": ends within entry " + std::to_string(i + 1)};
    record.entries.push_back(std::move(entry));
  }
  return record;
}

} // namespace train_cifar
