#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>

#include <ops/pending_cases.hpp>
#include <support/exchange_costs.hpp>
#include <support/message_of.hpp>
#include <support/oracle.hpp>

using syncnorm::exchange_cost;
using syncnorm::exchange_policy;
using syncnorm::thread_communicator;
using syncnorm::detail::cheaper_policy;
using syncnorm::detail::merge_rule;

namespace {

/// A rank of a thread group that claims some cost, and counts its collectives.
class priced_communicator {
public:
  struct calls {
    int gathers = 0, reductions = 0;
    friend bool operator==(calls const&, calls const&) = default;
  };

  priced_communicator(thread_communicator comm, exchange_cost cost, calls& counted)
      : comm_{std::move(comm)}, cost_{cost}, calls_{&counted} {}

  [[nodiscard]] int rank() const { return comm_.rank(); }
  [[nodiscard]] int size() const { return comm_.size(); }
  [[nodiscard]] exchange_cost cost_of_exchange() const { return cost_; }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    ++calls_->gathers;
    comm_.allgather(in, out);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op) const {
    ++calls_->reductions;
    comm_.allreduce(in, out, op);
  }

private:
  thread_communicator comm_;
  exchange_cost cost_;
  calls* calls_;
};

/// The fewest channels, among powers of two, for which a pass reduces.
std::int64_t crossover(exchange_cost const& cost, int ranks, merge_rule rule) {
  std::int64_t channels = 1;
  while (channels < 1 << 20 && cheaper_policy(cost, ranks, rule, channels, 2, 1) == exchange_policy::gather)
    channels *= 2;
  return channels;
}

} // namespace

TEST_CASE("the cost model is that of its documentation") {
  CHECK(syncnorm::tree_depth(1) == 0);
  CHECK(syncnorm::tree_depth(2) == 1);
  CHECK(syncnorm::tree_depth(7) == 3);
  CHECK(syncnorm::tree_depth(8) == 3);
  CHECK(syncnorm::tree_depth(16384) == 14);
  exchange_cost const cost{.latency = 1e-5, .bandwidth = 1e9, .handling = 0};
  CHECK(syncnorm::seconds_of_gather(cost, 5, 1000) == doctest::Approx(3e-5 + 4e-6));
  CHECK(syncnorm::seconds_of_reduce(cost, 5, 1000) == doctest::Approx(6e-5 + 1.6e-6));
  // The table of crossovers in include/syncnorm/README.md.
  struct row {
    int ranks;
    std::array<std::int64_t, 6> channels; // forward and backward: by default, over MPI, over Gloo
  };
  std::vector<row> const table{{2, {131072, 65536, 32768, 8192, 524288, 131072}},
                               {4, {16384, 8192, 2048, 1024, 8192, 4096}},
                               {8, {8192, 4096, 1024, 512, 4096, 1024}},
                               {16, {4096, 2048, 512, 256, 2048, 1024}},
                               {64, {2048, 512, 256, 64, 1024, 256}},
                               {256, {512, 128, 64, 1, 256, 64}},
                               {1024, {128, 32, 1, 1, 64, 2}},
                               {4096, {32, 1, 1, 1, 1, 1}},
                               {16384, {1, 1, 1, 1, 1, 1}}};
  for (auto const& each : table) {
    std::array<std::int64_t, 6> got{};
    for (std::size_t i = 0; auto const& of : {exchange_cost{}, test::mpi_cost, test::gloo_cost})
      for (auto const rule : {merge_rule::moments, merge_rule::sums}) got[i++] = crossover(of, each.ranks, rule);
    CHECK_MESSAGE(got == each.channels, each.ranks << " ranks");
  }
  // An allreduce that moves as much as an allgather is never chosen.
  CHECK(crossover({.reduction_scales = false}, 16384, merge_rule::sums) == 1 << 20);
}

