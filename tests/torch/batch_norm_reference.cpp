#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/thread_group.hpp>

// SyncBatchNorm over the ranks against torch::nn::BatchNorm on the concatenated batch, in double on the same data:
// libtorch's float batch norm has rounding errors of its own.
namespace {

using namespace test;

enum class layout { nc, ncl, nchw, channels_last, ncdhw, channels_last_3d, transposed, sliced, expanded };
constexpr layout layouts[] = {
    layout::nc,         layout::ncl,    layout::nchw,    layout::channels_last, layout::ncdhw, layout::channels_last_3d,
    layout::transposed, layout::sliced, layout::expanded};

/// A tensor of the layout; `x` in another one, of the same values.
Tensor laid_out(Tensor const& x, layout as) {
  switch (as) {
  case layout::channels_last:
    return x.contiguous(torch::MemoryFormat::ChannelsLast);
  case layout::channels_last_3d:
    return x.contiguous(torch::MemoryFormat::ChannelsLast3d);
  case layout::transposed: // the spatial dimensions swapped, channels outermost
    return x.permute({1, 3, 2, 0}).contiguous().permute({3, 0, 2, 1});
  case layout::sliced: // of a wider tensor, so that no single stride walks the spatial dimensions
    return torch::cat({x, x}, 3).slice(3, 0, x.size(3));
  default:
    return x.contiguous();
  }
}

std::vector<std::int64_t> shape_of(layout as, std::int64_t n, std::int64_t c) {
  switch (as) {
  case layout::nc:
    return {n, c};
  case layout::ncl:
    return {n, c, 3};
  case layout::ncdhw:
  case layout::channels_last_3d:
    return {n, c, 2, 1, 2};
  default:
    return {n, c, 2, 2};
  }
}

enum class spread { even, uneven, empty };
constexpr spread spreads[] = {spread::even, spread::uneven, spread::empty};

/// How many of `batch` samples a rank gets: about as many as every other; more the higher the rank; none on even ranks.
std::vector<std::int64_t> shares_of(std::int64_t batch, int ranks, spread how) {
  std::vector<std::int64_t> weights(static_cast<std::size_t>(ranks), 1);
  if (how == spread::uneven) std::iota(weights.begin(), weights.end(), 1);
  if (how == spread::empty)
    for (std::size_t r = 0; r + 1 < weights.size(); r += 2) weights[r] = 0;
  auto const total = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  std::vector<std::int64_t> shares;
  std::int64_t weight = 0, given = 0;
  for (auto const w : weights) {
    weight += w;
    shares.push_back(batch * weight / total - given);
    given += shares.back();
  }
  return shares;
}

struct reference {
  Tensor x, dy; // of the element type that is tested
  Tensor weight, bias, y, dx, dweight, dbias, running_mean, running_var, inference;
};

template <class Norm>
void train_reference(reference& r, BatchNormOptions const& options) {
  Norm norm{options};
  norm->to(torch::kDouble);
  torch::NoGradGuard const no_recording;
  norm->weight.copy_(r.weight);
  norm->bias.copy_(r.bias);
  for (int step = 0; step < 2; ++step) {
    at::AutoGradMode const recording{true};
    auto const x = r.x.to(torch::kDouble).detach().clone().requires_grad_();
    norm->zero_grad();
    r.y = norm->forward(x);
    r.y.backward(r.dy.to(torch::kDouble));
    r.dx = x.grad();
  }
  r.dweight = norm->weight.grad();
  r.dbias = norm->bias.grad();
  r.running_mean = norm->running_mean;
  r.running_var = norm->running_var;
  norm->eval();
  r.inference = norm->forward(r.x.to(torch::kDouble));
}

reference make_reference(std::vector<std::int64_t> const& shape, torch::Dtype type, BatchNormOptions const& options,
                         bool expanded) {
  auto const channels = shape[1];
  auto per_channel = shape;
  std::fill(per_channel.begin(), per_channel.end(), 1);
  per_channel[1] = channels;
  auto const scale = 1 + 0.5 * torch::rand(per_channel, torch::kDouble);
  auto const shift = torch::randn(per_channel, torch::kDouble);
  auto small = shape;
  if (expanded) small.back() = 1;
  reference r;
  r.x = (torch::randn(small, torch::kDouble) * scale + shift).to(type).expand(shape);
  r.dy = torch::randn(shape, torch::kDouble).to(type);
  r.weight = (1.25 + torch::rand({channels}, torch::kDouble)).to(type);
  r.bias = torch::randn({channels}, torch::kDouble).to(type);
  if (shape.size() <= 3) train_reference<torch::nn::BatchNorm1d>(r, options);
  if (shape.size() == 4) train_reference<torch::nn::BatchNorm2d>(r, options);
  if (shape.size() == 5) train_reference<torch::nn::BatchNorm3d>(r, options);
  return r;
}

void check_rank(syncnorm::thread_communicator const& comm, reference const& r, layout as,
                std::vector<std::int64_t> const& shares, BatchNormOptions const& options, std::string const& name) {
  auto const rank = static_cast<std::size_t>(comm.rank());
  auto const first = std::accumulate(shares.begin(), shares.begin() + comm.rank(), std::int64_t{0});
  auto const own = [&](Tensor const& whole) { return whole.slice(0, first, first + shares[rank]); };
  auto const type = r.x.scalar_type();
  INFO(name, ", rank ", comm.rank(), " of ", comm.size());

  SyncBatchNorm norm{options, comm};
  norm->to(type);
  {
    torch::NoGradGuard const no_recording;
    norm->weight.copy_(r.weight);
    norm->bias.copy_(r.bias);
  }
  auto const given = as == layout::expanded ? own(r.x) : laid_out(own(r.x), as);
  auto const x = given.detach().requires_grad_();
  Tensor y;
  for (int step = 0; step < 2; ++step) {
    norm->zero_grad();
    x.mutable_grad() = Tensor{};
    y = norm->forward(x);
    y.backward(step == 0 ? own(r.dy) : laid_out(own(r.dy), as == layout::expanded ? layout::nchw : as));
  }
  auto const tolerance = tolerance_of(type);
  CHECK((y.scalar_type() == type));
  CHECK(error_of(y, own(r.y), scale_of(r.y)) <= tolerance);
  CHECK(error_of(x.grad(), own(r.dx), scale_of(r.dx)) <= tolerance);
  if (x.numel() != 0 && x.is_non_overlapping_and_dense()) CHECK((y.strides() == x.strides()));
  if (x.is_contiguous(torch::MemoryFormat::ChannelsLast)) CHECK(y.is_contiguous(torch::MemoryFormat::ChannelsLast));

  // Parameter gradients are sums over this rank: together they are those of the whole batch.
  auto const channels = norm->weight.size(0);
  std::vector<double> sums(static_cast<std::size_t>(2 * channels));
  auto const both = torch::cat({norm->weight.grad(), norm->bias.grad()}).to(torch::kDouble);
  std::copy_n(both.data_ptr<double>(), sums.size(), sums.begin());
  syncnorm::allreduce(comm, std::span<double const>{sums}, std::span{sums});
  auto const sum = torch::from_blob(sums.data(), {2, channels}, torch::kDouble);
  CHECK(error_of(sum[0], r.dweight) <= tolerance);
  CHECK(error_of(sum[1], r.dbias) <= tolerance);

  auto const deviation = std::sqrt(r.running_var.max().item<double>());
  CHECK(error_of(norm->running_mean, r.running_mean, deviation) <= tolerance);
  CHECK(error_of(norm->running_var, r.running_var) <= tolerance);
  CHECK(norm->num_batches_tracked.item<std::int64_t>() == 2);

  norm->eval();
  torch::NoGradGuard const no_recording;
  CHECK(error_of(norm->forward(x), own(r.inference), scale_of(r.inference)) <= tolerance);
}

void check_case(layout as, std::int64_t batch, std::int64_t channels, int ranks, spread how, torch::Dtype type) {
  auto shape = shape_of(as, batch, channels);
  // One value per channel over all ranks cannot be trained on, and the gradient of two is what rounding leaves.
  if (batch == 1 && as == layout::nc) shape.push_back(4);
  auto const options = BatchNormOptions{channels}.eps(1e-3).momentum(0.3);
  auto const r = make_reference(shape, type, options, as == layout::expanded);
  auto const shares = shares_of(batch, ranks, how);
  auto const name = "layout " + std::to_string(static_cast<int>(as)) + ", batch " + std::to_string(batch) +
                    ", channels " + std::to_string(channels) + ", spread " + std::to_string(static_cast<int>(how)) +
                    ", type " + c10::toString(type);
  syncnorm::run_ranks(
      ranks, [&](syncnorm::thread_communicator const& comm) { check_rank(comm, r, as, shares, options, name); });
}

} // namespace

