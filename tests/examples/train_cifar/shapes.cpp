#include "../../../examples/train_cifar/shapes_data_set.hpp"

#include <algorithm>
#include <array>
#include <csignal>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <sys/resource.h>

#include "temporary_folder.hpp"

using namespace train_cifar;

namespace {

constexpr shapes_options few{.train_images = 57, .test_images = 20, .seed = 3};

std::size_t files_in(std::filesystem::path const& folder) {
  auto const entries = std::filesystem::directory_iterator{folder};
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

} // namespace

TEST_CASE("The drawn data set is a balanced CIFAR-10, of different images") {
  temporary_folder const folder;
  make_shapes(folder / "deep/shapes", few);
  data_set const data = read_data_set(folder / "deep/shapes");
  CHECK(data.name == "CIFAR-10");
  CHECK(data.train.size() == 57);
  CHECK(data.test.size() == 20);
  for (std::int64_t label = 0; label < shape_classes; ++label) {
    CHECK(std::ranges::count(data.test.labels, label) == 2);
    auto const count = std::ranges::count(data.train.labels, label);
    CHECK((count == 5 || count == 6));
  }
  auto const image = [](image_set const& set, std::size_t i) {
    auto const first = set.pixels.begin() + static_cast<std::ptrdiff_t>(i * image_bytes);
    return std::vector<std::uint8_t>(first, first + image_bytes);
  };
  CHECK(image(data.train, 0) != image(data.train, 10));
  CHECK(image(data.train, 0) != image(data.test, 0));
  // An image is more than its noise: some shape is there to be seen.
  auto const [darkest, lightest] = std::ranges::minmax(image(data.train, 1));
  CHECK(lightest > darkest);
}

TEST_CASE("A drawn data set has at least one image in each file") {
  temporary_folder const folder;
  make_shapes(folder / "least", {.train_images = 5, .test_images = 1});
  CHECK(read_data_set(folder / "least").train.size() == 5);
  for (auto const& [train_images, test_images] : {std::pair{4u, 1u}, std::pair{5u, 0u}})
    CHECK_THROWS_AS(make_shapes(folder / "fewer", {.train_images = train_images, .test_images = test_images}),
                    syncnorm::invalid_argument_error);
  CHECK_FALSE(std::filesystem::exists(folder / "fewer"));
}

TEST_CASE("The seed decides the bytes, also where several make the data set at once") {
  temporary_folder const folder;
  {
    std::vector<std::jthread> makers;
    for (int i = 0; i < 4; ++i) makers.emplace_back([&] { make_shapes(folder / "same", few); });
  }
  CHECK(files_in(folder.path()) == 1); // nothing unfinished is left
  CHECK(files_in(folder / "same") == 6);

  make_shapes(folder / "again", few);
  auto other = few;
  other.seed = 4;
  make_shapes(folder / "other", other);
  for (auto const* name : {"/data_batch_1.bin", "/data_batch_5.bin", "/test_batch.bin"}) {
    CHECK(read_file(folder / (std::string{"same"} + name)) == read_file(folder / (std::string{"again"} + name)));
    CHECK(read_file(folder / (std::string{"same"} + name)) != read_file(folder / (std::string{"other"} + name)));
  }
  CHECK(shapes_directory("cache", few) != shapes_directory("cache", other));
}

TEST_CASE("What cannot be written leaves nothing behind") {
  temporary_folder const folder;
  auto const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  rlimit const small{10000, before.rlim_max};
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  CHECK_THROWS_WITH_AS(make_shapes(folder / "shapes", few), doctest::Contains("data_batch_1.bin: cannot be written"),
                       syncnorm::error);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(files_in(folder.path()) == 0);
}

TEST_CASE("Another drawing goes by another name: change drawing_version with this mean") {
  std::array<std::uint8_t, image_bytes> image{};
  std::uint64_t sum = 0;
  for (int label = 0; label < shape_classes; ++label) {
    draw_shape(1, static_cast<std::uint64_t>(label), label, image);
    for (auto const byte : image) sum += byte;
  }
  CHECK(drawing_version == 1);
  // Over ten images, what a compiler rounds differently in single pixels does not show.
  CHECK(static_cast<double>(sum) / (10.0 * image_bytes) == doctest::Approx(128.909).epsilon(1e-4));
}
