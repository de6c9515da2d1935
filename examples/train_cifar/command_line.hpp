#pragma once

#include <filesystem>
#include <vector>

#include "options.hpp"

namespace train_cifar {

/// What the user asks for.
struct command {
  enum class kind_type : std::uint8_t { train, compare, table, help } kind = kind_type::train;
  options train;
  /// Whether --backend was given.
  bool backend_chosen = false;
  /// The two records to compare.
  std::filesystem::path record, reference;
  /// The results to print.
  std::vector<std::filesystem::path> results;
  /// The status to end with where `kind` is help, which includes that something on the command line is wrong.
  int status = 0;
};

/// Reads the command line; help, and what is wrong, are printed.
[[nodiscard]] command read_command_line(int argc, char** argv);

} // namespace train_cifar
