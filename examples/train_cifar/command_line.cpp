#include "command_line.hpp"

#include <map>

#include <CLI/CLI.hpp>

namespace train_cifar {

command read_command_line(int argc, char** argv) {
  command result;
  options& opts = result.train;
  CLI::App app{
      "Trains a small convolutional network on CIFAR-10 or CIFAR-100, data-parallel over ranks, with batch norm that "
      "is local to the ranks or synchronized over them."};
  // What the launcher appends wins over what the user gave.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

  std::map<std::string, backend_kind> const backends{
      {"threads", backend_kind::threads}, {"gloo", backend_kind::gloo}, {"mpi", backend_kind::mpi}};
  std::map<std::string, batch_norm_kind> const batch_norms{{"local", batch_norm_kind::local},
                                                           {"sync", batch_norm_kind::sync}};
  std::map<std::string, number_kind> const dtypes{{"float", number_kind::float32}, {"double", number_kind::float64}};
  auto const choice = [](auto const& names) { return CLI::CheckedTransformer(names).description(""); };

  app.add_option("--data", opts.data, "folder of the published binary files; without it, drawn shapes are learnt");
  app.add_option("--data-cache", opts.data_cache,
                 "where the drawn shapes are kept (default: the folder for temporary files)");
  app.add_option("--train-images", opts.shapes.train_images, "how many shapes are drawn to learn from")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--test-images", opts.shapes.test_images, "how many shapes are drawn to test with")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--ranks", opts.ranks, "ranks to start; mpirun, or WORLD_SIZE, has precedence")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  auto const* backend =
      app.add_option("--backend", opts.backend, "threads, gloo or mpi: what the ranks are (default: gloo)")
          ->transform(choice(backends));
  app.add_option("--rendezvous", opts.rendezvous,
                 "file:PATH or redis:HOST:PORT: join, as rank RANK of WORLD_SIZE, others that were started elsewhere");
  app.add_option("--interface", opts.interface,
                 "network interface for Gloo (default: loopback, or the host's address)");
  double timeout = 60;
  app.add_option("--timeout", timeout, "seconds that a rank waits for another")
      ->capture_default_str()
      ->check(CLI::Range(0.001, 1e6));
  app.add_option("--batch-norm", opts.batch_norm, "local or sync: whose statistics normalize (default: sync)")
      ->transform(choice(batch_norms));
  app.add_option("--batch-size", opts.batch_size, "samples of one pass, over all ranks together")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--grad-accumulation", opts.grad_accumulation,
                 "passes that make one step; batch norm's backward exchange happens in the last of them alone")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--epochs", opts.epochs, "passes over the training images")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--steps", opts.steps, "at most so many steps an epoch")->check(CLI::PositiveNumber);
  app.add_option("--learning-rate", opts.learning_rate,
                 "the highest; it rises from a fifth of it, and falls to 0 in the end")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", opts.seed, "of the parameters and of the order of the images")->capture_default_str();
  app.add_option("--dtype", opts.dtype, "float or double (default: float)")->transform(choice(dtypes));
  app.add_option("--record", opts.record, "file for the first steps in full precision, for `compare`");
  app.add_option("--record-steps", opts.record_steps, "how many steps those are")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--result", opts.result, "file for the result, for `table`, which then prints it");
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
  } catch (CLI::ParseError const& stop) {
    result.kind = command::kind_type::help;
    result.status = app.exit(stop);
    return result;
  }
  if (compare->parsed()) result.kind = command::kind_type::compare;
  if (table->parsed()) result.kind = command::kind_type::table;
  result.backend_chosen = backend->count() > 0;
  opts.timeout = std::chrono::milliseconds{static_cast<std::int64_t>(1000 * timeout)};
  return result;
}

} // namespace train_cifar
