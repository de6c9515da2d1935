#pragma once

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <syncnorm/core/error.hpp>

#include "cores.hpp"
#include "signals.hpp"

namespace train_cifar {

/// Where temporary files go.
inline std::filesystem::path temporary_directory() {
  std::error_code code;
  auto path = std::filesystem::temp_directory_path(code);
  if (code) throw syncnorm::error{"TMPDIR, the folder for temporary files, cannot be used: " + code.message()};
  return path;
}

namespace detail {

inline constexpr char const* starter_variable = "TRAIN_CIFAR_STARTER";

/// An empty folder that is removed in the end.
class temporary_folder {
public:
  temporary_folder() : path_{(temporary_directory() / "train_cifar.XXXXXX").string()} {
    if (::mkdtemp(path_.data()) == nullptr)
      throw syncnorm::error{path_ + ": cannot be made: " + std::generic_category().message(errno)};
  }
  ~temporary_folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  temporary_folder(temporary_folder const&) = delete;
  temporary_folder& operator=(temporary_folder const&) = delete;

  [[nodiscard]] std::string const& path() const { return path_; }

private:
  std::string path_;
};

/// The signals that end this program and the one that tells of a child's end, kept for `next` instead of being delivered.
class held_signals {
public:
  held_signals() {
    // A parent that ignores SIGCHLD would hand that down, and the ends of children would be lost.
    std::signal(SIGCHLD, SIG_DFL);
    sigemptyset(&held_);
    add_heeded_signals(held_, std::array{SIGCHLD, SIGINT, SIGTERM, SIGHUP});
    sigprocmask(SIG_BLOCK, &held_, &before_);
  }
  ~held_signals() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  held_signals(held_signals const&) = delete;
  held_signals& operator=(held_signals const&) = delete;

  [[nodiscard]] int next() const {
    int signal = 0;
    sigwait(&held_, &signal);
    return signal;
  }
  [[nodiscard]] sigset_t const& before() const { return before_; }

private:
  sigset_t held_{}, before_{};
};

/// Processes that start together and end together.
class process_group {
public:
  process_group() = default;
  process_group(process_group const&) = delete;
  process_group& operator=(process_group const&) = delete;
  ~process_group() {
    kill_all();
    for (int status = 0; pid_t const& child : children_)
      if (child > 0) ::waitpid(child, &status, 0);
  }

  void start(std::vector<std::string> const& arguments, std::vector<std::string> const& environment,
             sigset_t const& mask) {
    auto const pointers = [](std::vector<std::string> const& strings) {
      std::vector<char*> result;
      for (auto const& string : strings) result.push_back(const_cast<char*>(string.c_str()));
      result.push_back(nullptr);
      return result;
    };
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setsigmask(&attributes, &mask);
    pid_t child = -1;
    int const status = ::posix_spawn(&child, "/proc/self/exe", nullptr, &attributes, pointers(arguments).data(),
                                     pointers(environment).data());
    posix_spawnattr_destroy(&attributes);
    if (status != 0)
      throw syncnorm::error{"rank " + std::to_string(children_.size()) +
                            " cannot be started: " + std::generic_category().message(status)};
    children_.push_back(child);
    ++running_;
  }

  [[nodiscard]] bool running() const { return running_ > 0; }

  /// Takes note of who has ended. Returns the first failure: 0, or an exit status as a shell would give it.
  [[nodiscard]] int reap() {
    int failure = 0;
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      int status = 0;
      if (children_[rank] <= 0 || ::waitpid(children_[rank], &status, WNOHANG) != children_[rank]) continue;
      children_[rank] = 0;
      --running_;
      if (WIFSIGNALED(status)) {
        std::fprintf(stderr, "train_cifar: rank %zu was killed by signal %d (%s)\n", rank, WTERMSIG(status),
                     ::strsignal(WTERMSIG(status)));
        failure = failure != 0 ? failure : 128 + WTERMSIG(status);
      } else if (WEXITSTATUS(status) != 0) {
        std::fprintf(stderr, "train_cifar: rank %zu ended with status %d\n", rank, WEXITSTATUS(status));
        failure = failure != 0 ? failure : WEXITSTATUS(status);
      }
    }
    return failure;
  }

  void kill_all() const {
    for (pid_t const child : children_)
      if (child > 0) ::kill(child, SIGKILL);
  }

private:
  std::vector<pid_t> children_;
  int running_ = 0;
};

/// The environment of rank `rank`: this process's own but for what says which rank it is.
inline std::vector<std::string> environment_of_rank(int rank, int ranks) {
  std::vector<std::string> result{"RANK=" + std::to_string(rank), "WORLD_SIZE=" + std::to_string(ranks),
                                  std::string{starter_variable} + "=" + std::to_string(::getpid())};
  std::size_t const own = result.size();
  for (char** variable = environ; *variable != nullptr; ++variable) {
    std::string_view const text{*variable};
    bool replaced = false;
    for (std::size_t i = 0; i < own; ++i)
      replaced = replaced || text.starts_with(std::string_view{result[i]}.substr(0, result[i].find('=') + 1));
    if (!replaced) result.emplace_back(text);
  }
  return result;
}

} // namespace detail

/// Starts `ranks` processes of this program with the same arguments, a share of the cores each, and a rendezvous in a temporary
/// folder, and waits for them. When one fails, or this process is told to end, the others are killed. Returns the exit status of the whole.
inline int start_ranks(int ranks, std::span<char* const> arguments) {
  detail::temporary_folder const folder;
  detail::held_signals const signals;
  detail::process_group group;
  std::vector<std::string> all(arguments.begin(), arguments.end());
  // The last of an option's values counts, so that the user chooses the interface, but not where these ranks meet.
  all.insert(all.begin() + 1, {"--interface", "lo"});
  all.insert(std::find(all.begin(), all.end(), "--"), {"--rendezvous", "file:" + folder.path()});
  std::fflush(nullptr);
  {
    core_shares const shares;
    for (int rank = 0; rank < ranks; ++rank) {
      shares.enter(rank, ranks);
      group.start(all, detail::environment_of_rank(rank, ranks), signals.before());
    }
  }

  int outcome = 0;
  while (group.running()) {
    int const signal = signals.next();
    int const failure = signal == SIGCHLD ? group.reap() : 128 + signal;
    if (failure == 0) continue;
    outcome = failure;
    break;
  }
  return outcome;
}

/// Sees to it that a rank that `start_ranks` started does not outlive its starter.
inline void end_with_starter() {
  char const* const starter = std::getenv(detail::starter_variable);
  if (starter == nullptr) return;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (std::to_string(::getppid()) != starter) std::_Exit(1); // it ended before it could be watched
}

} // namespace train_cifar