TEST_CASE("SyncBatchNorm over the ranks is torch::nn::BatchNorm over the whole batch") {
  torch::manual_seed(1);
  std::size_t turn = 0;
  for (auto const type : {torch::kFloat, torch::kDouble})
    for (int const ranks : {1, 2, 3, 4, 7})
      for (std::int64_t const channels : {1, 3, 128, 256, 512, 1024})
        for (std::int64_t const batch : {1, 32, 64})
          for (auto const how : spreads)
            check_case(layouts[turn++ % std::size(layouts)], batch, channels, ranks, how, type);
}

TEST_CASE("every layout, on every spread of the samples") {
  torch::manual_seed(2);
  for (auto const type : {torch::kFloat, torch::kDouble})
    for (auto const as : layouts)
      for (auto const how : spreads)
        for (int const ranks : {1, 3}) check_case(as, 5, 3, ranks, how, type);
}

TEST_CASE("a large mean beside a small deviation") {
  torch::manual_seed(3);
  for (auto const& [mean, deviation] : {std::pair{1e4, 1.0}, std::pair{1e3, 1e-2}}) {
    auto const x = (torch::randn({64, 4, 8}, torch::kDouble) * deviation + mean).to(torch::kFloat);
    auto const wide = x.to(torch::kDouble);
    auto const variance = wide.transpose(0, 1).reshape({4, -1}).var(1, /*unbiased=*/true);
    syncnorm::run_ranks(3, [&, spread_mean = mean](syncnorm::thread_communicator const& comm) {
      SyncBatchNorm norm{BatchNormOptions{4}.momentum(1.0), comm};
      norm->forward(x.slice(0, comm.rank() * 20, comm.rank() == 2 ? 64 : comm.rank() * 20 + 20));
      CHECK(error_of(norm->running_var, variance) <= 1e-3);
      CHECK(error_of(norm->running_mean, torch::full({4}, spread_mean)) <= 1e-3);
    });
  }
}

