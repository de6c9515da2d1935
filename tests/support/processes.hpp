#pragma once

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

// Ranks as processes: the test forks them, so it must have no other thread running.
namespace test_support {

inline std::atomic<int> failed_assertions = 0;

/// Counts what fails, so that a child can report it to its parent.
struct failure_counter : doctest::IReporter {
  explicit failure_counter(doctest::ContextOptions const&) {}
  void report_query(doctest::QueryData const&) override {}
  void test_run_start() override {}
  void test_run_end(doctest::TestRunStats const&) override {}
  void test_case_start(doctest::TestCaseData const&) override {}
  void test_case_reenter(doctest::TestCaseData const&) override {}
  void test_case_end(doctest::CurrentTestCaseStats const&) override {}
  void test_case_exception(doctest::TestCaseException const&) override { ++failed_assertions; }
  void subcase_start(doctest::SubcaseSignature const&) override {}
  void subcase_end() override {}
  void log_assert(doctest::AssertData const& assertion) override {
    if (assertion.m_failed) ++failed_assertions;
  }
  void log_message(doctest::MessageData const&) override {}
  void test_case_skipped(doctest::TestCaseData const&) override {}
};
REGISTER_LISTENER("failure_counter", 1, failure_counter);

struct process_outcome {
  int exit_code = -1;
  int signal = 0;
  bool late = false; ///< killed because the deadline had passed
  std::string output;
};

/// A directory of its own, removed at the end.
class temporary_directory {
public:
  temporary_directory() {
    std::string name = (std::filesystem::temp_directory_path() / "syncnorm-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error{"mkdtemp " + name};
    path_ = name;
  }
  temporary_directory(temporary_directory const&) = delete;
  temporary_directory& operator=(temporary_directory const&) = delete;
  ~temporary_directory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string path() const { return path_.string(); }

private:
  std::filesystem::path path_;
};

/// Runs body(0), …, body(count - 1) in a process each. A process fails by a failed assertion or by an exception, and is
/// killed when the deadline has passed.
inline std::vector<process_outcome> run_processes(int count, std::chrono::milliseconds deadline,
                                                  std::function<void(int)> const& body) {
  std::filesystem::directory_iterator const threads{"/proc/self/task"};
  if (std::distance(begin(threads), end(threads)) != 1)
    throw std::logic_error{"run_processes forks, and other threads run; select the test case without those before it"};
  auto const last = std::chrono::steady_clock::now() + deadline;
  temporary_directory const outputs;
  auto const output = [&](int i) { return outputs.path() + "/" + std::to_string(i); };
  std::vector<pid_t> running;
  std::cout.flush();
  std::fflush(nullptr);
  for (int i = 0; i < count; ++i) {
    auto const parent = getpid();
    auto const child = fork();
    if (child < 0) throw std::runtime_error{"fork failed"};
    if (child > 0) {
      running.push_back(child);
      continue;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(2);
    int const file = open(output(i).c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    failed_assertions = 0;
    try {
      body(i);
    } catch (std::exception const& failure) {
      std::cout << "exception: " << failure.what() << '\n';
      ++failed_assertions;
    }
    std::cout.flush();
    std::fflush(nullptr);
    _exit(failed_assertions == 0 ? 0 : 1);
  }

  std::vector<process_outcome> outcomes(running.size());
  for (std::size_t left = running.size(); left > 0;) {
    bool const late = std::chrono::steady_clock::now() >= last;
    for (std::size_t i = 0; i < running.size(); ++i) {
      if (running[i] == 0) continue;
      if (late) {
        outcomes[i].late = true;
        kill(running[i], SIGKILL);
      }
      int status = 0;
      if (waitpid(running[i], &status, late ? 0 : WNOHANG) != running[i]) continue;
      if (WIFEXITED(status)) outcomes[i].exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) outcomes[i].signal = WTERMSIG(status);
      running[i] = 0;
      --left;
    }
    if (left > 0) std::this_thread::sleep_for(std::chrono::milliseconds{2});
  }
  for (int i = 0; i < count; ++i) {
    if (auto* const file = std::fopen(output(i).c_str(), "r")) {
      char text[4096];
      for (std::size_t n; (n = std::fread(text, 1, sizeof text, file)) > 0;)
        outcomes[static_cast<std::size_t>(i)].output.append(text, n);
      std::fclose(file);
    }
  }
  return outcomes;
}

/// Every process must have ended by itself and without a failure.
inline void check_passed(std::vector<process_outcome> const& outcomes) {
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    INFO("process ", i, " of ", outcomes.size(), " wrote:\n", outcomes[i].output);
    CHECK_FALSE(outcomes[i].late);
    CHECK(outcomes[i].signal == 0);
    CHECK(outcomes[i].exit_code == 0);
  }
}

} // namespace test_support
