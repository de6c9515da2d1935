#pragma once

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include <syncnorm/core/error.hpp>

namespace train_cifar {

/// Throws syncnorm::error where the file cannot be opened.
[[nodiscard]] inline std::ifstream open_to_read(std::filesystem::path const& path) {
  std::ifstream file{path, std::ios::binary};
  if (!file) throw syncnorm::error{path.string() + ": cannot be read: " + std::generic_category().message(errno)};
  return file;
}

/// Why no file can be written at `path`; empty where one can, or where `path` is. What is there stays as it is.
[[nodiscard]] inline std::string obstacle_to_writing(std::filesystem::path const& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  auto const before = fs::status(path, ignored);
  // To open a pipe is to wait for its reader.
  if (path.empty() || fs::is_fifo(before)) return "";
  if (!std::ofstream{path, std::ios::app})
    return path.string() + ": cannot be written: " + std::generic_category().message(errno);
  if (!fs::exists(before)) fs::remove(path, ignored);
  return "";
}

} // namespace train_cifar