TEST_CASE("gradients against finite differences in double") {
  torch::manual_seed(4);
  for (auto const& shares : {std::vector<std::int64_t>{2, 3}, {0, 3, 1}}) {
    auto const ranks = static_cast<int>(shares.size());
    auto const batch = std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
    auto const whole = torch::randn({batch, 2, 2, 2}, torch::kDouble);
    auto const factors = torch::randn_like(whole);
    syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
      auto const first = std::accumulate(shares.begin(), shares.begin() + comm.rank(), std::int64_t{0});
      auto const last = first + shares[static_cast<std::size_t>(comm.rank())];
      SyncBatchNorm norm{BatchNormOptions{2}, comm};
      norm->to(torch::kDouble);
      auto x = whole.slice(0, first, last).clone().requires_grad_();
      auto const own_loss = [&] {
        auto const y = norm->forward(x);
        return (y.pow(3) * factors.slice(0, first, last)).sum();
      };
      auto const all_ranks = [&](Tensor const& sum) {
        double value = sum.item<double>();
        syncnorm::allreduce(comm, std::span<double const>{&value, 1}, std::span{&value, 1});
        return value;
      };
      own_loss().backward();

      torch::NoGradGuard const no_recording;
      double const h = 1e-5;
      auto const slope = [&](Tensor const& element) {
        auto const change = [&](double by) {
          if (element.defined()) element.add_(by);
          return all_ranks(own_loss());
        };
        auto const up = change(h), down = change(-2 * h);
        change(h);
        return (up - down) / (2 * h);
      };
      for (std::int64_t i = 0; i < whole.numel(); ++i) {
        // Every rank joins the passes of all; the one that has the element changes it.
        auto const own = i - first * 8;
        bool const mine = own >= 0 && own < x.numel();
        auto const numeric = slope(mine ? x.view(-1)[own] : Tensor{});
        if (mine) CHECK(numeric == doctest::Approx(x.grad().view(-1)[own].item<double>()).epsilon(1e-6).scale(1));
      }
      for (auto const& parameter : norm->parameters())
        for (std::int64_t c = 0; c < 2; ++c)
          CHECK(slope(parameter[c]) == doctest::Approx(all_ranks(parameter.grad()[c])).epsilon(1e-6).scale(1));
    });
  }
}
