#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/batch_norm_group.hpp>
#include <syncnorm/torch/micro_batches.hpp>

#include <comm/counted.hpp>

using namespace test;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using syncnorm::torch::begin_group_forward;
using syncnorm::torch::group_forward;
using syncnorm::torch::norm_epilogue;

namespace {

/// Samples of each rank.
std::vector<std::vector<std::int64_t>> const spreads{{5}, {3, 2}, {4, 0, 1}};

/// Batch norms of one step over a whole batch: the inputs, gradients of the outputs, and what libtorch makes of them.
struct whole_step {
  std::vector<Tensor> x, dy, y;
  std::vector<torch::nn::BatchNorm2d> norms;

  explicit whole_step(std::vector<std::int64_t> const& channels, torch::Dtype type) {
    for (auto const c : channels) {
      x.push_back((random({5, c, 2, 2}) + 3).to(type));
      dy.push_back(random({5, c, 2, 2}).to(type));
      auto& norm = norms.emplace_back(BatchNormOptions{c});
      norm->to(torch::kDouble);
      auto const like = make_norm(BatchNormOptions{c}); // of the same parameters and running statistics
      torch::NoGradGuard const no_recording;
      auto const from = state_of(*like), to = [&] {
        auto all = norm->parameters();
        for (auto const& each : norm->buffers()) all.push_back(each);
        return all;
      }();
      for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
      x.back() = x.back().to(torch::kDouble).detach().requires_grad_();
    }
    for (std::size_t l = 0; l < channels.size(); ++l) {
      y.push_back(norms[l]->forward(x[l]));
      y[l].backward(dy[l].to(torch::kDouble));
    }
  }
};

} // namespace

TEST_CASE("two phases and groups are torch::nn::BatchNorm over the whole batch") {
  torch::manual_seed(51);
  std::vector<std::int64_t> const channels{3, 150, 1};
  for (auto const type : {torch::kFloat, torch::kDouble}) {
    whole_step const whole{channels, type};
    for (auto const& spread : spreads)
      for (bool const grouped : {false, true})
        run_ranks(static_cast<int>(spread.size()), [&](thread_communicator const& comm) {
          INFO("ranks ", spread.size(), ", rank ", comm.rank(), ", grouped ", grouped);
          auto const tolerance = tolerance_of(type);
          std::vector<SyncBatchNorm> norms;
          std::vector<Tensor> x, dy, y;
          for (std::size_t l = 0; l < channels.size(); ++l) {
            norms.push_back(make_norm(BatchNormOptions{channels[l]}, comm, type));
            x.push_back(part_of(whole.x[l].detach().to(type), spread, comm.rank()).requires_grad_());
            dy.push_back(part_of(whole.dy[l], spread, comm.rank()));
          }
          if (grouped) {
            y = group_forward({{norms[0], x[0]}, {norms[1], x[1]}, {norms[2], x[2]}});
          } else {
            auto first = norms[0]->begin_forward(x[0]), second = norms[1]->begin_forward(x[1]);
            auto const third = norms[2]->forward(x[2]);
            y.resize(2);
            bool const odd = comm.rank() % 2 == 1; // in an order of its own
            y[odd ? 1 : 0] = (odd ? second : first).finish();
            y[odd ? 0 : 1] = (odd ? first : second).finish();
            CHECK(first.ready());
            y.push_back(third);
          }
          torch::autograd::backward(y, dy);
          for (std::size_t l = 0; l < channels.size(); ++l) {
            auto const own = [&](Tensor const& of) { return part_of(of, spread, comm.rank()); };
            CHECK(error_of(y[l], own(whole.y[l]), scale_of(whole.y[l])) <= tolerance);
            CHECK(error_of(x[l].grad(), own(whole.x[l].grad()), scale_of(whole.x[l].grad())) <= tolerance);
            CHECK(error_of(sum_of_ranks(comm, norms[l]->weight.grad()), whole.norms[l]->weight.grad()) <= tolerance);
            CHECK(error_of(sum_of_ranks(comm, norms[l]->bias.grad()), whole.norms[l]->bias.grad()) <= tolerance);
            CHECK(error_of(norms[l]->running_mean, whole.norms[l]->running_mean) <= tolerance);
            CHECK(error_of(norms[l]->running_var, whole.norms[l]->running_var) <= tolerance);
            CHECK(norms[l]->num_batches_tracked.item<std::int64_t>() == 1);
          }
        });
  }
}

