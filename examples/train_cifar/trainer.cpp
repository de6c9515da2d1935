#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <torch/torch.h>
#include <unistd.h>

#include <syncnorm/torch/compiled_passes.hpp>
#include <syncnorm/torch/convert.hpp>

#include "agree.hpp"
#include "batch.hpp"
#include "cores.hpp"
#include "cuda.hpp"
#include "evaluate.hpp"
#include "exchange.hpp"
#include "in_order.hpp"
#include "measure.hpp"
#include "model.hpp"
#include "progress.hpp"
#include "random.hpp"
#include "recorder.hpp"
#include "shares.hpp"
#include "train.hpp"

namespace train_cifar {

namespace {

std::shared_ptr<torch::nn::SequentialImpl> make_seeded_network(syncnorm::any_communicator const& comm,
                                                               options const& opts, int classes,
                                                               torch::TensorOptions const& like) {
  // Ranks that are threads share libtorch's random numbers.
  static std::mutex mutex;
  std::scoped_lock const held{mutex};
  torch::manual_seed(opts.seed);
  std::shared_ptr<torch::nn::Module> network = make_network(classes).ptr();
  if (opts.batch_norm == batch_norm_kind::sync) network = syncnorm::torch::convert_sync_batchnorm(network, comm);
  network->to(like.device(), c10::typeMetaToScalarType(like.dtype()));
  return std::dynamic_pointer_cast<torch::nn::SequentialImpl>(network);
}

std::string title_of(membership const& member, options const& opts) {
  if (member.ranks == 1) return "1 process, whole batch";
  return std::to_string(member.ranks) + " ranks (" +
         name_of(member.kind == membership_kind::mpi ? backend_kind::mpi : opts.backend) + "), " +
         (opts.batch_norm == batch_norm_kind::sync ? "synchronized" : "local batch norm");
}

torch::TensorOptions tensor_options(syncnorm::any_communicator const& comm, options const& opts) {
  auto const like = torch::TensorOptions{}.dtype(opts.dtype == number_kind::float64 ? torch::kDouble : torch::kFloat);
  return opts.device == device_kind::cuda ? like.device(cuda_device(comm, opts)) : like;
}

/// The mean of the running loss over an epoch.
class mean_loss {
public:
  void add(double loss, std::size_t samples) {
    sum_ += loss * static_cast<double>(samples);
    samples_ += samples;
  }
  [[nodiscard]] std::size_t samples() const { return samples_; }
  [[nodiscard]] double value() const { return sum_ / static_cast<double>(samples_); }

private:
  double sum_ = 0;
  std::size_t samples_ = 0;
};

/// The share of the learning rate that is used when the share `done` of all steps is made: it rises from a fifth to 1, and
/// falls to 0, in straight lines. A high rate from the start would drive the small batches onto a plateau.
double rate_factor(double done) {
  constexpr double first = 0.2, peak = 0.3;
  return done < peak ? first + (1 - first) * done / peak : (1 - done) / (1 - peak);
}

std::string host_name() {
  char name[64] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

/// Gives this thread, and the passes forward and backward that it runs, its share of the cores that other ranks of the host may
/// have, too. OMP_NUM_THREADS has precedence. Collective.
void share_cores(syncnorm::any_communicator const& comm) {
  auto const cores = usable_cores();
  std::string_view const bytes{reinterpret_cast<char const*>(cores.data()), cores.size() * sizeof(int)};
  auto const places = gather_lines(comm, std::to_string(std::hash<std::string_view>{}(bytes)) + " of " + host_name());
  auto const here = std::ranges::count(places, places[static_cast<std::size_t>(syncnorm::rank(comm))]);
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return;
  auto const all = cores.empty() ? std::size_t{std::thread::hardware_concurrency()} : cores.size();
  at::set_num_threads(std::max(1, static_cast<int>(all / static_cast<std::size_t>(here))));
}

/// One rank's training.
class trainer {
public:
  trainer(syncnorm::any_communicator comm, options const& opts, data_set const& data)
      : comm_{std::move(comm)}, opts_{opts}, data_{data}, like_{tensor_options(comm_, opts)},
        network_{make_seeded_network(comm_, opts, data.classes, like_)}, bucket_{network_->parameters()},
        optimizer_{network_->parameters(),
                   torch::optim::SGDOptions{opts.learning_rate}.momentum(0.9).weight_decay(5e-4)},
        recorder_{comm_, opts, data.train.size()} {
    if (like_.device().is_cuda()) use_cuda(*network_, comm_, opts_);
    std::size_t const images = data.train.size(), step_samples = opts.step_samples(images);
    steps_per_epoch_ = std::min(opts.steps, (images + step_samples - 1) / step_samples);
  }

  /// Trains one epoch. Returns its mean loss, and adds its seconds to `seconds`.
  double run_epoch(std::size_t epoch, std::vector<double>& seconds) {
    auto const order = shuffled(data_.train.size(), random_source{opts_.seed, epoch + 1});
    std::size_t const step_samples = opts_.step_samples(order.size());
    std::size_t const images = std::min(order.size(), steps_per_epoch_ * step_samples);
    progress bar{opts_.quiet || syncnorm::rank(comm_) != 0,
                 "epoch " + std::to_string(epoch + 1) + "/" + std::to_string(opts_.epochs), images};
    mean_loss mean;
    while (mean.samples() < images) {
      auto const samples = std::span{order}.subspan(mean.samples(), std::min(step_samples, images - mean.samples()));
      double const loss = step(samples);
      mean.add(loss, samples.size());
      bar.update(mean.samples(), loss);
    }
    seconds.push_back(bar.finish(mean.value()));
    return mean.value();
  }

  double test_accuracy() {
    recorder_.finish();
    if (!opts_.evaluate) return -1;
    // Ranks with statistics of their own go by those of rank 0, as in PyTorch's data parallelism.
    if (opts_.batch_norm == batch_norm_kind::local) copy_from_rank_0(comm_, network_->buffers());
    return evaluate(comm_, *network_, data_.test, like_);
  }

private:
  /// One step of the optimizer on the whole of `samples`, in passes of `batch_size`. Returns the mean loss.
  double step(std::span<std::int64_t const> samples) {
    bucket_.clear();
    for (std::size_t first = 0; first < samples.size(); first += opts_.batch_size) {
      std::size_t const count = std::min(opts_.batch_size, samples.size() - first);
      bool const last = first + count == samples.size();
      if (opts_.batch_norm == batch_norm_kind::sync) syncnorm::torch::set_backward_exchange(*network_, last);
      pass(samples.subspan(first, count), static_cast<double>(samples.size()));
    }
    if (like_.device().is_cuda()) syncnorm::torch::synchronize(*network_); // the gradients are waited for in any case
    bucket_.sum_over_ranks(comm_);
    require_finite_loss();
    set_learning_rate();
    optimizer_.step();
    ++steps_;
    recorder_.end_step(bucket_, *network_);
    return bucket_.loss();
  }

  /// The loss is the sum over the ranks: all of them throw, or none.
  void require_finite_loss() const {
    if (double const loss = bucket_.loss(); !std::isfinite(loss))
      throw syncnorm::error{"epoch " + std::to_string(steps_ / steps_per_epoch_ + 1) + ", step " +
                            std::to_string(steps_ % steps_per_epoch_ + 1) + ": the loss is " +
                            (std::isnan(loss) ? "not a number" : "infinite") + "; the --learning-rate may be too high"};
  }

  /// Adds the gradients and the loss of this rank's share of `samples`, divided by `divisor`.
  void pass(std::span<std::int64_t const> samples, double divisor) {
    auto const share = share_of(samples, syncnorm::rank(comm_), syncnorm::size(comm_));
    torch::Tensor scores;
    if (share.empty() && opts_.batch_norm == batch_norm_kind::local) {
      // libtorch's own batch norm has no statistics of nothing; the synchronized one needs every rank to join.
      scores = torch::zeros({0, data_.classes}, like_);
    } else {
      namespace functional = torch::nn::functional;
      batch const part = make_batch(data_.train, share, like_);
      scores = network_->forward(part.images);
      torch::Tensor const loss =
          functional::cross_entropy(scores, part.labels, functional::CrossEntropyFuncOptions{}.reduction(torch::kSum)) /
          divisor;
      loss.backward();
      bucket_.add_loss(loss);
    }
    recorder_.add_outputs(scores, share.data() - samples.data(), static_cast<std::int64_t>(samples.size()));
  }

  void set_learning_rate() {
    double const done = static_cast<double>(steps_) / static_cast<double>(steps_per_epoch_ * opts_.epochs);
    for (auto& group : optimizer_.param_groups())
      static_cast<torch::optim::SGDOptions&>(group.options()).lr(opts_.learning_rate * rate_factor(done));
  }

  syncnorm::any_communicator comm_;
  options const& opts_;
  data_set const& data_;
  torch::TensorOptions like_; ///< the type and the device of what is computed
  std::shared_ptr<torch::nn::SequentialImpl> network_;
  gradient_bucket bucket_;
  torch::optim::SGD optimizer_;
  recorder recorder_;
  std::size_t steps_per_epoch_ = 0, steps_ = 0;
};

} // namespace

std::optional<run_result> train(syncnorm::any_communicator const& comm, membership const& member, options const& opts,
                                data_set const& data) try {
  share_cores(comm);
  require_agreement(comm, opts, data);
  require_writable(comm, opts);
  print_in_order(comm,
                 "rank " + std::to_string(syncnorm::rank(comm)) + " of " + std::to_string(syncnorm::size(comm)) +
                     ": process " + std::to_string(::getpid()) + " on " + host_name() + ", " +
                     std::to_string(at::get_num_threads()) + " thread(s)",
                 opts.quiet);

  trainer session{comm, opts, data};
  std::vector<double> seconds;
  run_result result{
      .title = title_of(member, opts), .train_images = data.train.size(), .test_images = data.test.size()};
  for (std::size_t epoch = 0; epoch < opts.epochs; ++epoch) result.train_loss = session.run_epoch(epoch, seconds);
  result.test_accuracy = session.test_accuracy();
  result.epoch_seconds = mean_between_percentiles(seconds);
  std::int64_t const own_memory = peak_memory();
  syncnorm::reduce(comm, std::span{&own_memory, 1}, std::span{&result.peak_memory, 1}, 0, syncnorm::reduce_op::max);
  if (syncnorm::rank(comm) != 0) return std::nullopt;
  return result;
} catch (c10::Error const& failure) {
  // what() of libtorch's errors ends with a backtrace.
  throw syncnorm::error{failure.what_without_backtrace()};
}

} // namespace train_cifar
