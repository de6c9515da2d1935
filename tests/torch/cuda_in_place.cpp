#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_support.hpp"

#include <syncnorm/comm/self.hpp>
#include <syncnorm/torch/batch_norm_group.hpp>
#include <syncnorm/torch/micro_batches.hpp>

namespace test::on_cuda {

namespace {

/// How passes are run; apart: not in place.
enum class way { apart, at_once, begun, grouped };

/// The outputs of `x` and of `u`, the latter's by the module alone.
std::pair<Tensor, Tensor> forward_both(way how, SyncBatchNorm& norm, Tensor const& x, norm_epilogue const& with,
                                       Tensor const& u) {
  if (how == way::begun) {
    auto first = norm->begin_forward(x, with), second = norm->begin_forward(u);
    auto const y = first.finish();
    return {y, second.finish()};
  }
  if (how == way::grouped) {
    auto const y = syncnorm::torch::group_forward({{norm, x, with}}).back();
    return {y, norm->forward(u)};
  }
  auto const y = norm->forward_with(x, with);
  return {y, norm->forward(u)};
}

} // namespace

TEST_CASE("CUDA tensors: in place, gradients are those of a module apart, and x is written over") {
  torch::manual_seed(81);
  struct mode {
    torch::Dtype type;
    double slope;
    std::vector<std::int64_t> shares;
    bool evaluates = false;
  };
  for (auto const& of : std::vector<mode>{{torch::kFloat, 0.25, {3, 0, 2}},
                                          {torch::kDouble, 0, {3, 2}},
                                          {torch::kHalf, 0.5, {5}},
                                          {torch::kFloat, 1, {5}, true}}) {
    auto const x = random({5, 6, 2, 3}).to(of.type), dy = random({5, 6, 2, 3}).to(of.type),
               residual = random({5, 6, 2, 3}).to(of.type);
    auto const mask = torch::rand({5, 2, 3}) < 0.7;
    auto const norm = make_norm(BatchNormOptions{6}.eps(1e-2), {}, of.type == torch::kDouble ? of.type : torch::kFloat);
    {
      torch::NoGradGuard const no_recording;
      norm->bias.copy_(torch::arange(6) * 0.1);
      norm->weight[1] = 0, norm->weight[4] = 1e-4; // channels to be kept
    }
    norm.ptr()->train(!of.evaluates);
    run_ranks(static_cast<int>(of.shares.size()), [&](thread_communicator const& comm) {
      INFO("type ", static_cast<int>(of.type), ", slope ", of.slope, ", rank ", comm.rank(), " of ", comm.size());
      auto const on = device_of(comm);
      auto const own = [&](Tensor const& whole, bool channels_last) {
        auto const part = part_of(whole, of.shares, comm.rank()).to(on);
        return channels_last ? part.contiguous(torch::MemoryFormat::ChannelsLast) : part;
      };
      std::vector<std::vector<Tensor>> results;
      for (auto const how : {way::apart, way::at_once, way::begun, way::grouped}) {
        bool const in_place = how != way::apart;
        auto device = on_device(norm, comm);
        device->set_in_place(in_place);
        auto& all = results.emplace_back();
        for (bool const channels_last : {false, true}) {
          auto const leaf = own(x, channels_last).requires_grad_(),
                     added = own(residual, channels_last).requires_grad_();
          norm_epilogue const with{activation::leaky_relu(of.slope), added, own(mask, false)};
          auto const input = leaf * 2, twice = leaf * 3; // which do not need their results
          auto const* const memory = input.data_ptr();
          auto const [y, z] = forward_both(how, device, input, with, twice);
          CHECK((y.data_ptr() == memory || y.numel() == 0) == (in_place || y.numel() == 0));
          CHECK(y.is_same(input) == in_place);
          auto const loss = (y * own(dy, false)).sum() + (z * own(dy, false)).sum();
          loss.backward({}, /*retain_graph=*/true);
          auto once = left_of(device, {y, z}, {leaf, added});
          loss.backward();
          auto const again = left_of(device, {y, z}, {leaf, added});
          all.insert(all.end(), once.begin(), once.end());
          all.insert(all.end(), again.begin(), again.end());
        }
      }
      // Of recovered values: the last bit of y, times what `recoverable_ratio` allows.
      auto const tolerance = of.type == torch::kHalf ? 2e-2 : of.type == torch::kFloat ? 2e-5 : 1e-12;
      for (std::size_t i = 1; i < results.size(); ++i) check_close(results[i], results[0], tolerance);
    });
  }
  check_no_violations();
}

TEST_CASE("CUDA tensors: micro-batches in place, each with an epilogue of its own, give what they give apart") {
  torch::manual_seed(83);
  struct mode {
    torch::Dtype type;
    std::vector<std::vector<std::int64_t>> shares; ///< samples of each micro-batch of each rank
    bool evaluates = false;
  };
  for (auto const& of : std::vector<mode>{{torch::kFloat, {{0, 3, 2}, {4}, {0, 0}}},
                                          {torch::kDouble, {{2, 1}, {1, 0, 3}}},
                                          {torch::kHalf, {{2, 0, 3}}},
                                          {torch::kBFloat16, {{1, 4}}},
                                          {torch::kFloat, {{2, 0, 3}}, true}}) {
    bool const is_wide = of.type == torch::kFloat || of.type == torch::kDouble;
    auto const x = random({5, 6, 2, 3}).to(of.type), dy = random({5, 6, 2, 3}).to(of.type),
               residual = random({5, 6, 2, 3}).to(of.type);
    auto const mask = torch::rand({5, 2, 3}) < 0.7;
    auto const norm = make_norm(BatchNormOptions{6}.eps(1e-2), {}, is_wide ? of.type : torch::kFloat);
    {
      torch::NoGradGuard const no_recording;
      norm->bias.copy_(torch::arange(6) * 0.1);
      norm->weight[1] = 0, norm->weight[4] = 1e-4; // channels to be kept
    }
    norm.ptr()->train(!of.evaluates);
    run_ranks(static_cast<int>(of.shares.size()), [&](thread_communicator const& comm) {
      INFO("type ", static_cast<int>(of.type), ", rank ", comm.rank(), " of ", comm.size());
      auto const on = device_of(comm);
      std::vector<std::vector<Tensor>> results;
      for (auto const how : {way::apart, way::at_once, way::begun}) {
        bool const in_place = how != way::apart;
        auto device = on_device(norm, comm);
        device->set_in_place(in_place);
        auto& all = results.emplace_back();
        for (int i = 0; i < 2; ++i) { // the second time by another room
          std::vector<Tensor> leaves, inputs, factors;
          std::vector<norm_epilogue> with;
          for (auto const n : of.shares[static_cast<std::size_t>(comm.rank())]) {
            auto const k = inputs.size();
            auto const own = [&](Tensor const& whole) { return whole.slice(0, 0, n).to(on); };
            auto const part = own(x + static_cast<int>(k));
            leaves.push_back((k == 1 ? part.contiguous(torch::MemoryFormat::ChannelsLast) : part * 1).requires_grad_());
            inputs.push_back(leaves.back() * 1);
            factors.push_back(own(dy));
            // By turns one of which nothing is recovered, one that is activated, and one that is not.
            auto const added = k == 2 ? Tensor{} : own(residual * 1).requires_grad_();
            with.push_back({activation::leaky_relu(k == 0   ? 0
                                                   : k == 1 ? 0.5
                                                            : 1),
                            added, k == 1 ? Tensor{} : own(mask),
                            k == 0 ? syncnorm::masked_outputs::zero : syncnorm::masked_outputs::normalized});
          }
          auto const y = how == way::begun ? syncnorm::torch::begin_forward_batches(device, inputs, with).finish()
                                           : syncnorm::torch::forward_batches(device, inputs, with);
          REQUIRE(y.size() == inputs.size());
          auto loss = torch::zeros({}, factors[0].options());
          for (std::size_t k = 0; k < y.size(); ++k) {
            CHECK(y[k].is_same(inputs[k]) == in_place);
            loss = loss + (y[k] * factors[k]).sum();
          }
          for (auto const& each : with)
            if (each.residual.defined()) leaves.push_back(each.residual);
          loss.backward({}, /*retain_graph=*/true);
          auto const once = left_of(device, y, leaves);
          loss.backward();
          auto const again = left_of(device, y, leaves);
          all.insert(all.end(), once.begin(), once.end());
          all.insert(all.end(), again.begin(), again.end());
        }
      }
      // Of recovered values: the last bit of y, times what `recoverable_ratio` allows.
      auto const tolerance = of.type == torch::kBFloat16 ? 1.6e-1
                             : of.type == torch::kHalf   ? 2e-2
                             : of.type == torch::kFloat  ? 2e-5
                                                         : 1e-12;
      for (std::size_t i = 1; i < results.size(); ++i) check_close(results[i], results[0], tolerance);
    });
  }
  check_no_violations();
}

TEST_CASE("CUDA tensors: micro-batches in place make room without waiting but at first, and too little is an error") {
  torch::Device const device{torch::kCUDA, 0};
  SyncBatchNorm norm{BatchNormOptions{64}};
  norm->to(device);
  norm->set_in_place();
  use_cuda(*norm, syncnorm::self_communicator{});
  auto const leaf = torch::randn({3, 64}).to(device).requires_grad_();
  // Of the first one everything is kept, and of the second one nothing; only of the third one may there be too little room.
  std::vector<norm_epilogue> const with{{activation::relu()}, {}, {activation::leaky_relu(0.5)}};
  auto const inputs = [&] { return std::vector<Tensor>{leaf * 1, leaf.slice(0, 0, 0) * 1, leaf * 2}; };
  auto const step = [&] {
    auto const y = syncnorm::torch::forward_batches(norm, inputs(), with);
    norm->synchronize();
    return y;
  };
  (void)step();
  auto const given = inputs();
  fake_cuda::reset();
  (void)fake_torch::host_operations();
  (void)syncnorm::torch::forward_batches(norm, given, with);
  CHECK(fake_torch::host_operations() == 0);
  CHECK(fake_cuda::calls("cudaStreamSynchronize") == 0);
  norm->synchronize();

  norm->weight.detach().slice(0, 0, 9).zero_();
  auto const before = state_of(*norm);
  auto const stay = inputs();
  auto const text = message_of<syncnorm::invalid_argument_error>([&] {
    (void)syncnorm::torch::forward_batches(norm, stay, with);
    norm->synchronize();
  });
  CHECK(text == "batch_norm forward: rank 0: more channels to keep than room");
  for (std::size_t k = 0; k < stay.size(); ++k) CHECK(torch::equal(stay[k].detach().cpu(), inputs()[k].detach().cpu()));
  CHECK(same_state(state_of(*norm), before));
  auto const y = step(); // which makes room
  (y[0] * y[0]).sum().backward({}, /*retain_graph=*/true);
  (y[2] * y[2]).sum().backward();
  norm->synchronize();
  check_no_violations();
}

TEST_CASE(
    "CUDA tensors: micro-batches in place, what is wrong on one rank is an error on every rank, and inputs stay") {
  using syncnorm::invalid_argument_error;
  auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat);
  run_ranks(2, [&](thread_communicator const& comm) {
    auto device = on_device(norm, comm);
    device->set_in_place();
    auto const before = state_of(*device);
    auto const leaf = torch::randn({4, 3, 2}).to(device_of(comm)).requires_grad_();
    bool const here = comm.rank() == 1;
    using maker = std::function<std::vector<Tensor>(Tensor const& x, Tensor const& u)>;
    auto const refused = [&](std::string const& what, maker const& inputs,
                             std::function<std::vector<norm_epilogue>(Tensor const& u)> const& with = {}) {
      for (bool const begun : {false, true}) {
        auto const x = leaf * 1, u = leaf * 2; // which a pass is recorded of before it is known to have failed
        auto const text = message_of<invalid_argument_error>([&] {
          auto const epilogues = with ? with(u) : std::vector<norm_epilogue>{};
          begun ? (void)syncnorm::torch::begin_forward_batches(device, inputs(x, u), epilogues).finish()
                : (void)syncnorm::torch::forward_batches(device, inputs(x, u), epilogues);
          device->synchronize();
        });
        CHECK_MESSAGE(contains(text, "rank 1: " + what), text);
        CHECK(same_state(state_of(*device), before));
        CHECK(torch::equal(x.detach().cpu(), leaf.detach().cpu()));
        CHECK(torch::equal(u.detach().cpu(), 2 * leaf.detach().cpu()));
      }
    };
    maker const both = [](Tensor const& x, Tensor const& u) { return std::vector{x, u}; };
    auto const with_residual = [](Tensor const& residual) {
      std::vector<norm_epilogue> with(2);
      with[0].residual = residual;
      return with;
    };
    refused("there are 1 epilogues, expected 2 as micro-batches", both,
            [&](Tensor const&) { return std::vector<norm_epilogue>(here ? 1 : 2); });
    refused("a pass in place writes to memory that another micro-batch reads", [&](Tensor const& x, Tensor const& u) {
      return std::vector{x, here ? x : u};
    });
    refused("a pass in place writes to memory that another micro-batch reads", both,
            [&](Tensor const& u) { return with_residual(here ? u : leaf); });
    refused("micro-batch 0: the residual is [1, 3, 2], expected [4, 3, 2] as the input", both,
            [&](Tensor const&) { return with_residual(here ? leaf.slice(0, 0, 1) : leaf); });
    refused("a leaf Variable that requires grad", [&](Tensor const& x, Tensor const& u) {
      return std::vector{x, here ? leaf : u};
    });
    refused("Output 0 of UnbindBackward0 is a view and is being modified inplace",
            [&](Tensor const& x, Tensor const& u) {
              return std::vector{x, here ? u.unsqueeze(0).unbind()[0] : u};
            });

    auto const y = syncnorm::torch::forward_batches(device, {leaf * 1, leaf * 2}, std::vector<norm_epilogue>(2));
    if (here) y[1].mul_(2);
    auto const text = message_of<invalid_argument_error>([&] {
      (y[0].sum() + y[1].sum()).backward();
      device->synchronize();
    });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);
  });
  check_no_violations();
}

