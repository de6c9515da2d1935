// Runs the trainer as its users do: as one process, as threads, as processes over Gloo and over MPI.

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <sys/wait.h>

#include "../../../examples/train_cifar/record.hpp"
#include "temporary_folder.hpp"

namespace {

/// A shell command whose output can be read while it runs.
class shell {
public:
  explicit shell(std::string const& command) : pipe_{::popen(("exec 2>&1; " + command).c_str(), "re")} {
    REQUIRE(pipe_ != nullptr);
  }
  ~shell() {
    if (pipe_ != nullptr) (void)finish();
  }
  shell(shell const&) = delete;
  shell& operator=(shell const&) = delete;

  /// Reads one more line; false at the end of the output.
  bool read_line(std::string& line) {
    line.clear();
    for (int c = std::fgetc(pipe_); c != EOF; c = std::fgetc(pipe_)) {
      output += static_cast<char>(c);
      if (c == '\n') return true;
      line += static_cast<char>(c);
    }
    return !line.empty();
  }

  /// Waits for the end, and returns the exit status.
  int finish() {
    for (std::string line; read_line(line);) {
    }
    int const status = ::pclose(pipe_);
    pipe_ = nullptr;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  std::string output;

private:
  std::FILE* pipe_;
};

std::string const trainer = TRAIN_CIFAR_PATH;

struct outcome {
  int status;
  std::string output;
};

outcome run(std::string const& command) {
  shell process{command};
  int const status = process.finish();
  return {status, process.output};
}

void check_success(std::string const& command) {
  outcome const result = run(command);
  INFO(command, "\n", result.output);
  CHECK(result.status == 0);
}

int compare(std::filesystem::path const& record, std::filesystem::path const& reference) {
  auto const [status, output] = run(trainer + " compare " + record.string() + " " + reference.string());
  MESSAGE(output);
  return status;
}

/// The trainer with a tiny data set below `folder`.
std::string tiny(temporary_folder const& folder, std::string const& options) {
  return trainer + " --data-cache " + folder.path().string() + " --train-images 60 --test-images 23 --epochs 1 " +
         options;
}

/// The process ids of the ranks of a running trainer, from the lines that it begins with.
std::vector<pid_t> ranks_of(shell& process, std::size_t ranks) {
  std::vector<pid_t> result;
  for (std::string line; result.size() < ranks && process.read_line(line);) {
    std::size_t rank = 0, size = 0;
    int id = 0;
    if (std::sscanf(line.c_str(), "rank %zu of %zu: process %d", &rank, &size, &id) != 3) continue;
    CHECK(rank == result.size());
    CHECK(size == ranks);
    result.push_back(id);
  }
  INFO(process.output);
  REQUIRE(result.size() == ranks);
  return result;
}

} // namespace

TEST_CASE("Ranks with synchronized batch norm take the steps of one process on the whole batch") {
  temporary_folder const folder;
  auto const path = [&](char const* name) { return (folder / name).string(); };
  // 7 samples a batch are uneven shares; the last batch of 4 leaves ranks of 5 empty.
  std::string const work = "--dtype double --batch-size 7 --record-steps 99 --quiet ";
  check_success(tiny(folder, work + "--ranks 1 --record " + path("one") + " --result " + path("result")));
  auto const reference = train_cifar::read_record(folder / "one");
  CHECK(reference.entries.back().step == 9);

  check_success(tiny(folder, work + "--backend threads --ranks 5 --record " + path("threads")));
  CHECK(compare(folder / "threads", folder / "one") == 0);
  check_success(tiny(folder, work + "--backend threads --ranks 2 --batch-norm local --record " + path("local")));
  CHECK(compare(folder / "local", folder / "one") == 1);

#if TRAIN_CIFAR_HAVE_GLOO
  check_success(tiny(folder, work + "--ranks 2 --record " + path("gloo") + " --result " + path("result_gloo")));
  CHECK(compare(folder / "gloo", folder / "one") == 0);
  auto const table = run(trainer + " table " + path("result") + " " + path("result_gloo"));
  CHECK(table.status == 0);
  CHECK(table.output.find("1 process, whole batch ") != std::string::npos);
  CHECK(table.output.find("2 ranks (Gloo), synchronized ") != std::string::npos);
#endif
#if TRAIN_CIFAR_HAVE_MPI
  check_success(TRAIN_CIFAR_MPIEXEC " " + tiny(folder, work + "--record " + path("mpi")));
  CHECK(compare(folder / "mpi", folder / "one") == 0);
#endif
}

TEST_CASE("Accumulated passes make fewer steps, the same on every backend") {
  temporary_folder const folder;
  auto const path = [&](char const* name) { return (folder / name).string(); };
  std::string const work =
      "--dtype double --batch-size 8 --grad-accumulation 3 --record-steps 99 --quiet --no-test --ranks 2 ";
  check_success(tiny(folder, work + "--backend threads --record " + path("threads")));
  CHECK(train_cifar::read_record(folder / "threads").entries.back().step == 3);
#if TRAIN_CIFAR_HAVE_GLOO
  check_success(tiny(folder, work + "--record " + path("gloo")));
  CHECK(compare(folder / "gloo", folder / "threads") == 0);
#endif
}

TEST_CASE("What cannot be done is said, and fails") {
  temporary_folder const folder;
  auto missing = run(trainer + " --ranks 1 --data " + (folder / "none").string());
  CHECK(missing.status == 1);
  CHECK(missing.output == "train_cifar: " + (folder / "none").string() + ": does not exist\n");

  write_file(folder / "train.bin", std::string(4000, '\0'));
  auto const truncated = run(trainer + " --ranks 2 --backend threads --data " + folder.path().string());
  CHECK(truncated.status == 1);
  CHECK(truncated.output == "train_cifar: " + (folder / "train.bin").string() +
                                ": truncated CIFAR-100 record at byte offset 3074: 926 of its 3074 bytes\n");

  auto const alone = run(trainer + " --backend mpi");
  CHECK(alone.status == 1);
  CHECK(alone.output.find("mpirun -n 2 train_cifar --backend mpi") != std::string::npos);

#if TRAIN_CIFAR_HAVE_MPI
  auto const started_by_another = run("PMI_SIZE=2 PMI_RANK=1 " + tiny(folder, "--steps 1 --no-test --quiet"));
  CHECK(started_by_another.status != 0);
  CHECK(started_by_another.output.find("this is rank 0 of 1 over MPI, but the environment says 1 of 2") !=
        std::string::npos);
#endif

#if !TRAIN_CIFAR_HAVE_CUDA
  auto const on_gpu =
      run(trainer + " --ranks 1 --device cuda --train-images 8 --test-images 8 --data-cache " + folder.path().string());
  CHECK(on_gpu.status == 1);
  CHECK(on_gpu.output.find("--device cuda: this train_cifar was built without CUDA") != std::string::npos);
#endif
  for (auto const& [option, text] : {std::pair{"--batch-norm none", "'none' is none of local, sync"},
                                     {"--seed -1", "'-1' is not a whole number from 0 to"},
                                     {"--learning-rate nan", "'nan' is not a positive number"},
                                     {"--learning-rate 1e300", "'1e300' is not a positive number up to 1e+30"},
                                     {"--rendezvous hash", "'hash' is neither file:PATH nor redis:HOST:PORT"},
                                     {"--timeout 1e7", "'1e7' is not a positive number up to 1000000"},
                                     {"--record same --result ./same", "./same is the file of --record already"}}) {
    auto const refused = run(trainer + " " + option);
    CHECK(refused.status != 0);
    CHECK(refused.output.find(text) != std::string::npos);
  }
  CHECK(run(trainer + " compare first second").output ==
        "train_cifar: first: cannot be read: No such file or directory\n");
  CHECK(run(trainer + " --help >/dev/full").status == 1);
}

#if TRAIN_CIFAR_HAVE_GLOO
TEST_CASE("Processes that other means started meet at a rendezvous, and must agree on the work") {
  temporary_folder const folder;
  check_success(tiny(folder, "--ranks 1 --steps 1 --no-test --quiet")); // so that the data is there
  int runs = 0;
  // Both ranks fail with the text; returns what rank 0 has printed before it.
  auto const failing = [&](std::string const& options_0, std::string const& options_1, std::string const& text) {
    std::string const common =
        "--no-test --interface lo --rendezvous file:" + (folder / "store").string() + std::to_string(++runs) + " ";
    shell first{"RANK=0 WORLD_SIZE=2 " + tiny(folder, common + options_0)};
    auto const second = run("RANK=1 WORLD_SIZE=2 " + tiny(folder, common + options_1));
    CHECK(first.finish() == 1);
    CHECK(second.status == 1);
    CHECK(second.output == "train_cifar: rank 1: " + text + "\n");
    std::string const expected = "train_cifar: rank 0: " + text + "\n";
    CHECK(first.output.ends_with(expected));
    return first.output.substr(0, first.output.size() - std::min(first.output.size(), expected.size()));
  };
  CHECK(failing("--batch-size 8", "--batch-size 9", "rank 1 and rank 0 disagree on --batch-size").empty());

  std::string const path = (folder / "none/result").string();
  CHECK(failing("--result " + path, "", path + ": cannot be written: No such file or directory").empty());

  // A rank decides alone whether it is quiet.
  std::string const work = "--batch-size 8 --learning-rate 1e30 ";
  auto const printed =
      failing(work, work + "--quiet", "epoch 1, step 2: the loss is not a number; the --learning-rate may be too high");
  CHECK(printed.starts_with("rank 0 of 2: "));
  CHECK(printed.find("rank 1") == std::string::npos);
}

TEST_CASE("Runs that meet in one folder at the same time have a prefix each") {
  temporary_folder const folder;
  std::string const prefixed =
      "--quiet --no-test --steps 1 --interface lo --rendezvous file:" + folder.path().string() + "/store";
  shell first[]{shell{"RANK=0 WORLD_SIZE=2 " + tiny(folder, prefixed + " --prefix a")},
                shell{"RANK=0 WORLD_SIZE=2 " + tiny(folder, prefixed + " --prefix b")}};
  for (auto const* prefix : {"a", "b"})
    check_success("RANK=1 WORLD_SIZE=2 " + tiny(folder, prefixed + " --prefix " + prefix));
  for (auto& each : first) CHECK(each.finish() == 0);
}

TEST_CASE("Ranks that are started here listen where the user says") {
  temporary_folder const folder;
  auto const nowhere = run(tiny(folder, "--ranks 2 --interface nope"));
  CHECK(nowhere.status == 1);
  CHECK(nowhere.output.find("there is no network interface 'nope'") != std::string::npos);
}

TEST_CASE("A rank that dies ends the whole run, and says which") {
  temporary_folder const folder;
  shell process{tiny(folder, "--ranks 3 --batch-size 3 --epochs 1000000")};
  auto const ranks = ranks_of(process, 3);
  REQUIRE(::kill(ranks[1], SIGKILL) == 0);
  CHECK(process.finish() != 0);
  INFO(process.output);
  CHECK(process.output.find("train_cifar: rank 1 was killed by signal 9 (Killed)") != std::string::npos);
  for (pid_t const rank : ranks) CHECK(::kill(rank, 0) == -1);
}

TEST_CASE("A run that is told to end takes its ranks with it") {
  temporary_folder const folder;
  shell process{"echo $$; exec " + tiny(folder, "--ranks 2 --batch-size 3 --epochs 1000000")};
  std::string line;
  REQUIRE(process.read_line(line));
  auto const ranks = ranks_of(process, 2);
  REQUIRE(::kill(std::stoi(line), SIGTERM) == 0);
  CHECK(process.finish() == 128 + SIGTERM);
  for (pid_t const rank : ranks) CHECK(::kill(rank, 0) == -1);
}
#endif
