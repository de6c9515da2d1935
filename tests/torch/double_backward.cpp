#include <cstdint>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/thread_group.hpp>

using namespace test;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;

namespace {

/// What a loss with a gradient penalty trains: its gradients with respect to the input, and those of its parameters.
struct penalized {
  Tensor y, x_gradient;
  std::vector<Tensor> parameter_gradients;
};

/// Gradients of Σ|∂(Σ f·y³)/∂x|² + Σ (∂(Σ f·y³)/∂weight)² + Σ f·y, where y = norm(x)·norm(x).
template <class Norm>
penalized penalize(Norm& norm, Tensor const& given, Tensor const& factors, bool of_parameters) {
  auto const x = given.detach().clone().requires_grad_();
  auto const y = norm->forward(x);
  std::vector<Tensor> inputs{x};
  if (of_parameters) inputs.push_back(norm->weight), inputs.push_back(norm->bias);
  auto const first = torch::autograd::grad({(y.pow(3) * factors).sum()}, inputs, {}, true, /*create_graph=*/true);
  auto loss = (y * factors).sum() + first[0].pow(2).sum();
  if (of_parameters) loss = loss + (first[1] * 0.3).sum() + (first[2] * 0.7).sum();
  norm->zero_grad();
  loss.backward();
  penalized result{y.detach(), x.grad(), {}};
  for (auto const& parameter : norm->parameters()) result.parameter_gradients.push_back(parameter.grad());
  return result;
}

/// Batch norm of libtorch's differentiable operations alone, whose derivatives of any order are libtorch's.
struct plain_norm {
  Tensor weight, bias;
  double eps;
  bool unbiased = false;

  Tensor forward(Tensor const& x) const {
    std::vector<std::int64_t> axes(static_cast<std::size_t>(x.dim()));
    std::iota(axes.begin(), axes.end(), 0);
    axes.erase(axes.begin() + 1);
    std::vector<std::int64_t> shape(static_cast<std::size_t>(x.dim()), 1);
    shape[1] = x.size(1);
    auto const centred = x - x.mean(axes, true);
    auto const y = centred / (x.var(axes, unbiased, true) + eps).sqrt();
    return weight.defined() ? y * weight.view(shape) + bias.view(shape) : y;
  }
  std::vector<Tensor> parameters() const {
    return weight.defined() ? std::vector{weight, bias} : std::vector<Tensor>{};
  }
  void zero_grad() const {
    for (auto parameter : parameters()) parameter.mutable_grad() = Tensor{};
  }
  plain_norm* operator->() { return this; }
};

} // namespace

TEST_CASE("a gradient penalty across ranks is that of one process on the whole batch") {
  torch::manual_seed(31);
  for (auto const& shares : std::vector<std::vector<std::int64_t>>{{5}, {2, 3}, {0, 4, 1}})
    for (bool const affine : {true, false})
      for (bool const channels_last : {false, true}) {
        auto const batch = std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
        auto const x = random({batch, 3, 2, 2}), factors = random({batch, 3, 2, 2});
        run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
          auto const rank = static_cast<std::size_t>(comm.rank());
          auto const first = std::accumulate(shares.begin(), shares.begin() + comm.rank(), std::int64_t{0});
          auto const own = [&](Tensor const& whole) {
            auto const part = whole.slice(0, first, first + shares[rank]);
            return channels_last ? part.contiguous(torch::MemoryFormat::ChannelsLast) : part;
          };
          auto norm = make_norm(BatchNormOptions{3}.affine(affine).eps(0.1), comm);
          bool const unbiased = channels_last;
          if (unbiased) norm->set_batch_variance(syncnorm::batch_variance::unbiased);
          plain_norm plain{{}, {}, 0.1, unbiased};
          if (affine) {
            plain.weight = norm->weight.detach().clone().requires_grad_();
            plain.bias = norm->bias.detach().clone().requires_grad_();
          }
          // The gradients of parameters are sums over a rank, so a penalty that is not linear in them is another one.
          auto const expected = penalize(plain, x, factors, affine);
          auto const got = penalize(norm, own(x), own(factors), affine);
          INFO("rank ", comm.rank(), " of ", comm.size(), ", affine ", affine);
          CHECK(error_of(got.y, own(expected.y), 1) <= 1e-12);
          CHECK(error_of(got.x_gradient, own(expected.x_gradient), 1) <= 1e-10);
          CHECK(got.parameter_gradients.size() == (affine ? 2 : 0));
          for (std::size_t i = 0; i < got.parameter_gradients.size(); ++i)
            CHECK(error_of(sum_of_ranks(comm, got.parameter_gradients[i]), expected.parameter_gradients[i], 1) <=
                  1e-10);
        });
      }
}

