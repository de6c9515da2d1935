#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "power_norm_support.hpp"

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/convert_power_norm.hpp>
#include <syncnorm/torch/group_scaling.hpp>

using namespace test;
using syncnorm::invalid_argument_error;
using syncnorm::mismatch_error;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using syncnorm::torch::convert_sync_powernorm;
using syncnorm::torch::GroupScaling1D;
using syncnorm::torch::revert_sync_powernorm;

namespace {

namespace nn = torch::nn;

/// Holds its power norm by its type.
struct TypedImpl : nn::Module {
  TypedImpl() { register_module("norm", norm); }
  Tensor forward(Tensor const& x) { return norm->forward(x); }
  PowerNorm norm{3};
};
TORCH_MODULE(Typed);
struct SyncTypedImpl : nn::Module {
  SyncTypedImpl() { register_module("norm", norm); }
  Tensor forward(Tensor const& x) { return norm->forward(x); }
  SyncPowerNorm norm{3};
};
TORCH_MODULE(SyncTyped);

} // namespace

TEST_CASE("groups that a power norm scales are those that GroupScaling1D scales before it") {
  torch::manual_seed(2);
  for (bool const corrected : {false, true}) {
    auto const options = PowerNormOptions{6}.warmup_iters(4).corrected(corrected);
    auto fused = prepared(PowerNorm{PowerNormOptions{options}.group_num(3)}), plain = prepared(PowerNorm{options});
    GroupScaling1D scaling{3};
    for (int step = 0; step < 8; ++step) {
      auto const x = random({5, 3, 6}).requires_grad_(), same = x.detach().clone().requires_grad_();
      auto const dy = random({5, 3, 6});
      auto const mask = torch::rand({3, 5}) > 0.6;
      auto const y = fused->forward(x, mask), expected = plain->forward(scaling->forward(same), mask);
      y.backward(dy);
      expected.backward(dy);
      CHECK(error_of(y, expected) <= 1e-12);
      CHECK(error_of(x.grad(), same.grad()) <= 1e-11);
    }
    CHECK(error_of(fused->running_phi(), plain->running_phi()) <= 1e-12);
    CHECK(error_of(fused->ema_gz(), plain->ema_gz()) <= 1e-11);
    CHECK(error_of(fused->weight.grad(), plain->weight.grad()) <= 1e-11);
    fused->eval(), plain->eval();
    auto const x = random({2, 6});
    CHECK(error_of(fused->forward(x), plain->forward(scaling->forward(x))) <= 1e-12);
  }
}

TEST_CASE("options that are changed count from the next pass on, in the module as in its clone") {
  torch::manual_seed(6);
  for (bool const evaluates : {false, true}) {
    auto norm = prepared(PowerNorm{PowerNormOptions{4}.warmup_iters(0)});
    auto const x = random({5, 4}).requires_grad_();
    train_step(norm, x);
    norm->train(!evaluates);
    auto const before = norm->forward(x);
    norm->options.eps(3).group_num(2);
    auto const same = std::dynamic_pointer_cast<PowerNormImpl>(norm->clone());
    same->train(!evaluates);
    auto const y = norm->forward(x), expected = same->forward(x);
    CHECK((torch::equal(y, expected) && !torch::allclose(y, before)));
    // A pass that was recorded before goes by what it was made with.
    auto const gradients = torch::autograd::grad({before.sum(), y.sum()}, {x});
    CHECK(gradients[0].defined());
  }
}

TEST_CASE("clones, conversions and other communicators keep the channels that a module was made with") {
  torch::manual_seed(8);
  auto const x = random({5, 4});
  auto norm = prepared(PowerNorm{PowerNormOptions{4}});
  norm->options.num_features(6);
  auto const expected = std::dynamic_pointer_cast<PowerNormImpl>(norm->clone())->forward(x);
  CHECK(torch::equal(norm->forward(x), expected));
  for (bool const affine : {true, false}) {
    PowerNorm plain{PowerNormOptions{4}.affine(affine)};
    plain->options.affine(!affine);
    plain->reset_parameters();
    CHECK(plain->clone()->parameters().size() == (affine ? 2 : 0));
  }
  auto const made = syncnorm::torch::convert_sync_powernorm(norm.ptr(), syncnorm::self_communicator{});
  auto* const sync = made->as<SyncPowerNormImpl>();
  CHECK(sync->forward(x).sizes() == x.sizes());
  sync->set_communicator(syncnorm::self_communicator{});
  CHECK(sync->forward(x).sizes() == x.sizes());
}