TEST_CASE("two phases and groups give the bits of forward in every mode of a module") {
  torch::manual_seed(52);
  struct mode {
    char const* name;
    torch::Dtype type;
    std::function<void(SyncBatchNorm&)> set;
    norm_epilogue with{};
  };
  auto const nothing = [](SyncBatchNorm&) {};
  norm_epilogue const epilogue{.activation = syncnorm::activation::leaky_relu(0.1),
                               .residual = random({3, 4, 2}),
                               .mask = torch::tensor({1, 0, 1, 1, 0, 1}).view({3, 2}).to(torch::kBool),
                               .masked = syncnorm::masked_outputs::zero};
  std::vector<mode> const modes{
      {"training", torch::kDouble, nothing},
      {"epilogue", torch::kDouble, nothing, epilogue},
      {"halves", torch::kHalf, nothing},
      {"evaluation", torch::kDouble, [](SyncBatchNorm& norm) { norm->eval(); }},
      {"frozen", torch::kFloat, [](SyncBatchNorm& norm) { norm->freeze_statistics(); }},
      {"cumulative", torch::kFloat, [](SyncBatchNorm& norm) { norm->options.momentum(c10::nullopt); }},
      {"reduced", torch::kFloat,
       [](SyncBatchNorm& norm) { norm->set_exchange_policy(syncnorm::exchange_policy::reduce); }},
  };
  for (auto const& [name, type, set, with] : modes)
    run_ranks(2, [&, n = name, t = type, s = set, w = with](thread_communicator const& comm) {
      auto const x = random({3, 4, 2}).to(t) + comm.rank(), dy = random({3, 4, 2}).to(t);
      auto const other = random({2, 5, 3});
      // Twice two steps of a module, by itself, in two phases, and in a group behind another module.
      std::vector<std::vector<Tensor>> results;
      for (int const way : {0, 1, 2}) {
        auto norm = make_norm(BatchNormOptions{4}, comm, t);
        auto beside = make_norm(BatchNormOptions{5}, comm);
        s(norm);
        auto& all = results.emplace_back();
        for (int step = 0; step < 2; ++step) {
          auto const input = x.clone().requires_grad_();
          norm->zero_grad();
          Tensor y;
          if (way == 0) y = norm->forward_with(input, w);
          if (way == 1) y = norm->begin_forward(input, w).finish();
          if (way == 2) y = group_forward({{beside, other}, {norm, input, w}})[1];
          all.push_back(y.detach().clone());
          y.backward(dy);
          for (auto const& tensor : {input.grad(), norm->weight.grad(), norm->bias.grad()})
            all.push_back(tensor.detach().clone());
        }
        for (auto const& tensor : state_of(*norm)) all.push_back(tensor);
      }
      CHECK_MESSAGE(same_state(results[0], results[1]), n);
      CHECK_MESSAGE(same_state(results[0], results[2]), n);
    });
}

TEST_CASE("a group of modules is one collective forward and one backward") {
  run_ranks(2, [](thread_communicator const& comm) {
    int calls = 0;
    syncnorm::any_communicator const counting{contract::counted{comm, calls}};
    auto a = make_norm(BatchNormOptions{200}, counting), b = make_norm(BatchNormOptions{3}, counting);
    std::vector<int> counts;
    for (int step = 0; step < 2; ++step) {
      auto const y =
          group_forward({{a, random({2, 200}).requires_grad_()}, {b, random({2, 3})}, {a, random({2, 200})}});
      counts.push_back(std::exchange(calls, 0));
      (y[0].pow(3).sum() + y[1].pow(2).sum()).backward(); // not of all outputs
      counts.push_back(std::exchange(calls, 0));
    }
    CHECK(counts == std::vector{2, 1, 1, 1});                // at first the ranks agree on the channels
    CHECK(a->num_batches_tracked.item<std::int64_t>() == 4); // twice in each group
  });
}