TEST_CASE("a gradient penalty trains a net of several layers across ranks, in floats") {
  std::mutex generator; // one for all threads
  auto const make = [&](syncnorm::any_communicator const& comm) {
    std::scoped_lock const held{generator};
    torch::manual_seed(33);
    return torch::nn::Sequential{torch::nn::Linear{4, 8}, SyncBatchNorm{BatchNormOptions{8}, comm}, torch::nn::Tanh{},
                                 torch::nn::Linear{8, 8}, SyncBatchNorm{BatchNormOptions{8}, comm}, torch::nn::Tanh{},
                                 torch::nn::Linear{8, 1}};
  };
  torch::manual_seed(34);
  auto const data = torch::randn({12, 4});
  // Mean over the whole batch of f(x) + (|∂f/∂x| − 1)², as of a critic; returns the parameters after some steps.
  auto const train = [&](syncnorm::any_communicator const& comm, Tensor const& rows) {
    auto net = make(comm);
    torch::optim::SGD optimizer{net->parameters(), 0.05};
    for (int step = 0; step < 4; ++step) {
      auto const x = rows.clone().requires_grad_();
      auto const f = net->forward(x);
      auto const slope = torch::autograd::grad({f.sum()}, {x}, {}, true, true)[0];
      auto const penalty = ((slope.pow(2).sum(1) + 1e-6).sqrt() - 1).pow(2);
      optimizer.zero_grad();
      ((f.sum() + penalty.sum()) / 12).backward();
      for (auto const& parameter : net->parameters()) {
        auto gradient = parameter.grad();
        std::span const values{gradient.data_ptr<float>(), static_cast<std::size_t>(gradient.numel())};
        syncnorm::allreduce(comm, std::span<float const>{values}, values);
      }
      optimizer.step();
    }
    return state_of(*net);
  };
  auto const expected = train(syncnorm::self_communicator{}, data);
  run_ranks(3, [&](thread_communicator const& comm) {
    auto const got = train(comm, data.slice(0, comm.rank() * 5, std::min<std::int64_t>(12, comm.rank() * 5 + 5)));
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(error_of(got[i], expected[i], 1) <= 2e-4);
  });
}

TEST_CASE("double backward in evaluation, with frozen statistics, and without an exchange") {
  torch::manual_seed(35);
  auto const x = random({4, 2, 3}), factors = random({4, 2, 3});
  for (bool const tracks : {true, false}) {
    auto norm = make_norm(BatchNormOptions{2}.track_running_stats(tracks));
    norm->eval();
    auto twin = torch::nn::BatchNorm1d{BatchNormOptions{2}.track_running_stats(tracks)};
    twin->to(torch::kDouble);
    {
      torch::NoGradGuard const no_recording;
      for (std::size_t i = 0; i < norm->parameters().size(); ++i) twin->parameters()[i].copy_(norm->parameters()[i]);
      for (std::size_t i = 0; i < norm->buffers().size(); ++i) twin->buffers()[i].copy_(norm->buffers()[i]);
    }
    twin->eval();
    auto const got = penalize(norm, x, factors, true), expected = penalize(twin, x, factors, true);
    CHECK(error_of(got.x_gradient, expected.x_gradient) <= 1e-12);
    for (std::size_t i = 0; i < 2; ++i)
      CHECK(error_of(got.parameter_gradients[i], expected.parameter_gradients[i]) <= 1e-12);
  }
  // Without the exchange rank 0 differentiates alone, and gets what it gets where the others' gradients are zero.
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{2}, comm);
    auto const own = x.slice(0, comm.rank() * 2, comm.rank() * 2 + 2).clone().requires_grad_();
    auto const y = norm->forward(own);
    norm->set_backward_exchange(false);
    Tensor local;
    auto const differentiate = [&](Tensor const& scale) {
      auto const slope = torch::autograd::grad({(y.pow(2) * scale).sum()}, {own}, {}, true, true)[0];
      return torch::autograd::grad({slope.pow(2).sum() * scale}, {own}, {}, true)[0];
    };
    if (comm.rank() == 0) local = differentiate(torch::ones({}, torch::kDouble));
    norm->set_backward_exchange(true);
    auto const all = differentiate(torch::full({}, comm.rank() == 0 ? 1.0 : 0.0, torch::kDouble));
    if (comm.rank() == 0) CHECK(error_of(local, all) <= 1e-12);
  });
}

TEST_CASE("what a double backward pass cannot do is an error on every rank") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{2}, comm);
    auto const x = random({3, 2}).requires_grad_();
    auto const first = [&](bool create_graph) {
      return torch::autograd::grad({norm->forward(x).pow(3).sum()}, {x}, {}, true, create_graph)[0];
    };
    auto const second = torch::autograd::grad({first(true).pow(2).sum()}, {x}, {}, true, true)[0];
    CHECK(second.requires_grad());
    auto text = message_of<syncnorm::error>([&] { second.sum().backward(); });
    CHECK_MESSAGE(contains(text, "third derivatives"), text);

    // Only one rank records what the other would have to join.
    text = message_of<syncnorm::mismatch_error>([&] { first(comm.rank() == 0); });
    CHECK_MESSAGE(contains(text, "rank 0 needs one, rank 1 records no gradients"), text);

    // An input that was written to in between, on one rank.
    auto const base = random({3, 2});
    auto changed = base.clone().requires_grad_() * 1;
    auto const slope = torch::autograd::grad({norm->forward(changed).pow(3).sum()}, {changed}, {}, true, true)[0];
    if (comm.rank() == 1) changed.add_(1);
    text = message_of<syncnorm::invalid_argument_error>([&] { slope.sum().backward(); });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);
    first(true).pow(2).sum().backward();
  });
}
