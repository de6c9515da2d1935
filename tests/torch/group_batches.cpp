#include <algorithm>
#include <cstddef>
#include <cstdint>
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
using syncnorm::torch::norm_epilogue;

TEST_CASE("a group over micro-batches gives the bits of each module's by themselves, in one collective each way") {
  torch::manual_seed(56);
  // Samples of each micro-batch of each rank, for the first module; the second one takes one less, but at least one.
  for (auto const& shares :
       std::vector<std::vector<std::vector<std::int64_t>>>{{{2, 3, 1}}, {{2, 1}, {3}}, {{0}, {1, 2}, {0, 4, 2}}})
    for (bool const in_place : {false, true})
      run_ranks(static_cast<int>(shares.size()), [&](thread_communicator const& comm) {
        INFO("in place ", in_place, ", rank ", comm.rank(), " of ", comm.size());
        int calls = 0;
        syncnorm::any_communicator const counting{contract::counted{comm, calls}};
        auto const& share = shares[static_cast<std::size_t>(comm.rank())];
        enum class timing { by_themselves, at_once, begun };
        std::vector<std::vector<Tensor>> results;
        std::vector<Tensor> sums;
        torch::manual_seed(57 + static_cast<std::uint64_t>(comm.rank()));
        auto const x = random({6, 3, 2, 2}), u = random({6, 150, 2}), residual = random({6, 3, 2, 2});
        auto const mask = torch::rand({6, 2, 2}) < 0.7;
        for (auto const how : {timing::by_themselves, timing::at_once, timing::begun}) {
          auto a = make_norm(BatchNormOptions{3}, counting), b = make_norm(BatchNormOptions{150}, counting),
               frozen = make_norm(BatchNormOptions{3}, counting);
          frozen->freeze_statistics();
          for (auto const& norm : {a, b, frozen}) norm.ptr()->set_in_place(in_place);
          auto& all = results.emplace_back();
          for (int step = 0; step < 2; ++step) {
            std::vector<Tensor> leaves;
            auto const inputs = [&](Tensor const& of, std::size_t count) {
              std::vector<Tensor> made;
              for (std::size_t k = 0; k < count; ++k) {
                leaves.push_back((of.slice(0, 0, share[k]) + static_cast<int>(k)).requires_grad_());
                made.push_back(leaves.back() * 1);
              }
              return made;
            };
            auto const of_a = inputs(x, share.size()), of_frozen = inputs(x, share.size()),
                       of_b = inputs(u, std::max<std::size_t>(share.size() - 1, 1));
            std::vector<norm_epilogue> with;
            for (std::size_t k = 0; k < share.size(); ++k)
              with.push_back({syncnorm::activation::leaky_relu(k == 1 ? 0 : 0.5),
                              k == 0 ? residual.slice(0, 0, share[k]).clone().requires_grad_() : Tensor{},
                              k == 2 ? Tensor{} : mask.slice(0, 0, share[k])});
            leaves.push_back(with[0].residual);
            calls = 0;
            std::vector<std::vector<Tensor>> y;
            std::vector<syncnorm::torch::group_batches> const members{
                {a, of_a, with}, {b, of_b}, {frozen, of_frozen, with}};
            if (how == timing::by_themselves)
              for (auto member : members)
                y.push_back(syncnorm::torch::forward_batches(member.norm, member.inputs, member.epilogues));
            else if (how == timing::at_once)
              y = syncnorm::torch::group_forward_batches(members);
            else {
              auto pending = syncnorm::torch::begin_group_forward_batches(members);
              y = pending.finish();
              CHECK(pending.ready());
            }
            if (how != timing::by_themselves && step == 1) CHECK(std::exchange(calls, 0) == (comm.size() > 1 ? 1 : 0));
            auto loss = torch::zeros({}, torch::kDouble);
            for (std::size_t l = 0; l < members.size(); ++l) {
              REQUIRE(y[l].size() == members[l].inputs.size());
              for (std::size_t k = 0; k < y[l].size(); ++k) {
                CHECK(y[l][k].is_same(members[l].inputs[k]) == in_place);
                all.push_back(y[l][k].detach().clone());
                loss = loss + y[l][k].pow(3).sum();
              }
            }
            loss.backward();
            if (how != timing::by_themselves && step == 1) CHECK(calls == (comm.size() > 1 ? 1 : 0));
            for (auto const& leaf : leaves) all.push_back(leaf.grad());
          }
          for (auto const& norm : {a, b, frozen})
            for (auto const& tensor : state_of(*norm)) all.push_back(tensor);
          for (auto const& norm : {a, b})
            for (auto const& parameter : norm.ptr()->parameters()) all.push_back(parameter.grad());
          // By itself, the frozen module has a pass for each micro-batch, whose gradients libtorch adds up.
          for (auto const& parameter : frozen->parameters()) sums.push_back(parameter.grad());
        }
        CHECK(same_state(results[0], results[1]));
        CHECK(same_state(results[0], results[2]));
        for (std::size_t i = 2; i < sums.size(); ++i) CHECK(error_of(sums[i], sums[i % 2]) <= 1e-13);
      });
}