TEST_CASE("every rank joins a group's backward pass, whatever gradients it needs") {
  torch::manual_seed(53);
  auto const x = random({4, 3}), u = random({4, 2});
  auto const run = [&](thread_communicator const& comm, bool grouped) {
    auto a = make_norm(BatchNormOptions{3}.affine(false), comm), b = make_norm(BatchNormOptions{2}.affine(false), comm);
    // Rank 0 needs a gradient of the first, rank 1 of the second, and rank 2 of none.
    auto const own_x = (x + comm.rank()).set_requires_grad(comm.rank() == 0);
    auto const own_u = (u * (1 + comm.rank())).set_requires_grad(comm.rank() == 1);
    std::vector<Tensor> y;
    if (grouped)
      y = group_forward({{a, own_x}, {b, own_u}});
    else
      y = {a->forward(own_x), b->forward(own_u)};
    (y[0].pow(3).sum() + y[1].pow(3).sum()).backward();
    CHECK(own_x.grad().defined() == (comm.rank() == 0));
    CHECK(own_u.grad().defined() == (comm.rank() == 1));
    return comm.rank() == 0 ? own_x.grad() : own_u.grad();
  };
  run_ranks(3, [&](thread_communicator const& comm) {
    auto const expected = run(comm, false), got = run(comm, true);
    if (comm.rank() < 2) CHECK(torch::equal(got, expected));
  });
}

TEST_CASE("passes in two phases are recorded where some rank needs gradients, and only there") {
  for (int const needing : {-1, 0, 1})
    run_ranks(2, [&](thread_communicator const& comm) {
      auto norm = make_norm(BatchNormOptions{3}.affine(false), comm);
      auto first = norm->begin_forward(random({4, 3}).set_requires_grad(comm.rank() == needing));
      auto second = begin_group_forward({{norm, random({4, 3}).set_requires_grad(comm.rank() == needing)}});
      auto const y = first.finish(), z = second.finish()[0];
      CHECK(y.requires_grad() == (needing >= 0));
      CHECK(z.requires_grad() == (needing >= 0));
      if (needing >= 0) (y.pow(3).sum() + z.pow(3).sum()).backward();
    });
}

TEST_CASE("a gradient penalty through a group is that of its modules by themselves") {
  torch::manual_seed(54);
  auto const x = random({4, 3}), u = random({4, 2});
  run_ranks(2, [&](thread_communicator const& comm) {
    std::vector<std::vector<Tensor>> results;
    for (bool const grouped : {false, true}) {
      auto a = make_norm(BatchNormOptions{3}, comm), b = make_norm(BatchNormOptions{2}, comm);
      auto const own_x = (x + comm.rank()).requires_grad_(), own_u = (u * (1 + comm.rank())).requires_grad_();
      std::vector<Tensor> y;
      if (grouped)
        y = group_forward({{a, own_x}, {b, own_u}});
      else
        y = {a->forward(own_x), b->forward(own_u)};
      auto const loss = y[0].pow(3).sum() + y[1].pow(3).sum();
      auto const slopes = torch::autograd::grad({loss}, {own_x, own_u}, {}, true, /*create_graph=*/true);
      (loss + slopes[0].pow(2).sum() + slopes[1].pow(2).sum()).backward();
      results.push_back({own_x.grad(), own_u.grad(), a->weight.grad(), b->weight.grad()});
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) CHECK(error_of(results[1][i], results[0][i]) <= 1e-13);
  });
}