TEST_CASE("the model chooses for each pass, unless the user does") {
  exchange_cost const distant{.latency = 1, .bandwidth = 1e9}, narrow{.latency = 1e-9, .bandwidth = 1e3};
  auto const run = [](exchange_cost const& cost, exchange_policy policy) {
    std::array<priced_communicator::calls, 2> counted;
    syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
      std::array<priced_communicator::calls, 2> own;
      for (std::size_t direction = 0; direction < 2; ++direction) {
        // Through the type-erased communicator, which passes the cost on.
        syncnorm::any_communicator const any{priced_communicator{comm, cost, own[direction]}};
        test::layer_data<float, syncnorm::any_communicator> data{any, 40, policy};
        data.step(); // agrees
        if (direction == 1) data.layer.forward(data.x(), data.y());
        own[direction] = {};
        if (direction == 0)
          data.layer.forward(data.x(), data.y());
        else
          data.layer.backward(data.x(), data.dy(), data.dx());
      }
      if (comm.rank() == 0) counted = own;
    });
    return counted;
  };
  using calls = priced_communicator::calls;
  calls const gather{1, 0};
  CHECK(run(distant, exchange_policy::automatic) == std::array{gather, gather});
  CHECK(run(narrow, exchange_policy::automatic) == std::array{calls{0, 2}, calls{0, 1}});
  CHECK(run(distant, exchange_policy::reduce) == std::array{calls{0, 2}, calls{0, 1}});
  CHECK(run(narrow, exchange_policy::gather) == std::array{gather, gather});
}

TEST_CASE("both policies are stable however large the mean, and give every rank the same bits") {
  for (int const ranks : {2, 5})
    for (auto const& numbers : {std::pair{0.0, 1.0}, std::pair{1e4, 1.0}, std::pair{1e6, 1e-2}, std::pair{-1e8, 1.0}})
      for (auto const policy : {exchange_policy::gather, exchange_policy::reduce}) {
        double const mean = numbers.first, deviation = numbers.second;
        constexpr std::int64_t channels = 7, spatial = 50;
        std::int64_t const samples = 3 * ranks;
        std::vector<double> x(static_cast<std::size_t>(samples * channels * spatial));
        // Each rank's samples about a mean of their own, so that merging matters.
        for (std::size_t i = 0; i < x.size(); ++i) {
          std::size_t const rank = i / (3 * channels * spatial);
          x[i] = mean + deviation * (test::noise(1, i) + static_cast<double>(rank));
        }
        test::batch_norm_oracle const oracle{x, samples, channels, spatial, 0};
        std::vector<std::vector<double>> bits(static_cast<std::size_t>(ranks));
        syncnorm::run_ranks(ranks, [&](thread_communicator const& comm) {
          syncnorm::batch_norm<double, thread_communicator> layer{
              comm,
              channels,
              {.norm = {
                   .eps = 0, .momentum = 1.0, .variance = syncnorm::running_variance::biased, .exchange = policy}}};
          auto const own = syncnorm::nchw(x.data(), samples, channels, spatial).sample_range(3 * comm.rank(), 3);
          std::vector<double> y(static_cast<std::size_t>(own.size()));
          for (int step = 0; step < 2; ++step) layer.forward(own, syncnorm::nchw(y.data(), 3, channels, spatial));
          auto& mine = bits[static_cast<std::size_t>(comm.rank())];
          mine.assign(layer.running_var().begin(), layer.running_var().end());
          mine.insert(mine.end(), layer.saved().mean.begin(), layer.saved().mean.end());
        });
        // Of data that are themselves rounded at 1e-16 of the mean. Σx² − (Σx)²/n would lose the square of the ratio.
        double const ratio = std::max(1.0, std::abs(mean) / deviation);
        for (std::size_t c = 0; c < channels; ++c) {
          auto const expected = static_cast<double>(oracle.var[c]);
          INFO("mean ", mean, ", deviation ", deviation, ", ranks ", ranks, ", policy ", static_cast<int>(policy));
          CHECK(std::abs(bits[0][c] - expected) <= 1e-14 * ratio * expected);
          // One rounding for each rank that is merged.
          double const rounding =
              ranks * std::numeric_limits<double>::epsilon() * std::max(std::abs(mean), deviation * ranks);
          CHECK(std::abs(bits[0][channels + c] - static_cast<double>(oracle.mean[c])) <= rounding);
        }
        for (auto const& of_rank : bits)
          CHECK(std::memcmp(of_rank.data(), bits[0].data(), bits[0].size() * sizeof(double)) == 0);
      }
}