TEST_CASE("CUDA tensors: in place, room is made for the channels that a pass keeps, without waiting but at first") {
  torch::Device const device{torch::kCUDA, 0};
  SyncBatchNorm norm{BatchNormOptions{64}};
  norm->to(device);
  norm->set_in_place();
  use_cuda(*norm, syncnorm::self_communicator{});
  auto const x = torch::randn({3, 64}).to(device).requires_grad_();
  auto const step = [&] {
    auto const y = norm->forward(x * 1);
    norm->synchronize();
    return y;
  };
  auto const set_weights = [&](std::int64_t from, std::int64_t to) {
    torch::NoGradGuard const no_recording;
    norm->weight.slice(0, from, to).zero_();
  };
  (void)step();
  auto const input = x * 1;
  fake_cuda::reset();
  (void)fake_torch::host_operations();
  (void)norm->forward(input);
  CHECK(fake_torch::host_operations() == 0);
  CHECK(fake_cuda::calls("cudaStreamSynchronize") == 0);
  norm->synchronize();
  for (std::int64_t c = 0; c < 64; c += 4) set_weights(c, c + 4), (void)step(); // as they move, a few at a time

  set_weights(0, 64);
  norm->weight.detach().fill_(1);
  (void)step();
  set_weights(0, 5); // more at once
  auto const before = state_of(*norm);
  auto const copy = (x * 1).detach().cpu();
  auto const given = x * 1;
  CHECK(message_of<syncnorm::invalid_argument_error>([&] {
          (void)norm->forward(given);
          norm->synchronize();
        }) == "batch_norm forward: rank 0: more channels to keep than room");
  CHECK(torch::equal(given.detach().cpu(), copy));
  CHECK(same_state(state_of(*norm), before));
  auto const y = step(); // which makes room
  (y * y).sum().backward();
  norm->synchronize();

  norm->weight.set_data(torch::zeros({64}).to(device)); // as what loads a checkpoint does
  (void)step();
  check_no_violations();
}