TEST_CASE("two phases and groups: what is wrong on one rank is thrown on every rank, and changes nothing") {
  for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
    run_ranks(3, [&](thread_communicator const& comm) {
      auto a = make_norm(BatchNormOptions{3}, comm), b = make_norm(BatchNormOptions{2}, comm);
      auto frozen = make_norm(BatchNormOptions{4}, comm);
      frozen->freeze_statistics();
      for (auto const& norm : {a, b, frozen}) norm.ptr()->set_exchange_policy(policy);
      auto const before_a = state_of(*a), before_b = state_of(*b);
      auto const good = random({2, 3}).requires_grad_();
      auto const bad = [&](int rank, Tensor const& wrong) { return comm.rank() == rank ? wrong : good; };
      for (int repeat = 0; repeat < 2; ++repeat) {
        auto pending = a->begin_forward(bad(1, random({2, 4})));
        auto text = message_of<syncnorm::invalid_argument_error>([&] { (void)pending.finish(); });
        CHECK_MESSAGE((contains(text, "rank 1: x has 4 channels") && !contains(text, "rank 0")), text);
        text = message_of<syncnorm::invalid_argument_error>([&] { (void)pending.finish(); });
        CHECK_MESSAGE(contains(text, "finished already"), text);
        text = message_of<syncnorm::invalid_argument_error>([&] {
          group_forward({{b, random({2, 2})}, {a, bad(2, torch::ones({2, 3}, torch::kInt))}});
        });
        CHECK_MESSAGE(contains(text, "of layer 1: rank 2: the input is of Int"), text);
        // Of a module that by itself would not tell anyone.
        text = message_of<syncnorm::invalid_argument_error>([&] {
          group_forward({{b, random({2, 2})}, {frozen, random({2, comm.rank() == 0 ? 5 : 4})}});
        });
        CHECK_MESSAGE(contains(text, "of layer 1: rank 0: x has 5 channels"), text);
        CHECK(same_state(before_a, state_of(*a)));
        CHECK(same_state(before_b, state_of(*b)));
      }
      auto const y = group_forward({{a, good}, {b, random({2, 2}).requires_grad_()}});
      auto changed = good.detach();
      if (comm.rank() == 1) changed.add_(1); // after it was saved
      auto const text = message_of<syncnorm::invalid_argument_error>([&] { (y[0].sum() + y[1].sum()).backward(); });
      CHECK_MESSAGE((contains(text, "rank 1: ") && contains(text, "modified by an inplace operation")), text);
      CHECK_FALSE(a->weight.grad().defined());
    });
  auto const text = message_of<syncnorm::invalid_argument_error>([] { group_forward({}); });
  CHECK_MESSAGE(contains(text, "empty"), text);
  run_ranks(2, [](thread_communicator const& comm) {
    auto a = make_norm(BatchNormOptions{3}, comm), alone = make_norm(BatchNormOptions{3});
    auto const other = message_of<syncnorm::invalid_argument_error>([&] {
      group_forward({{a, random({2, 3})}, {alone, random({2, 3})}});
    });
    CHECK_MESSAGE(contains(other, "the module is on rank 0 of 1, the first of the group on rank"), other);
  });
}

TEST_CASE("what autograd cannot record on one rank is thrown on every rank, and changes nothing") {
  auto const good = random({4, 3}), inference = inference_copy(good);
  dual_tensor const dual{random({4, 3})};
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm), other = make_norm(BatchNormOptions{3}, comm);
    auto const before = state_of(*norm);
    auto const refused = [&](std::string const& expected, auto const& pass) {
      auto const text = message_of<syncnorm::invalid_argument_error>(pass);
      CHECK_MESSAGE((contains(text, "rank 1: ") && contains(text, expected)), text);
      CHECK(same_state(before, state_of(*norm)));
    };
    auto const refused_everywhere = [&](std::string const& what, Tensor const& bad) {
      auto const x = comm.rank() == 1 ? bad : good;
      refused("the input " + what, [&] { norm->forward(x); });
      refused("the residual " + what, [&] { norm->forward_with(good, {.residual = x}); });
      refused("the input " + what, [&] { (void)norm->begin_forward(x).finish(); });
      refused("the input " + what, [&] { group_forward({{other, good}, {norm, x}}); });
      refused("micro-batch 1: the input " + what, [&] { (void)syncnorm::torch::forward_batches(norm, {good, x}); });
    };
    refused_everywhere("is an inference tensor", inference);
    refused_everywhere("has a forward gradient", dual.get());
    {
      torch::NoGradGuard const no_recording;
      refused("has a forward gradient", [&] { norm->forward(comm.rank() == 1 ? dual.get() : good); });
      norm->set_in_place();
      CHECK(norm->is_in_place());
      refused("the input is an inference tensor", [&] { norm->forward(comm.rank() == 1 ? inference : good.clone()); });
      norm->set_in_place(false);
    }
    auto const weight = norm->weight;
    if (comm.rank() == 1) {
      c10::InferenceMode const inference_mode;
      norm->weight = weight.detach().clone().set_requires_grad(true);
    }
    refused("weight is an inference tensor", [&] { norm->forward(good); });
    norm->weight = weight;

    // A view of one of several outputs whose base is written to afterwards.
    auto const stale_view = [&] {
      auto const base = random({2, 4, 3}).requires_grad_() * 1;
      auto const part = base.unbind()[0];
      base.mul_(2);
      return part;
    };
    std::string const stale = "is a view and its base or another view of its base has been modified";
    auto const view = comm.rank() == 1 ? stale_view() : good;
    refused(stale, [&] { norm->forward(view); });
    refused(stale, [&] { norm->forward_with(good, {.residual = view}); });
    refused(stale, [&] { (void)norm->begin_forward(view).finish(); });

    // Gradients of outputs.
    auto const given = [&](Tensor const& bad, bool create_graph) {
      auto const x = good.clone().requires_grad_();
      torch::autograd::grad({norm->forward(x)}, {x}, {comm.rank() == 1 ? bad : good}, create_graph, create_graph);
    };
    auto const thrown = [&](Tensor const& bad, bool create_graph) {
      return message_of<syncnorm::invalid_argument_error>([&] { given(bad, create_graph); });
    };
    auto text = thrown(inference, true);
    CHECK_MESSAGE(contains(text, "rank 1: the gradient of an output is an inference tensor"), text);
    given(inference, false);
    text = thrown(stale_view(), true);
    CHECK_MESSAGE((contains(text, "rank 1: ") && contains(text, stale)), text);
    text = thrown(good.to_sparse(), false);
    CHECK_MESSAGE(contains(text, "rank 1: the gradient of an output is Sparse, expected Strided"), text);
    text = thrown(dual.get(), false);
    CHECK_MESSAGE(contains(text, "rank 1: the gradient of an output has a forward gradient"), text);
  });
}