TEST_CASE("evaluation goes by running_phi, and differentiates like any function") {
  torch::manual_seed(3);
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = prepared(SyncPowerNorm{PowerNormOptions{4}.warmup_iters(1), comm});
    auto const x = torch::arange(24, torch::kDouble).view({3, 2, 4}) / 10 + comm.rank();
    for (int step = 0; step < 3; ++step) train_step(norm, x);
    norm->zero_grad();
    norm->eval();
    if (comm.rank() == 1) return; // nobody is needed
    auto const before = state_of(*norm);
    auto const own = x.clone().requires_grad_(), same = x.clone().requires_grad_();
    auto const y = norm->forward(own, torch::ones({2, 3}, torch::kBool));
    auto const phi = norm->running_phi().view({4});
    auto const w = norm->weight.detach().clone().requires_grad_();
    auto const expected = same / (phi + 1e-5).sqrt() * w + norm->bias.detach();
    y.pow(2).sum().backward();
    expected.pow(2).sum().backward();
    CHECK(error_of(y, expected) <= 1e-12);
    CHECK(error_of(own.grad(), same.grad()) <= 1e-12);
    CHECK(error_of(norm->weight.grad(), w.grad()) <= 1e-12);
    CHECK(same_state(before, state_of(*norm)));
    torch::NoGradGuard const no_recording;
    CHECK_FALSE(norm->forward(x).requires_grad());
  });
}

TEST_CASE("layouts: transposed, sliced and channels_last inputs, with masks") {
  torch::manual_seed(4);
  auto const x = random({3, 4, 5, 2}), dy = random({3, 4, 5, 2});
  auto const mask = torch::rand({3, 5, 2}) > 0.5;
  auto run = [&](Tensor const& input, Tensor const& gradient, bool spoil_padding) {
    auto norm = prepared(PowerNorm{PowerNormOptions{4}.warmup_iters(2).corrected(true)});
    auto own = input.detach();
    if (spoil_padding)
      own = torch::where(mask.unsqueeze(1), torch::full_like(own, std::numeric_limits<double>::quiet_NaN()), own);
    Tensor dx, y;
    for (int step = 0; step < 4; ++step) {
      own = own.detach().requires_grad_();
      y = norm->forward(own, mask);
      y.backward(gradient);
      dx = own.grad();
    }
    return std::vector{torch::where(mask.unsqueeze(1), torch::zeros_like(y), y), dx, norm->running_phi(),
                       norm->ema_gz()};
  };
  auto const expected = run(x, dy, false);
  auto const check = [&](std::vector<Tensor> const& got) {
    for (std::size_t i = 0; i < expected.size(); ++i) CHECK(error_of(got[i], expected[i]) <= 1e-12);
  };
  check(run(x.contiguous(at::MemoryFormat::ChannelsLast), dy, false));
  check(run(x.permute({1, 3, 0, 2}).contiguous().permute({2, 0, 3, 1}), dy, false));
  check(run(torch::cat({x, x}, 3).slice(3, 0, 2), dy.contiguous(at::MemoryFormat::ChannelsLast), false));
  check(run(x, dy, true)); // whatever is in padding
}

