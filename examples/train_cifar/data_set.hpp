#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <syncnorm/core/error.hpp>

namespace train_cifar {

inline constexpr std::size_t image_side = 32;
inline constexpr std::size_t image_bytes = 3 * image_side * image_side;

/// One of the two published binary formats: label bytes, then the red, the green and the blue plane of 32x32 bytes each.
struct record_format {
  std::string_view name;
  /// How many values each label byte of a record can have; the last label is the one that is learnt.
  std::span<int const> label_ranges;

  [[nodiscard]] std::size_t record_bytes() const { return label_ranges.size() + image_bytes; }
  [[nodiscard]] int classes() const { return label_ranges.back(); }
};

namespace detail {
inline constexpr std::array<int, 1> cifar_10_labels{10};
inline constexpr std::array<int, 2> cifar_100_labels{20, 100};
} // namespace detail

inline constexpr record_format cifar_10{"CIFAR-10", detail::cifar_10_labels};
inline constexpr record_format cifar_100{"CIFAR-100", detail::cifar_100_labels};

/// Images and their labels; image i is the bytes [i * image_bytes, (i + 1) * image_bytes).
struct image_set {
  std::vector<std::uint8_t> pixels;
  std::vector<std::int64_t> labels;

  [[nodiscard]] std::size_t size() const { return labels.size(); }
};

struct data_set {
  std::string name;
  int classes = 0;
  image_set train, test;
};

/// Appends the records of the file `path` to `images`. Throws syncnorm::error with the path, and with the byte offset of
/// what is wrong in it: a record that is cut off, a label out of range.
inline void append_records(std::filesystem::path const& path, record_format const& format, image_set& images) {
  auto const fail = [&](std::string const& what) { throw syncnorm::error{path.string() + ": " + what}; };

  std::error_code status;
  auto const file_bytes = static_cast<std::size_t>(std::filesystem::file_size(path, status));
  if (status) fail("cannot be read: " + status.message());
  std::ifstream file{path, std::ios::binary};
  if (!file) fail("cannot be opened");

  std::size_t const record_bytes = format.record_bytes();
  std::size_t const records = file_bytes / record_bytes;
  if (std::size_t const rest = file_bytes % record_bytes; rest != 0 || records == 0)
    fail("truncated " + std::string{format.name} + " record at byte offset " + std::to_string(file_bytes - rest) +
         ": " + std::to_string(rest) + " of its " + std::to_string(record_bytes) + " bytes");

  std::size_t const before = images.size();
  images.labels.resize(before + records);
  images.pixels.resize((before + records) * image_bytes);
  std::vector<char> labels(format.label_ranges.size());
  for (std::size_t i = 0; i < records; ++i) {
    file.read(labels.data(), static_cast<std::streamsize>(labels.size()));
    file.read(reinterpret_cast<char*>(&images.pixels[(before + i) * image_bytes]), image_bytes);
    if (!file) fail("reading failed in the record at byte offset " + std::to_string(i * record_bytes));
    for (std::size_t k = 0; k < labels.size(); ++k)
      if (int const label = static_cast<unsigned char>(labels[k]); label >= format.label_ranges[k])
        fail("label " + std::to_string(label) + " at byte offset " + std::to_string(i * record_bytes + k) +
             ", expected 0 to " + std::to_string(format.label_ranges[k] - 1));
    images.labels[before + i] = static_cast<unsigned char>(labels.back());
  }
}

/// Reads CIFAR-10 or CIFAR-100 from the published binary files in `directory`, whichever of the two is there. Throws
/// syncnorm::error where a file is missing or damaged.
[[nodiscard]] inline data_set read_data_set(std::filesystem::path const& directory) {
  if (!std::filesystem::exists(directory)) throw syncnorm::error{directory.string() + ": does not exist"};
  auto const exists = [&](char const* file) { return std::filesystem::exists(directory / file); };
  bool const ten = exists("data_batch_1.bin") || exists("test_batch.bin");
  if (!ten && !exists("train.bin") && !exists("test.bin"))
    throw syncnorm::error{directory.string() +
                          ": holds neither data_batch_1.bin of CIFAR-10 nor train.bin of CIFAR-100"};

  record_format const& format = ten ? cifar_10 : cifar_100;
  data_set data{std::string{format.name}, format.classes(), {}, {}};
  if (ten) {
    for (int batch = 1; batch <= 5; ++batch)
      append_records(directory / ("data_batch_" + std::to_string(batch) + ".bin"), format, data.train);
    append_records(directory / "test_batch.bin", format, data.test);
  } else {
    append_records(directory / "train.bin", format, data.train);
    append_records(directory / "test.bin", format, data.test);
  }
  return data;
}

} // namespace train_cifar