TEST_CASE("elements that are all equal have no variance under either policy") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    for (int const ranks : {2, 3, 5})
      for (int i = 0; i < 20; ++i) {
        double const value = 10 * test::noise(3, static_cast<std::size_t>(i));
        syncnorm::run_ranks(ranks, [&](thread_communicator const& comm) {
          std::int64_t const samples = 1 + (i + comm.rank()) % 4;
          std::vector<double> const x(static_cast<std::size_t>(7 * samples), value);
          std::vector<double> y(x.size(), 9);
          syncnorm::batch_norm<double, thread_communicator> layer{comm, 1, {.norm = {.eps = 0, .exchange = policy}}};
          layer.forward(syncnorm::nchw(x.data(), samples, 1, 7), syncnorm::nchw(y.data(), samples, 1, 7));
          CHECK(layer.saved().inv_std[0] == 0);
          for (double const output : y) CHECK(output == 0);
        });
      }
}

TEST_CASE("ranks that choose different policies are told so") {
  for (std::int64_t const channels : {3, 300})
    syncnorm::run_ranks(2, [&](thread_communicator const& comm) {
      auto const policy = comm.rank() == 0 ? exchange_policy::gather : exchange_policy::reduce;
      test::layer_data<float, thread_communicator> data{comm, channels, policy},
          good{comm, channels, exchange_policy::reduce};
      std::string text;
      try {
        data.layer.forward(data.x(), data.y());
      } catch (syncnorm::mismatch_error const& e) {
        text = e.what();
      }
      CHECK_MESSAGE(text.find("the exchange policy") != std::string::npos, text);
      CHECK(data.layer.num_batches_tracked() == 0);
      good.step(); // the communicator goes on
    });
}

TEST_CASE("what is wrong on one rank reaches every rank under the reduce policy, in every pass") {
  for (std::int64_t const channels : {3, 300})
    syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
      test::layer_data<float, thread_communicator> data{comm, channels, exchange_policy::reduce};
      test::layer_data<float, thread_communicator> other{comm, channels, exchange_policy::reduce,
                                                         comm.rank() == 2 ? 0.5 : 0.1};
      data.step();
      auto const before = data.state();
      auto x = data.x();
      if (comm.rank() != 0) x.data = nullptr, x.samples = 1;
      auto text = test_support::message_of<syncnorm::error>([&] { data.layer.forward(x, data.y()); });
      CHECK_MESSAGE(
          (text.find("rank 1: x is null") != std::string::npos && text.find("rank 2: x is null") != std::string::npos),
          text);
      text = test_support::message_of<syncnorm::error>([&] { other.layer.forward(other.x(), other.y()); });
      CHECK_MESSAGE((text.find("momentum") != std::string::npos && text.find("rank 2 has 0.5") != std::string::npos),
                    text);
      data.step();
      CHECK(data.state() != before);
      // One value per channel over all ranks.
      auto one = data.x();
      one.samples = one.spatial = comm.rank() == 1 ? 1 : 0;
      auto one_y = data.y();
      one_y.samples = one_y.spatial = one.samples;
      auto const after = data.state();
      text = test_support::message_of<syncnorm::error>([&] { data.layer.forward(one, one_y); });
      CHECK_MESSAGE(text.find("more than 1 value per channel") != std::string::npos, text);
      CHECK(data.state() == after);
    });
}

TEST_CASE("ranks in passes of different layers are told what that may be") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
      test::layer_data<float, thread_communicator> three{comm, 3, policy}, five{comm, 5, policy};
      three.step(); // agree
      five.step();
      auto& other = comm.rank() == 1 ? five : three;
      for (auto const& told :
           {test_support::message_of<syncnorm::mismatch_error>([&] { other.layer.forward(other.x(), other.y()); }),
            test_support::message_of<syncnorm::mismatch_error>(
                [&] { other.layer.begin_forward(other.x(), other.y()).finish(); })}) {
        CHECK_MESSAGE(told.find("ranks disagree on collective") != std::string::npos, told);
        auto const explained = told.find("the number of channels");
        CHECK_MESSAGE((explained != std::string::npos && explained == told.rfind("the number of channels")), told);
      }
      three.step(); // the communicator goes on
    });
}

