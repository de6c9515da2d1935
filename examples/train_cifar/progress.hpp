#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>

#include <unistd.h>

namespace train_cifar {

/// The bar of one epoch, with loss and images per second. Where standard output is no terminal there is no bar, only
/// the line that `finish` prints.
class progress {
public:
  progress(bool quiet, std::string title, std::size_t images)
      : title_{std::move(title)}, images_{images}, quiet_{quiet}, bar_{!quiet && ::isatty(STDOUT_FILENO) == 1} {}

  /// `done` images of the epoch have been seen, the last with the mean loss `loss`.
  void update(std::size_t done, double loss) {
    auto const now = clock::now();
    if (!bar_ || now - drawn_ < std::chrono::milliseconds{100}) return;
    drawn_ = now;
    constexpr std::size_t width = 30;
    std::size_t const full = width * done / images_;
    std::printf("\r%s [%s%s] loss %.4f %6.0f images/s", title_.c_str(), std::string(full, '#').c_str(),
                std::string(width - full, ' ').c_str(), loss, static_cast<double>(done) / seconds());
    std::fflush(stdout);
  }

  /// Replaces the bar by a line of the epoch's mean loss; returns the epoch's seconds.
  double finish(double loss) {
    double const taken = seconds();
    if (!quiet_) {
      std::printf("%s%s loss %.4f %6.0f images/s\n", bar_ ? "\r\033[K" : "", title_.c_str(), loss,
                  static_cast<double>(images_) / taken);
      std::fflush(stdout);
    }
    return taken;
  }

private:
  using clock = std::chrono::steady_clock;
  [[nodiscard]] double seconds() const { return std::chrono::duration<double>{clock::now() - begin_}.count(); }

  std::string title_;
  std::size_t images_;
  bool quiet_, bar_;
  clock::time_point begin_ = clock::now(), drawn_{};
};

} // namespace train_cifar