TEST_CASE("checkpoints, clones and conversions take the state as it is after what is in flight") {
  torch::manual_seed(5);
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = prepared(SyncPowerNorm{PowerNormOptions{4}.warmup_iters(1), comm}, torch::kFloat);
    auto const x = torch::arange(24, torch::kFloat).view({3, 2, 4}) / 10 + comm.rank();
    for (int step = 0; step < 3; ++step) train_step(norm, x);
    std::stringstream stream;
    torch::save(norm, stream);
    SyncPowerNorm loaded{PowerNormOptions{4}.warmup_iters(1), comm};
    torch::load(loaded, stream);
    auto const state = state_of(*norm);
    CHECK(same_state(state_of(*loaded), state));
    CHECK(loaded->iters() == 3);
    CHECK((norm->named_buffers().keys() == std::vector<std::string>{"running_phi", "ema_gz", "iters"}));
    CHECK((norm->running_phi().sizes() == at::IntArrayRef{1, 4, 1, 1}));

    train_step(norm, x);
    auto const copy = std::dynamic_pointer_cast<SyncPowerNormImpl>(norm->clone());
    REQUIRE(copy != nullptr);
    norm->synchronize();
    CHECK(same_state(state_of(*copy), state_of(*norm)));
    CHECK_FALSE(copy->running_phi().is_same(norm->running_phi()));
    copy->forward(x);
    copy->synchronize();
    CHECK(copy->iters() == 5);
    CHECK(norm->iters() == 4);
    train_step(loaded, x); // the loaded one goes on as the original did
    CHECK(torch::equal(loaded->running_phi(), norm->running_phi()));
    CHECK(torch::equal(loaded->ema_gz(), norm->ema_gz()));

    train_step(norm, x);
    nn::Sequential model{norm};
    model->to(torch::kDouble); // through its parent
    CHECK((norm->running_phi().scalar_type() == torch::kDouble));
    CHECK(norm->iters() == 5);
    CHECK((norm->named_buffers()["iters"].scalar_type() == torch::kLong));
    train_step(norm, x.to(torch::kDouble));
    norm->eval();
    norm->train();
    CHECK(norm->named_buffers()["iters"].item<std::int64_t>() == 6);
    norm->reset_parameters();
    CHECK(norm->iters() == 0);
  });
}

TEST_CASE("the number of steps is no less a number after a conversion") {
  PowerNorm norm{4};
  for (std::int64_t const steps : {70001, 16777217}) {
    norm->named_buffers()["iters"].fill_(steps);
    for (auto const type : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
      norm->to(type);
      CHECK((norm->running_phi().scalar_type() == type));
      CHECK(norm->iters() == steps);
      norm->to(torch::kCPU, torch::kFloat);
      CHECK(norm->iters() == steps);
    }
  }
}

