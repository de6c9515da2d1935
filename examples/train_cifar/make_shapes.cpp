// Draws the data set that train_cifar uses when it is given none, in the binary format of CIFAR-10.

#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <string>

#include <CLI/CLI.hpp>

#include "../support/text_checks.hpp"
#include "shapes_data_set.hpp"

int main(int argc, char** argv) try {
  CLI::App app{"Draws shapes of ten classes and writes them in the binary format of CIFAR-10."};
  std::string directory;
  train_cifar::shapes_options options;
  app.add_option("directory", directory, "the folder to make")->required();
  app.add_option("--train-images", options.train_images, "images in data_batch_1.bin to data_batch_5.bin")
      ->check(example::whole_number(1))
      ->capture_default_str();
  app.add_option("--test-images", options.test_images, "images in test_batch.bin")
      ->check(example::whole_number(1))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "another seed draws other images")
      ->check(example::whole_number(0, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  if (std::filesystem::exists(directory)) throw syncnorm::error{directory + ": exists already"};
  train_cifar::make_shapes(directory, options);
} catch (std::exception const& failure) {
  std::fprintf(stderr, "make_shapes: %s\n", failure.what());
  return 1;
}