TEST_CASE("options, and whether a backward pass follows, are agreed on in every pass, under either policy") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
      std::vector<float> x{1, 2, 3, 4}, y(4);
      syncnorm::batch_norm_saved saved;
      syncnorm::batch_norm_workspace workspace{2};
      auto const forward = [&](syncnorm::backward_pass first, syncnorm::backward_pass others, double eps = 1e-5) {
        syncnorm::batch_norm_caller const caller{.backward = comm.rank() == 0 ? first : others};
        syncnorm::batch_norm_forward<float>(syncnorm::host::serial_executor{}, comm, syncnorm::nc(x.data(), 2, 2),
                                            syncnorm::nc(y.data(), 2, 2), syncnorm::affine_parameters<float>{},
                                            syncnorm::running_statistics<float>{}, {.eps = eps, .exchange = policy},
                                            saved, workspace, caller);
        return saved.backward_needed;
      };
      using enum syncnorm::backward_pass;
      for (int step = 0; step < 2; ++step) { // in the first the ranks have yet to agree on the channels
        CHECK(forward(needed, possible));
        CHECK_FALSE(forward(possible, impossible));
        auto text = test_support::message_of<syncnorm::mismatch_error>([&] { (void)forward(impossible, needed); });
        CHECK_MESSAGE(text.find("rank 1 needs one, rank 0 records no gradients") != std::string::npos, text);
        text = test_support::message_of<syncnorm::mismatch_error>(
            [&] { (void)forward(possible, possible, comm.rank() == 2 ? 0.5 : 1e-5); });
        CHECK_MESSAGE(text.find("rank 2 has 0.5") != std::string::npos, text);
      }
    });
}

TEST_CASE("forward passes may gather where backward passes reduce, in one phase, in two, and by turns") {
  exchange_cost cost{.latency = 1e-9, .bandwidth = 1e6, .handling = 0};
  auto const policy_of = [&](merge_rule rule) { return cheaper_policy(cost, 3, rule, 300, 2, 1); };
  while (cost.latency < 1 && !(policy_of(merge_rule::moments) == exchange_policy::gather &&
                               policy_of(merge_rule::sums) == exchange_policy::reduce))
    cost.latency *= 1.5;
  REQUIRE(cost.latency < 1);
  syncnorm::run_ranks(3, [&](thread_communicator const& comm) {
    using data_type = test::layer_data<float, priced_communicator>;
    priced_communicator::calls of_whole, of_two, of_mixed;
    auto const make = [&](priced_communicator::calls& counted) {
      return data_type{priced_communicator{comm, cost, counted}, 300, exchange_policy::automatic};
    };
    auto whole = make(of_whole), two = make(of_two), mixed = make(of_mixed);
    for (int step = 0; step < 3; ++step) {
      of_whole = of_two = {};
      whole.step();
      two.layer.begin_forward(two.x(), two.y()).finish();
      two.layer.begin_backward(two.x(), two.dy(), two.dx()).finish();
      mixed.layer.begin_forward(mixed.x(), mixed.y()).finish();
      mixed.layer.backward(mixed.x(), mixed.dy(), mixed.dx());
      CHECK(two.results() == whole.results());
      CHECK(mixed.results() == whole.results());
      int const gathers = step == 0 ? 2 : 1; // the head, and the rest
      CHECK(of_whole.gathers == gathers);
      CHECK(of_two.gathers == gathers);
      CHECK(of_whole.reductions == 1);
      CHECK(of_two.reductions == 2); // what is being done goes before the sums
    }
  });
}

TEST_CASE("ranks whose communicators claim different costs are told which policies they chose") {
  syncnorm::run_ranks(
      2,
      [&](thread_communicator const& comm) {
        priced_communicator::calls counted;
        exchange_cost const distant{.latency = 1, .bandwidth = 1e9}, narrow{.latency = 1e-9, .bandwidth = 1e3};
        test::layer_data<float, priced_communicator> data{
            priced_communicator{comm, comm.rank() == 0 ? distant : narrow, counted}, 3, exchange_policy::automatic};
        auto const text =
            test_support::message_of<syncnorm::mismatch_error>([&] { data.layer.forward(data.x(), data.y()); });
        CHECK_MESSAGE(text.find("the exchange policy (1: gather, 2: reduce): rank 0 has 1, rank 1 has 2") !=
                          std::string::npos,
                      text);
      },
      std::chrono::seconds{1});
}

TEST_CASE("sums of what ranks do are no agreement where one of them does their mean") {
  using syncnorm::detail::summed_agreement;
  std::array<std::array<double, 9>, 3> of{};
  std::array<double, 9> sums{};
  for (std::size_t r = 0; r < 3; ++r)
    for (std::size_t i = 0; i < 4; ++i) {
      auto const piece = static_cast<double>(5 + r);
      of[r][1 + 2 * i] = piece, of[r][2 + 2 * i] = piece * piece;
    }
  for (auto const& each : of)
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += each[i];
  for (auto const& each : of) CHECK_FALSE(summed_agreement::holds(sums, each, 3));
}