TEST_CASE("a converted model is the same model over the ranks, and reverting restores it") {
  torch::manual_seed(6);
  auto const x = torch::randn({5, 6, 3}, torch::kDouble), dy = torch::randn({5, 6, 4}, torch::kDouble);
  auto const make = [] {
    nn::Sequential net;
    net->push_back("norm", PowerNorm{PowerNormOptions{3}.warmup_iters(2).alpha_fwd(0.7)});
    net->push_back("linear", nn::Linear{3, 4});
    net->push_back("scale", GroupScaling1D{2});
    net->push_back("last", PowerNorm{4});
    net->to(torch::kDouble);
    return net;
  };
  torch::manual_seed(7);
  auto whole = make();
  CHECK(whole->at<syncnorm::torch::PowerNormImpl>(0).weight.numel() == 3);
  torch::manual_seed(7);
  std::vector<nn::Sequential> nets{make()};
  torch::manual_seed(7);
  nets.push_back(make());
  torch::optim::SGD of_whole{whole->parameters(), 0.1};
  for (int step = 0; step < 4; ++step) {
    of_whole.zero_grad();
    whole->forward(x).backward(dy);
    of_whole.step();
  }
  run_ranks(2, [&](thread_communicator const& comm) {
    auto& net = nets[static_cast<std::size_t>(comm.rank())];
    torch::optim::SGD optimizer{net->parameters(), 0.1};
    auto const addresses = [&] {
      std::vector<void*> all;
      for (auto const& t : net->parameters()) all.push_back(t.unsafeGetTensorImpl());
      for (auto const& t : net->buffers()) all.push_back(t.unsafeGetTensorImpl());
      return all;
    };
    auto const before = addresses();
    CHECK(convert_sync_powernorm(net.ptr(), comm) == net.ptr());
    REQUIRE(net->ptr(0)->as<SyncPowerNorm>() != nullptr);
    CHECK(syncnorm::size(net->ptr(3)->as<SyncPowerNorm>()->communicator()) == 2);
    CHECK(net->ptr(0)->as<SyncPowerNorm>()->options.alpha_fwd() == 0.7);
    CHECK(addresses() == before);
    auto const part = [&](Tensor const& t) { return comm.rank() == 0 ? t.slice(1, 0, 4) : t.slice(1, 4, 6); };
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      net->forward(part(x)).backward(part(dy));
      for (auto const& parameter : net->parameters()) {
        auto& grad = parameter.grad();
        std::span<double> const values{grad.data_ptr<double>(), static_cast<std::size_t>(grad.numel())};
        syncnorm::allreduce(comm, std::span<double const>{values}, values);
      }
      optimizer.step();
    }
    CHECK(revert_sync_powernorm(net.ptr()) == net.ptr()); // with exchanges in flight
    REQUIRE(net->ptr(0)->as<PowerNorm>() != nullptr);
    CHECK(net->ptr(3)->as<PowerNorm>() != nullptr);
    CHECK(addresses() == before);
    auto const got = state_of(*net), expected = state_of(*whole);
    REQUIRE(got.size() == expected.size());
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(error_of(got[i], expected[i], 1) <= 1e-10);
    net->eval();
    convert_sync_powernorm(net.ptr(), comm);
    CHECK_FALSE(net->ptr(0)->as<SyncPowerNorm>()->is_training());
  });

  // A norm itself; places that cannot be replaced; norms that are synchronized already.
  PowerNorm const alone{3};
  auto const converted = convert_sync_powernorm(alone.ptr(), syncnorm::self_communicator{});
  REQUIRE(converted->as<SyncPowerNorm>() != nullptr);
  CHECK(converted->as<SyncPowerNorm>()->weight.is_same(alone->weight));
  CHECK(revert_sync_powernorm(converted)->as<PowerNorm>() != nullptr);
  nn::Sequential typed{Typed{}, PowerNorm{3}};
  auto const text =
      message_of<invalid_argument_error>([&] { convert_sync_powernorm(typed.ptr(), syncnorm::self_communicator{}); });
  CHECK_MESSAGE(contains(text, "cannot replace 0.norm: "), text);
  CHECK(typed->ptr(1)->as<PowerNorm>() != nullptr);
  nn::Sequential sequence{PowerNorm{3}};
  sequence = convert_sync_powernorm(sequence, syncnorm::self_communicator{});
  CHECK(sequence->ptr(0)->as<SyncPowerNorm>() != nullptr);
  sequence = revert_sync_powernorm(sequence);
  CHECK(sequence->ptr(0)->as<PowerNorm>() != nullptr);
  CHECK_THROWS_AS(convert_sync_powernorm(nullptr, syncnorm::self_communicator{}), invalid_argument_error);
  CHECK_THROWS_AS(revert_sync_powernorm(nullptr), invalid_argument_error);
  run_ranks(2, [](thread_communicator const& comm) {
    SyncTyped const held;
    convert_sync_powernorm(held.ptr(), comm);
    CHECK(syncnorm::size(held->norm->communicator()) == 2);
    revert_sync_powernorm(held.ptr());
    CHECK(syncnorm::size(held->norm->communicator()) == 1);
  });
}

TEST_CASE("passes that outlast their communicator, or their module, are steps like others") {
  torch::manual_seed(10);
  auto const x = random({3, 4, 2}), u = random({3, 4, 2});
  // One of two passes comes before the change, and both are differentiated after it, in either order.
  auto const steps = [](nn::Sequential& net, Tensor const& first, Tensor const& second, bool in_order,
                        auto const& change) {
    net->forward(first).pow(2).sum().backward();
    std::vector<Tensor> losses{net->forward(first).pow(2).sum()};
    change();
    losses.push_back(net->forward(second).pow(3).sum());
    if (!in_order) std::swap(losses[0], losses[1]);
    for (auto const& loss : losses) loss.backward();
    net->forward(first).sum().backward();
  };
  for (bool const in_order : {true, false}) {
    nn::Sequential whole{prepared(PowerNorm{PowerNormOptions{2}.warmup_iters(0)})};
    steps(whole, x, u, in_order, [] {});
    auto const ema_gz = whole[0]->as<PowerNorm>()->ema_gz(), running_phi = whole[0]->as<PowerNorm>()->running_phi();
    for (int const kind : {0, 1, 2, 3})
      run_ranks(2, [&](thread_communicator const& comm) {
        auto const own = [&](Tensor const& of) { return of.slice(1, 2 * comm.rank(), 2 * comm.rank() + 2); };
        nn::Sequential net{prepared(SyncPowerNorm{PowerNormOptions{2}.warmup_iters(0), comm})};
        steps(net, own(x), own(u), in_order, [&] {
          if (kind == 1) net[0]->as<SyncPowerNorm>()->set_communicator(comm);
          if (kind == 2) convert_sync_powernorm(net, comm);
          if (kind == 3) convert_sync_powernorm(revert_sync_powernorm(net), comm);
        });
        auto& norm = *net[0]->as<SyncPowerNorm>();
        CAPTURE(kind);
        CHECK(error_of(norm.ema_gz(), ema_gz) <= 1e-12);
        CHECK(error_of(norm.running_phi(), running_phi) <= 1e-12);
        CHECK(norm.iters() == 4);
      });
  }
}

