#include "command_line.hpp"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "../support/text_checks.hpp"
#include "files.hpp"

namespace train_cifar {

namespace {

using example::text_check, example::whole_number;

/// Accepts numbers above 0, up to `most`.
text_check positive_number(double most) {
  return [=](std::string const& text) -> std::string {
    char* end = nullptr;
    double const value = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && value > 0 && value <= most) return "";
    std::ostringstream problem;
    problem << "'" << text << "' is not a positive number up to " << std::setprecision(7) << most;
    return problem.str();
  };
}

/// Refuses the path that a variable which is not set gives.
std::string not_empty(std::string const& path) { return path.empty() ? "the path is empty" : ""; }

/// Refuses a rendezvous that is of one process alone, or none.
std::string meets_elsewhere(std::string const& rendezvous) {
  bool const known = rendezvous.starts_with("file:") || rendezvous.starts_with("redis:");
  return known ? "" : "'" + rendezvous + "' is neither file:PATH nor redis:HOST:PORT";
}

/// Adds an option whose value goes by one of a few names.
template <class T>
CLI::Option* add_choice(CLI::App& app, std::string const& option, T& value,
                        std::vector<std::pair<std::string, T>> const& names, std::string const& description) {
  auto const known = [names](std::string const& text) -> std::string {
    std::string all;
    for (auto const& [name, named] : names) {
      if (name == text) return "";
      all += (all.empty() ? "" : ", ") + name;
    }
    return "'" + text + "' is none of " + all;
  };
  auto const set = [names, &value](std::string const& text) {
    for (auto const& [name, named] : names)
      if (name == text) value = named;
  };
  return app.add_option_function<std::string>(option, set, description)->check(known);
}

} // namespace

command read_command_line(int argc, char** argv) {
  command result;
  options& opts = result.train;
  CLI::App app{
      "Trains a small convolutional network on CIFAR-10 or CIFAR-100, data-parallel over ranks, with batch norm that "
      "is local to the ranks or synchronized over them."};
  // What the launcher appends wins over what the user gave.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

  app.add_option("--data", opts.data, "folder of the published binary files; without it, drawn shapes are learnt")
      ->check(not_empty);
  app.add_option("--data-cache", opts.data_cache,
                 "where the drawn shapes are kept (default: the folder for temporary files)")
      ->check(not_empty);
  app.add_option("--train-images", opts.shapes.train_images, "how many shapes are drawn to learn from")
      ->capture_default_str()
      ->check(whole_number(1));
  app.add_option("--test-images", opts.shapes.test_images, "how many shapes are drawn to test with")
      ->capture_default_str()
      ->check(whole_number(1));
  app.add_option("--ranks", opts.ranks, "ranks to start; mpirun, or WORLD_SIZE with --rendezvous, has precedence")
      ->capture_default_str()
      ->check(whole_number(1, 1024));
  auto const* backend = add_choice(
      app, "--backend", opts.backend,
      {{"threads", backend_kind::threads},
       {"gloo", backend_kind::gloo},
       {"mpi", backend_kind::mpi},
       {"nccl", backend_kind::nccl}},
      "threads, gloo, mpi or nccl: what the ranks are (default: gloo); nccl is for --device cuda, gloo where batch "
      "norm's exchanges on the device are NCCL's");
  add_choice(app, "--device", opts.device, {{"cpu", device_kind::cpu}, {"cuda", device_kind::cuda}},
             "cpu or cuda: where the network is (default: cpu)");
  app.add_option("--rendezvous", opts.rendezvous,
                 "file:PATH or redis:HOST:PORT: join, as rank RANK of WORLD_SIZE, others that were started elsewhere")
      ->check(meets_elsewhere);
  app.add_option("--prefix", opts.prefix, "tells runs apart that meet at one rendezvous")->capture_default_str();
  app.add_option("--interface", opts.interface,
                 "network interface for Gloo (default: loopback, or the host's address)");
  double timeout = 60;
  app.add_option("--timeout", timeout, "seconds that a rank waits for another")
      ->capture_default_str()
      ->check(positive_number(1e6));
  add_choice(app, "--batch-norm", opts.batch_norm, {{"local", batch_norm_kind::local}, {"sync", batch_norm_kind::sync}},
             "local or sync: whose statistics normalize (default: sync)");
  app.add_option("--batch-size", opts.batch_size, "samples of one pass, over all ranks together")
      ->capture_default_str()
      ->check(whole_number(1));
  app.add_option("--grad-accumulation", opts.grad_accumulation,
                 "passes that make one step; batch norm's backward exchange happens in the last of them alone")
      ->capture_default_str()
      ->check(whole_number(1));
  app.add_option("--epochs", opts.epochs, "passes over the training images")
      ->capture_default_str()
      ->check(whole_number(1));
  app.add_option("--steps", opts.steps, "at most so many steps an epoch")->check(whole_number(1));
  app.add_option("--learning-rate", opts.learning_rate,
                 "the highest; it rises from a fifth of it, and falls to 0 in the end")
      ->capture_default_str()
      ->check(positive_number(1e30));
  app.add_option("--seed", opts.seed, "of the parameters and of the order of the images")
      ->capture_default_str()
      ->check(whole_number(0, std::numeric_limits<std::uint64_t>::max()));
  add_choice(app, "--dtype", opts.dtype, {{"float", number_kind::float32}, {"double", number_kind::float64}},
             "float or double (default: float)");
  app.add_option("--record", opts.record, "file for the first steps in full precision, for `compare`")
      ->check(not_empty);
  app.add_option("--record-steps", opts.record_steps, "how many steps those are")
      ->capture_default_str()
      ->check(whole_number(1));
  app.add_option("--result", opts.result, "file for the result, for `table`, which then prints it")->check(not_empty);
  app.add_flag("!--no-test", opts.evaluate, "do not test the network in the end");
  app.add_flag("--quiet", opts.quiet, "print the final table alone");

  auto* const compare =
      app.add_subcommand("compare", "compare two records; fails where they differ by more than rounding");
  compare->add_option("record", result.record)->required();
  compare->add_option("reference", result.reference)->required();
  auto* const table = app.add_subcommand("table", "print results below one another");
  table->add_option("results", result.results)->required()->take_all();

  try {
    app.parse(argc, argv);
    if (same_file(opts.record, opts.result))
      throw CLI::ValidationError{"--result", opts.result.string() + " is the file of --record already"};
  } catch (CLI::ParseError const& stop) {
    result.kind = command::kind_type::help;
    result.status = app.exit(stop);
    return result;
  }
  if (compare->parsed()) result.kind = command::kind_type::compare;
  if (table->parsed()) result.kind = command::kind_type::table;
  result.backend_chosen = backend->count() > 0;
  opts.timeout = std::chrono::milliseconds{static_cast<std::int64_t>(std::ceil(1000 * timeout))};
  return result;
}

} // namespace train_cifar