TEST_CASE("CUDA tensors: in place, what autograd forbids is an error on every rank, and changes nothing") {
  using syncnorm::invalid_argument_error;
  auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat);
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const on = device_of(comm);
    auto device = on_device(norm, comm);
    device->set_in_place();
    auto const before = state_of(*device);
    auto const values = torch::randn({4, 3, 2}).to(on);
    auto const leaf = values.clone().requires_grad_();
    auto const thrown = [&](auto const& pass) {
      auto const text = message_of<invalid_argument_error>([&] {
        pass();
        device->synchronize();
      });
      CHECK(same_state(state_of(*device), before));
      return text;
    };
    auto const forward = [&](Tensor const& input, norm_epilogue const& with = {}) {
      return thrown([&] { (void)device->forward_with(input, with); });
    };
    auto const mine = leaf * 1;
    auto const given = mine.detach().cpu();
    auto text = forward(comm.rank() == 1 ? leaf : mine);
    CHECK_MESSAGE(contains(text, "rank 1: a leaf Variable that requires grad"), text);
    if (comm.rank() == 0) CHECK(torch::equal(mine.detach().cpu(), given));
    auto const both = leaf * 1;
    text = forward(both, {.residual = comm.rank() == 0 ? both : leaf});
    CHECK_MESSAGE(contains(text, "rank 0: the residual is in the memory of the input"), text);
    text = forward(comm.rank() == 0 ? values.unsqueeze(3).expand({4, 3, 2, 2}) : values.unsqueeze(3) * 1);
    CHECK_MESSAGE(contains(text, "rank 0: the strides of the input allow no pass in place"), text);

    // An operation that writes to y, on one rank.
    auto const y = device->forward(leaf * 1);
    if (comm.rank() == 1) y.mul_(2);
    text = message_of<invalid_argument_error>([&] {
      y.sum().backward();
      device->synchronize();
    });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);
    auto const dx = torch::autograd::grad({device->forward(leaf * 1).square().sum()}, {leaf}, {}, true, true)[0];
    text = message_of<syncnorm::error>([&] { dx.sum().backward(); });
    CHECK_MESSAGE(contains(text, "a pass in place (double backward) cannot be differentiated"), text);
    torch::NoGradGuard const no_recording;
    auto const input = leaf.detach().clone();
    CHECK(device->forward(input).is_same(input));
    device->synchronize();
  });
  check_no_violations();
}

