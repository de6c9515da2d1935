#pragma once

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "shapes.hpp"
#include "signals.hpp"

namespace train_cifar {

/// Goes into the name of the folder, so that nobody finds what an earlier version drew there.
inline constexpr int drawing_version = 1;

/// The files of CIFAR-10 that are learnt from.
inline constexpr std::size_t train_files = 5;

/// The file that is drawn last, to test with.
inline constexpr char const* last_file = "test_batch.bin";

/// How many images the drawn data set has, and from which seed.
struct shapes_options {
  std::size_t train_images = 20000;
  std::size_t test_images = 5000;
  std::uint64_t seed = 1;
};

/// Keeps the signals that would end this program until it goes, so that what is unfinished can be removed before.
class held_end {
public:
  held_end() {
    sigemptyset(&held_);
    add_heeded_signals(held_, signals);
    sigprocmask(SIG_BLOCK, &held_, &before_);
  }
  ~held_end() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  held_end(held_end const&) = delete;
  held_end& operator=(held_end const&) = delete;

  /// Whether one of them has come.
  [[nodiscard]] bool is_asked_for() const {
    sigset_t pending;
    sigpending(&pending);
    return std::ranges::any_of(
        signals, [&](int signal) { return sigismember(&held_, signal) == 1 && sigismember(&pending, signal) == 1; });
  }

private:
  static constexpr std::array signals{SIGINT, SIGTERM, SIGHUP};

  sigset_t held_{}, before_{};
};

/// Writes `count` drawn images in the CIFAR-10 format. The classes take turns, so that they are balanced. Whole, unless
/// `end` is asked for meanwhile.
inline void write_shapes(std::filesystem::path const& path, std::uint64_t seed, std::size_t first, std::size_t count,
                         held_end const& end) {
  std::ofstream file{path, std::ios::binary};
  std::vector<std::uint8_t> record(cifar_10.record_bytes());
  for (std::size_t i = first; i < first + count && file; ++i) {
    if (i % 1024 == 0 && end.is_asked_for()) return;
    int const label = static_cast<int>(i % shape_classes);
    record[0] = static_cast<std::uint8_t>(label);
    draw_shape(seed, i, label, std::span<std::uint8_t, image_bytes>{&record[1], image_bytes});
    file.write(reinterpret_cast<char const*>(record.data()), static_cast<std::streamsize>(record.size()));
  }
  if (!file.flush()) throw syncnorm::error{path.string() + ": cannot be written"};
}

/// Makes the drawn data set at `directory`, as the six files of CIFAR-10, unless it is there already. It appears under
/// its name at once and whole, whoever else makes it at the same time.
inline void make_shapes(std::filesystem::path const& place, shapes_options const& options = {}) {
  namespace fs = std::filesystem;
  fs::path const directory = (place / "").lexically_normal().parent_path(); // without a slash at its end
  if (options.train_images < train_files || options.test_images < 1)
    throw syncnorm::invalid_argument_error{"the drawn data set has no empty file: --train-images must be at least " +
                                           std::to_string(train_files) + " and --test-images at least 1; they are " +
                                           std::to_string(options.train_images) + " and " +
                                           std::to_string(options.test_images)};
  if (fs::exists(directory)) return;
  if (directory.has_parent_path()) fs::create_directories(directory.parent_path());
  held_end const end;
  std::string unfinished = directory.string() + ".XXXXXX";
  if (::mkdtemp(unfinished.data()) == nullptr)
    throw syncnorm::error{directory.string() + ": cannot be made: " + std::generic_category().message(errno)};

  struct removal {
    std::string const& folder;
    ~removal() {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
    }
  } const unless_renamed{unfinished};

  std::size_t done = 0;
  auto const write = [&](std::string const& name, std::size_t count) {
    if (!end.is_asked_for()) write_shapes(fs::path{unfinished} / name, options.seed, done, count, end);
    done += count;
  };
  for (std::size_t batch = 1; batch <= train_files; ++batch)
    write("data_batch_" + std::to_string(batch) + ".bin", options.train_images * batch / train_files - done);
  write(last_file, options.test_images);
  if (end.is_asked_for()) throw syncnorm::error{directory.string() + ": interrupted"};

  std::error_code status;
  auto const mask = ::umask(0);
  ::umask(mask);
  fs::permissions(unfinished, fs::perms::all & ~static_cast<fs::perms>(mask), status); // as of other folders
  fs::rename(unfinished, directory, status);
  // Somebody else's may have finished first, and holds the same bytes.
  if (status && !fs::exists(directory / last_file))
    throw syncnorm::error{directory.string() + ": cannot be made: " + status.message()};
}

/// Where the drawn data set lives below the folder `cache`.
[[nodiscard]] inline std::filesystem::path shapes_directory(std::filesystem::path const& cache,
                                                            shapes_options const& options = {}) {
  return cache / ("syncnorm-shapes-" + std::to_string(drawing_version) + "-" + std::to_string(options.train_images) +
                  "-" + std::to_string(options.test_images) + "-" + std::to_string(options.seed) + "-user" +
                  std::to_string(::getuid()));
}

} // namespace train_cifar
