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

/// Whether both paths lead to one file, which need not be there yet; no where they are empty.
[[nodiscard]] inline bool same_file(std::filesystem::path const& a, std::filesystem::path const& b) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  auto const place = [&](fs::path const& path) { return fs::weakly_canonical(fs::absolute(path, ignored), ignored); };
  return !a.empty() && !b.empty() && place(a) == place(b);
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
  if (!fs::exists(before)) fs::remove(fs::weakly_canonical(path, ignored), ignored); // not a link that leads there
  return "";
}

} // namespace train_cifar