TEST_CASE("inference tensors where nothing is recorded, or other ranks alone need gradients") {
  auto const x = random({4, 3});
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}.affine(false), comm);
    auto const run = [&](bool inference) {
      auto own = comm.rank() == 0 ? x.clone().requires_grad_() : inference ? inference_copy(x + 1) : x + 1;
      auto const y = norm->forward(own), z = norm->begin_forward(own).finish();
      auto const u = group_forward({{norm, own}})[0], v = syncnorm::torch::forward_batches(norm, {own})[0];
      (y.pow(3).sum() + z.pow(3).sum() + u.pow(3).sum() + v.pow(3).sum()).backward();
      return comm.rank() == 0 ? own.grad() : y.detach();
    };
    CHECK(torch::equal(run(true), run(false)));
  });
  run_ranks(2, [&](thread_communicator const& comm) {
    auto const make = [&] { return make_norm(BatchNormOptions{3}, comm); };
    auto expected = make();
    SyncBatchNorm norm{nullptr};
    if (comm.rank() == 1) {
      c10::InferenceMode const inference;
      norm = make();
    } else {
      norm = make();
    }
    torch::NoGradGuard const no_recording;
    for (auto& each : {expected, norm}) {
      auto of = each;
      of->forward(x);
      (void)of->begin_forward(x).finish();
      (void)syncnorm::torch::forward_batches(of, {x});
    }
    CHECK(same_state(state_of(*norm), state_of(*expected)));
    CHECK(norm->num_batches_tracked.item<std::int64_t>() == 3);
  });
}

TEST_CASE("a rank that drops a pending pass stays in step, and as it was") {
  torch::manual_seed(55);
  auto const x = random({4, 150});
  std::vector<Tensor> expected;
  for (int const drops : {0, 1, 2})
    run_ranks(2, [&](thread_communicator const& comm) {
      torch::NoGradGuard const no_recording; // whoever drops a pass has no part in its backward pass
      auto a = make_norm(BatchNormOptions{150}, comm), b = make_norm(BatchNormOptions{150}, comm);
      auto const before = state_of(*a);
      {
        auto pending = a->begin_forward(x);
        auto group = begin_group_forward({{b, x}, {a, x}});
        std::optional<syncnorm::torch::pending_forward> moved{std::move(pending)};
        CHECK(pending.ready()); // NOLINT(bugprone-use-after-move): it says so
        CHECK_THROWS_AS((void)pending.finish(), syncnorm::invalid_argument_error);
        if (comm.rank() == 0 && drops == 1) moved.reset();
        auto written = x.clone();
        auto late = b->begin_forward(written);
        if (comm.rank() == 0 && drops == 2) {
          written.add_(1);
          auto const text = message_of<syncnorm::invalid_argument_error>([&] { (void)late.finish(); });
          CHECK_MESSAGE(contains(text, "written to"), text);
        }
        if (comm.rank() == 1) (void)moved->finish(), (void)group.finish(), (void)late.finish();
      }
      CHECK(same_state(before, state_of(*a)) == (comm.rank() == 0));
      auto const y = a->forward(x + comm.rank());
      if (comm.rank() == 0 && drops == 0) expected.push_back(y);
      if (comm.rank() == 0) CHECK(torch::equal(y, expected[0]));
    });
}