TEST_CASE("a gradient penalty through a group over micro-batches is that of each module's by themselves") {
  torch::manual_seed(58);
  auto const x = random({5, 3}), u = random({4, 2});
  run_ranks(2, [&](thread_communicator const& comm) {
    std::vector<std::vector<Tensor>> results;
    for (bool const grouped : {false, true}) {
      auto a = make_norm(BatchNormOptions{3}, comm), b = make_norm(BatchNormOptions{2}, comm);
      auto const own_x = (x + comm.rank()).requires_grad_(), own_u = (u * (1 + comm.rank())).requires_grad_();
      std::vector<Tensor> const of_a{own_x.slice(0, 0, 2), own_x.slice(0, 2)}, of_b{own_u};
      std::vector<norm_epilogue> const with{{syncnorm::activation::leaky_relu(0.5)}, {}};
      auto const y = grouped ? syncnorm::torch::group_forward_batches({{a, of_a, with}, {b, of_b}})
                             : std::vector{syncnorm::torch::forward_batches(a, of_a, with),
                                           syncnorm::torch::forward_batches(b, of_b)};
      auto const loss = y[0][0].pow(3).sum() + y[0][1].pow(3).sum() + y[1][0].pow(3).sum();
      auto const slopes = torch::autograd::grad({loss}, {own_x, own_u}, {}, true, /*create_graph=*/true);
      (loss + slopes[0].pow(2).sum() + slopes[1].pow(2).sum()).backward();
      results.push_back({own_x.grad(), own_u.grad(), a->weight.grad(), b->weight.grad()});
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) CHECK(error_of(results[1][i], results[0][i]) <= 1e-13);
  });
}

TEST_CASE("a group over micro-batches: what is wrong on one rank is thrown on every rank, and changes nothing") {
  run_ranks(3, [](thread_communicator const& comm) {
    auto a = make_norm(BatchNormOptions{3}, comm), b = make_norm(BatchNormOptions{2}, comm),
         untracked = make_norm(BatchNormOptions{2}.track_running_stats(false), comm);
    untracked->eval();
    a->set_in_place();
    auto const before_a = state_of(*a), before_b = state_of(*b);
    auto const leaf = random({2, 3}).requires_grad_();
    auto const x = leaf * 1, v = leaf * 2, u = random({2, 2});
    bool const here = comm.rank() == 2;
    auto const refused = [&](std::string const& what, std::vector<syncnorm::torch::group_batches> const& members) {
      for (bool const begun : {false, true}) {
        auto const text = message_of<syncnorm::invalid_argument_error>([&] {
          begun ? (void)syncnorm::torch::begin_group_forward_batches(members).finish()
                : (void)syncnorm::torch::group_forward_batches(members);
        });
        CHECK_MESSAGE(contains(text, "rank 2: " + what), text);
        CHECK((same_state(before_a, state_of(*a)) && same_state(before_b, state_of(*b))));
        CHECK((torch::equal(x, leaf) && torch::equal(v, leaf * 2)));
      }
    };
    using tensors = std::vector<Tensor>;
    using epilogues = std::vector<norm_epilogue>;
    refused("there are no micro-batches", {{b, {u}}, {a, here ? tensors{} : tensors{x}}});
    refused("there are 1 epilogues, expected 2 as micro-batches", {{b, {u}}, {a, {x, v}, epilogues(here ? 1 : 2)}});
    refused("x[1] has 3 channels, expected 2", {{a, {x}}, {b, {u, here ? random({2, 3}) : u}}});
    refused("micro-batch 1: the input is of Float", {{a, {x}}, {b, {u, here ? u.to(torch::kFloat) : u}}});
    refused("a pass in place writes to memory that another micro-batch reads", {{b, {u}}, {a, {x, here ? x : v}}});
    auto other = make_norm(BatchNormOptions{3}, comm);
    refused("a pass in place writes to memory that another pass of the group reads",
            {{other, {leaf, here ? v : leaf}}, {a, {x, v}}});
    refused("a leaf Variable that requires grad", {{a, {x, here ? leaf : v}}, {b, {u}}});
    refused("Output 0 of UnbindBackward0 is a view and is being modified inplace",
            {{a, {x, here ? v.unsqueeze(0).unbind()[0] : v}}});
    refused("micro-batches in evaluation without running statistics",
            {{b, {u}}, {untracked, here ? tensors{u, u} : tensors{u}}});
  });
  auto const text = message_of<syncnorm::invalid_argument_error>([] { syncnorm::torch::group_forward_batches({}); });
  CHECK_MESSAGE(contains(text, "empty"), text);
}