TEST_CASE("every rank has its part in the backward pass, whatever gradients it needs") {
  torch::manual_seed(8);
  auto const x = random({3, 4, 2});
  auto reference = prepared(PowerNorm{PowerNormOptions{2}.warmup_iters(1)});
  for (int step = 0; step < 3; ++step) train_step(reference, x);
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = prepared(SyncPowerNorm{PowerNormOptions{2}.warmup_iters(1), comm});
    auto const own = x.slice(1, 2 * comm.rank(), 2 * comm.rank() + 2);
    if (comm.rank() == 1) {
      norm->weight.set_requires_grad(false);
      norm->bias.set_requires_grad(false);
    }
    for (int step = 0; step < 3; ++step) {
      auto const input = own.clone().set_requires_grad(comm.rank() == 0);
      auto const y = norm->forward(input);
      CHECK(y.requires_grad());
      y.pow(2).sum().backward();
    }
    CHECK(error_of(norm->ema_gz(), reference->ema_gz()) <= 1e-12);
    CHECK(norm->weight.grad().defined() == (comm.rank() == 0));
  });
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = prepared(SyncPowerNorm{PowerNormOptions{2}, comm});
    at::AutoGradMode const recording{comm.rank() == 0};
    auto const text = message_of<mismatch_error>([&] { norm->forward(x); });
    CHECK_MESSAGE(contains(text, "whether a backward pass can follow"), text);
  });
}

TEST_CASE("graphs: freed, of inputs that changed, differentiated twice, outliving their module") {
  torch::manual_seed(9);
  auto const x = random({3, 2, 2});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = prepared(SyncPowerNorm{PowerNormOptions{2}.warmup_iters(0), comm});
    train_step(norm, x);
    auto own = x.clone().requires_grad_();
    auto const y = norm->forward(own);
    y.sum().backward();
    norm->synchronize();
    auto const ema = norm->ema_gz().clone();

    // On one rank the input is written to after the pass: all ranks hear of it, and can go on.
    auto changed = own.detach() + 0;
    auto const z = norm->forward(changed);
    norm->zero_grad();
    if (comm.rank() == 1) changed.add_(1);
    auto const text = message_of<invalid_argument_error>([&] {
      z.sum().backward();
      norm->synchronize();
    });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);
    CHECK(torch::equal(norm->ema_gz(), ema));

    auto const gradient =
        torch::autograd::grad({norm->forward(own).pow(2).sum()}, {own}, {}, true, /*create_graph=*/true);
    CHECK(contains(message_of<syncnorm::error>([&] { gradient[0].pow(2).sum().backward(); }), "double backward"));

    auto last = norm->forward(own);
    auto const state = norm->named_buffers()["ema_gz"];
    norm->synchronize();
    auto const before = state.clone();
    norm = SyncPowerNorm{nullptr};
    last.sum().backward();
    last = Tensor{};
    CHECK(torch::equal(state, before)); // nobody asked for the rest
  });
}

TEST_CASE("modules print what they are") {
  std::ostringstream text;
  text << SyncPowerNorm{PowerNormOptions{4}.group_num(2)} << " " << GroupScaling1D{2};
  CHECK(text.str() ==
        "syncnorm::torch::SyncPowerNorm(4, eps=1e-05, alpha_fwd=0.9, alpha_bkw=0.9, affine=true, warmup_iters=10000, "
        "group_num=2, corrected=false, ranks=1) syncnorm::torch::GroupScaling1D(2, eps=1e-05)");
  nn::Sequential model{PowerNorm{PowerNormOptions{3}.affine(false)}};
  CHECK((model->forward(torch::ones({2, 3})).sizes() == at::IntArrayRef{2, 3}));
  CHECK(model->parameters().empty());
}
