#include "../../../examples/train_cifar/data_set.hpp"

#include <string>

#include <doctest/doctest.h>

#include "temporary_folder.hpp"

using namespace train_cifar;

namespace {

/// A record whose pixels count upwards from `first`.
std::string record(std::string labels, int first) {
  for (std::size_t i = 0; i < image_bytes; ++i) labels.push_back(static_cast<char>(first + static_cast<int>(i)));
  return labels;
}

std::string label(int value) { return std::string(1, static_cast<char>(value)); }

void write_cifar_10(temporary_folder const& folder) {
  for (int batch = 1; batch <= 5; ++batch)
    write_file(folder / ("data_batch_" + std::to_string(batch) + ".bin"),
               record(label(batch), batch) + record(label(9), 100 + batch));
  write_file(folder / "test_batch.bin", record(label(0), 200));
}

void write_cifar_100(temporary_folder const& folder) {
  write_file(folder / "train.bin", record(label(19) + label(99), 1) + record(label(0) + label(42), 2));
  write_file(folder / "test.bin", record(label(3) + label(7), 3));
}

std::string failure_of(std::filesystem::path const& directory) {
  try {
    (void)read_data_set(directory);
  } catch (syncnorm::error const& failure) {
    return failure.what();
  }
  return "";
}

} // namespace

TEST_CASE("CIFAR-10: all batches are read, in order") {
  temporary_folder const folder;
  write_cifar_10(folder);
  data_set const data = read_data_set(folder.path());
  CHECK(data.name == "CIFAR-10");
  CHECK(data.classes == 10);
  CHECK(data.train.labels == std::vector<std::int64_t>{1, 9, 2, 9, 3, 9, 4, 9, 5, 9});
  REQUIRE(data.train.pixels.size() == 10 * image_bytes);
  CHECK(int{data.train.pixels[0]} == 1);
  CHECK(int{data.train.pixels[9 * image_bytes + 5]} == 110);
  CHECK(data.test.labels == std::vector<std::int64_t>{0});
  CHECK(int{data.test.pixels[image_bytes - 1]} == ((200 + 3071) & 255));
}

TEST_CASE("CIFAR-100: the fine label is the one that is learnt") {
  temporary_folder const folder;
  write_cifar_100(folder);
  data_set const data = read_data_set(folder.path());
  CHECK(data.name == "CIFAR-100");
  CHECK(data.classes == 100);
  CHECK(data.train.labels == std::vector<std::int64_t>{99, 42});
  CHECK(int{data.train.pixels[image_bytes]} == 2);
  CHECK(data.test.labels == std::vector<std::int64_t>{7});
}

TEST_CASE("What is missing or damaged is named with its path and byte offset") {
  temporary_folder const folder;
  auto const path = [&](char const* file) { return (folder / file).string(); };

  CHECK(failure_of(folder.path()) ==
        folder.path().string() + ": holds neither data_batch_1.bin of CIFAR-10 nor train.bin of CIFAR-100");
  CHECK(failure_of(folder / "none") == path("none") + ": does not exist");

  SUBCASE("a missing file") {
    write_cifar_10(folder);
    std::filesystem::remove(folder / "data_batch_4.bin");
    CHECK(failure_of(folder.path()) == path("data_batch_4.bin") + ": cannot be read: No such file or directory");
  }
  SUBCASE("a missing file of CIFAR-100") {
    write_cifar_100(folder);
    std::filesystem::remove(folder / "train.bin");
    CHECK(failure_of(folder.path()) == path("train.bin") + ": cannot be read: No such file or directory");
  }
  SUBCASE("a truncated record") {
    write_cifar_10(folder);
    std::filesystem::resize_file(folder / "data_batch_2.bin", 3073 + 100);
    CHECK(failure_of(folder.path()) ==
          path("data_batch_2.bin") + ": truncated CIFAR-10 record at byte offset 3073: 100 of its 3073 bytes");
  }
  SUBCASE("a truncated record of CIFAR-100") {
    write_cifar_100(folder);
    std::filesystem::resize_file(folder / "train.bin", 2 * 3074 - 1);
    CHECK(failure_of(folder.path()) ==
          path("train.bin") + ": truncated CIFAR-100 record at byte offset 3074: 3073 of its 3074 bytes");
  }
  SUBCASE("an empty file") {
    write_cifar_10(folder);
    std::filesystem::resize_file(folder / "test_batch.bin", 0);
    CHECK(failure_of(folder.path()) ==
          path("test_batch.bin") + ": truncated CIFAR-10 record at byte offset 0: 0 of its 3073 bytes");
  }
  SUBCASE("a label out of range") {
    write_cifar_10(folder);
    write_file(folder / "data_batch_5.bin", record(label(9), 1) + record(label(10), 1));
    CHECK(failure_of(folder.path()) == path("data_batch_5.bin") + ": label 10 at byte offset 3073, expected 0 to 9");
  }
  SUBCASE("a coarse label out of range") {
    write_cifar_100(folder);
    write_file(folder / "test.bin", record(label(20) + label(5), 1));
    CHECK(failure_of(folder.path()) == path("test.bin") + ": label 20 at byte offset 0, expected 0 to 19");
  }
  SUBCASE("a fine label out of range") {
    write_cifar_100(folder);
    write_file(folder / "test.bin", record(label(0) + label(0), 1) + record(label(0) + label(255), 1));
    CHECK(failure_of(folder.path()) == path("test.bin") + ": label 255 at byte offset 3075, expected 0 to 99");
  }
}