TEST_CASE("CUDA tensors: in place, a pass that hears of an earlier one's fault counts as having written") {
  auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kDouble);
  torch::Device const on{torch::kCUDA, 0};
  auto const one_value = torch::tensor({0, 1, 0, 0}).to(torch::kBool).to(on);
  for (bool const in_two : {false, true}) {
    INFO("in two phases ", in_two);
    auto device = copy_of(norm);
    device->to(torch::kDouble); // num_batches_tracked, too
    device->to(on);
    use_cuda(*device, syncnorm::self_communicator{});
    device->set_in_place();
    (void)device->forward(torch::randn({4, 3}, torch::kDouble).to(on)); // makes room
    auto const values = torch::randn({4, 3}, torch::kDouble).to(on);
    auto const leaf = torch::randn({4, 3}, torch::kDouble).to(on).requires_grad_();
    auto const x = leaf * 1, square = x * x; // which saves x
    device->synchronize();
    device->set_in_place(false);
    fake_cuda::enqueue(fake_torch::default_stream(0),
                       [] { std::this_thread::sleep_for(std::chrono::milliseconds{50}); });
    (void)device->forward_with(values, {.mask = one_value}); // not known to have failed yet
    REQUIRE(cudaStreamSynchronize(fake_torch::default_stream(0)) == cudaSuccess);
    device->set_in_place();
    CHECK(contains(message_of<syncnorm::invalid_argument_error>(
                       [&] { (void)(in_two ? device->begin_forward(x).finish() : device->forward(x)); }),
                   "more than 1 value"));
    CHECK(contains(message_of<c10::Error>([&] { square.sum().backward(); }), "modified by an inplace operation"));
    CHECK(device->num_batches_tracked.cpu().item<double>() == 2); // the pass itself was fine
  }
  check_no_violations();
}

TEST_CASE("CUDA tensors: in place, a graph over a view goes with its output") {
  auto const norm = make_norm(BatchNormOptions{3}, {}, torch::kFloat);
  run_ranks(1, [&](thread_communicator const& comm) {
    auto device = on_device(norm, comm);
    device->set_in_place();
    auto const leaf = torch::randn({4, 3, 2}).to(device_of(comm)).requires_grad_();
    auto const base = [&] {
      auto const x = leaf * 1;
      auto const y = device->forward(x.view({4, 3, 1, 2}));
      CHECK(y.requires_grad());
      return c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>{x.getIntrusivePtr()};
    }();
    CHECK(base.expired());
    device->synchronize();
  });
  check_no_violations();
}

} // namespace test::on_cuda
