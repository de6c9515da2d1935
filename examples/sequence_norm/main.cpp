// Trains a small block of a transformer on a synthetic task over sequences of different lengths, with layer norm, batch norm
// or power norm: as several ranks, of which each has its own share of every batch, and as one rank with the whole batch,
// which has to come to the same.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/compiled_passes.hpp>

#include "../support/text_checks.hpp"
#include "model.hpp"
#include "task.hpp"

namespace sequence_norm {

namespace {

std::map<std::string, norm_kind> const norms{
    {"layer", norm_kind::layer}, {"batch", norm_kind::batch}, {"power", norm_kind::power}};

struct options {
  std::string norm = "power";
  int ranks = 3;
  std::int64_t steps = 150, sequences = 32, warmup = 40;
  std::uint64_t seed = 1;
};

void add_options(CLI::App& app, options& opts) {
  using example::whole_number;
  app.option_defaults()->always_capture_default();
  std::vector<std::string> names;
  for (auto const& [name, kind] : norms) names.push_back(name);
  app.add_option("--norm", opts.norm, "the normalization")->check(CLI::IsMember(names));
  app.add_option("--ranks", opts.ranks, "ranks, as threads")->check(whole_number(1, 64));
  app.add_option("--steps", opts.steps, "steps of training")->check(whole_number(2));
  app.add_option("--sequences", opts.sequences, "sequences of a batch, over all ranks")->check(whole_number(1));
  app.add_option("--warmup", opts.warmup, "steps in which power norm takes the statistics of the batch")
      ->check(whole_number(0));
  app.add_option("--seed", opts.seed, "of the parameters and of the sequences")
      ->check(whole_number(0, std::numeric_limits<std::uint64_t>::max()));
}

struct outcome {
  std::vector<double> losses; ///< of the whole batch, at each step
  double accuracy = 0;
};

void sum_over_ranks(syncnorm::any_communicator const& comm, torch::Tensor const& sums) {
  std::span<double> const values{sums.data_ptr<double>(), static_cast<std::size_t>(sums.numel())};
  syncnorm::allreduce(comm, std::span<double const>{values}, values);
}

/// The loss of this rank's positions, as a part of the mean over those of all ranks.
torch::Tensor loss_of(torch::Tensor const& scores, batch const& own, std::int64_t all_positions) {
  auto const counts = own.padding.t().logical_not();
  auto const each =
      torch::nn::functional::cross_entropy(scores.index({counts}), own.targets.index({counts}),
                                           torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  return each / static_cast<double>(all_positions);
}

/// Trains as one rank of `comm`. Collective.
outcome train(syncnorm::any_communicator const& comm, options const& opts) {
  int const rank = syncnorm::rank(comm), ranks = syncnorm::size(comm);
  Model model{nullptr};
  {
    static std::mutex mutex; // ranks that are threads share libtorch's random numbers
    std::scoped_lock const held{mutex};
    torch::manual_seed(opts.seed);
    model = Model{norms.at(opts.norm), opts.warmup, comm};
  }
  model->to(torch::kDouble);
  torch::optim::Adam optimizer{model->parameters(), torch::optim::AdamOptions{3e-3}};

  outcome result;
  for (std::int64_t step = 0; step < opts.steps; ++step) {
    auto const whole = make_batch(opts.sequences, opts.seed * 1'000'003 + static_cast<std::uint64_t>(step));
    auto const own = whole.share(rank, ranks);
    optimizer.zero_grad();
    auto const loss = loss_of(model->forward(own.tokens, own.padding), own, whole.positions());
    loss.backward();
    for (auto const& parameter : model->parameters()) {
      if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
      sum_over_ranks(comm, parameter.grad());
    }
    optimizer.step();
    auto const of_all = loss.detach().clone();
    sum_over_ranks(comm, of_all);
    result.losses.push_back(of_all.item<double>());
  }

  model->eval(); // which waits for the exchanges in flight
  torch::NoGradGuard const no_recording;
  auto const unseen = make_batch(256, opts.seed * 1'000'003 - 1), own = unseen.share(rank, ranks);
  auto const right = model->forward(own.tokens, own.padding).argmax(2) == own.targets;
  auto const count = right.logical_and(own.padding.t().logical_not()).sum().to(torch::kDouble);
  sum_over_ranks(comm, count);
  result.accuracy = count.item<double>() / static_cast<double>(unseen.positions());
  return result;
}

int run(options const& opts) {
  at::set_num_threads(1);
  std::vector<outcome> of_ranks(static_cast<std::size_t>(opts.ranks));
  syncnorm::run_ranks(opts.ranks, [&](syncnorm::thread_communicator const& comm) {
    of_ranks[static_cast<std::size_t>(comm.rank())] = train(comm, opts);
  });
  auto const& several = of_ranks.front();
  outcome const one = train(syncnorm::any_communicator{}, opts);

  double difference = 0; // of the steps before rounding errors have grown by training itself
  for (std::size_t step = 0; step < several.losses.size(); ++step) {
    if (step < 50) difference = std::max(difference, std::abs(several.losses[step] / one.losses[step] - 1));
    if (step % 25 == 24 || step + 1 == several.losses.size())
      std::printf("step %3zu: loss %.6f over %d ranks, %.6f on one\n", step + 1, several.losses[step], opts.ranks,
                  one.losses[step]);
  }
  std::printf("%s norm: accuracy %.3f over %d ranks, %.3f on one; losses of the first steps differ by %.1e\n",
              opts.norm.c_str(), several.accuracy, opts.ranks, one.accuracy, difference);
  double const first = several.losses.front(), last = several.losses.back();
  double const expected = (opts.steps < 10 ? 1 : 0.7) * first;
  bool const learned = last < expected;
  if (!(difference < 1e-7)) std::puts("several ranks did not take the steps of one");
  if (!learned) std::printf("the loss went from %.6f to %.6f, expected less than %.6f\n", first, last, expected);
  return difference < 1e-7 && learned ? 0 : 1;
}

} // namespace

} // namespace sequence_norm

int main(int argc, char** argv) try {
  CLI::App app{"Trains a block of a transformer as several ranks and as one, which has to come to the same."};
  sequence_norm::options opts;
  sequence_norm::add_options(app, opts);
  CLI11_PARSE(app, argc, argv);
  int const status = sequence_norm::run(opts);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) throw std::runtime_error{"the output cannot be written"};
  return status;
} catch (std::exception const& failure) {
  std::fprintf(stderr, "sequence_norm: %s\n", failure.what());
  return 2;
}
