#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/detail/parts.hpp>

#include <ops/grid.hpp>
#include <support/sanitized.hpp>

namespace {

template <class T>
void check_grid(int ranks) {
  test::for_each_case(ranks, [&](test::grid_case const& cell) {
    test::case_data<T> const data{cell};
    std::vector<std::vector<std::string>> failures(static_cast<std::size_t>(ranks));
    syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
      failures[static_cast<std::size_t>(comm.rank())] = test::run_case(data, comm);
    });
    for (auto const& of_rank : failures)
      for (auto const& failure : of_rank) FAIL_CHECK(failure);
  });
}

/// The least that a handle may be: it moves, but is not assigned.
template <class Work>
class least_work {
public:
  explicit least_work(Work work) : work_{std::move(work)} {}
  least_work(least_work&&) = default;
  bool test() { return work_.test(); }
  void wait() { work_.wait(); }

private:
  Work work_;
};

/// A rank of a thread group that counts its collectives.
class counting_communicator {
public:
  counting_communicator(syncnorm::thread_communicator comm, int& calls, double overhead = 2e-6)
      : comm_{std::move(comm)}, calls_{&calls}, overhead_{overhead} {}

  [[nodiscard]] int rank() const { return comm_.rank(); }
  [[nodiscard]] int size() const { return comm_.size(); }
  [[nodiscard]] double exchange_overhead() const { return overhead_; }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    ++*calls_;
    comm_.allgather(in, out);
  }
  template <syncnorm::wire_type T>
  [[nodiscard]] auto allgather_async(std::span<T const> in, std::span<T> out) const {
    ++*calls_;
    return least_work{comm_.allgather_async(in, out)};
  }

private:
  syncnorm::thread_communicator comm_;
  int* calls_;
  double overhead_;
};

struct three_threads {
  [[nodiscard]] int concurrency() const { return 3; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    for (std::int64_t i = 0; i < n; ++i) f(i);
  }
};

/// Collectives of each of three steps, forward and backward in turn, of a layer of `channels` channels.
std::vector<int> count_collectives(int ranks, std::int64_t channels, std::int64_t samples, std::int64_t spatial) {
  std::vector<int> counts;
  syncnorm::run_ranks(ranks, [&](syncnorm::thread_communicator const& comm) {
    int calls = 0;
    std::vector<float> x(static_cast<std::size_t>(samples * channels * spatial), 1.0F), y(x.size());
    auto const view = [&](auto& values) { return syncnorm::nchw(values.data(), samples, channels, spatial); };
    syncnorm::batch_norm<float, counting_communicator> layer{{comm, calls}, channels};
    for (int pass = 0; pass < 6; ++pass) {
      calls = 0;
      if (pass % 2 == 0)
        layer.forward(view(x), view(y));
      else
        layer.backward(view(x), view(x), view(y));
      if (comm.rank() == 0) counts.push_back(calls);
    }
  });
  return counts;
}

} // namespace

TEST_CASE("a pass is one collective, after the first of a wide layer") {
  CHECK(count_collectives(1, 300, 2, 3) == std::vector{0, 0, 0, 0, 0, 0});
  CHECK(count_collectives(2, 128, 2, 3) == std::vector{1, 1, 1, 1, 1, 1});
  CHECK(count_collectives(3, 129, 2, 3) == std::vector{2, 1, 1, 1, 1, 1});
  CHECK(count_collectives(2, 1024, 2, 3) == std::vector{2, 1, 1, 1, 1, 1});
}

TEST_CASE("the first pass in two phases is one collective up to as many channels as in one phase") {
  for (std::int64_t const channels : {112, 113, 128, 129})
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
      int calls = 0;
      std::vector<float> x(static_cast<std::size_t>(4 * channels)), y(x.size());
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) + static_cast<float>(comm.rank());
      syncnorm::batch_norm<float, counting_communicator> layer{{comm, calls}, channels}, other{{comm, calls}, channels};
      auto const view = [&](auto& values) { return syncnorm::nc(values.data(), 4, channels); };
      layer.begin_forward(view(x), view(y)).finish();
      CHECK(calls == (channels <= 128 ? 1 : 2));
      other.forward(view(x), view(y));
      CHECK(std::ranges::equal(layer.running_mean(), other.running_mean()));
      CHECK(std::ranges::equal(layer.running_var(), other.running_var()));
    });
}

TEST_CASE("a pass is one collective after one that was empty on every rank, too") {
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    constexpr std::int64_t channels = 300;
    int calls = 0;
    std::vector<float> x(2 * channels * 3, 1.0F), y(x.size());
    syncnorm::batch_norm<float, counting_communicator> layer{{comm, calls}, channels};
    auto const step = [&](std::int64_t samples) {
      auto const view = [&](auto& values) { return syncnorm::nchw(values.data(), samples, channels, 3); };
      calls = 0;
      layer.forward(view(x), view(y));
      layer.backward(view(x), view(x), view(y));
      return calls;
    };
    step(2); // agrees on the channels
    for (std::int64_t const samples : {0, 2, 0, 2}) CHECK(step(samples) == 2);
  });
}

TEST_CASE_TEMPLATE("a layer that exceeds the cache is exchanged in parts", T, float AND_UNSANITIZED(double)) {
  // 8 · 4096 elements of a channel on each rank: a few channels fill the cache.
  auto const counts = count_collectives(2, 13, 8, 4096);
  CHECK(counts[0] == 1);
  for (std::size_t pass = 2; pass < counts.size(); ++pass) CHECK(counts[pass] > 2);
  for (auto const spread : test::partitions) {
    if (test::sanitized && spread != test::partition::uneven) continue;
    test::case_data<T> const data{{3, test::sanitized ? 5 : 13, 8, 4096, spread, test::layout::nchw}};
    syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
      for (auto const& failure : test::run_case(data, comm)) FAIL_CHECK(failure);
    });
  }
}

TEST_CASE("a part has a block of channels for each thread") {
  auto const comm = syncnorm::thread_group{2}.communicator(0);
  auto const parts = [&](auto const& exec, std::int64_t channels) { // of which four are half a megabyte
    return syncnorm::detail::choose_parts(exec, comm, syncnorm::nchw<float>(nullptr, 8, channels, 4096), 1).channels;
  };
  CHECK(parts(syncnorm::host::serial_executor{}, 64) == 4);
  CHECK(parts(three_threads{}, 64) == 12);
  CHECK(parts(three_threads{}, 10) == 10);
}

TEST_CASE("a large layer whose exchange costs more is exchanged in halves") {
  test::case_data<float> const data{{2, 13, 8, 4096, test::partition::uneven, test::layout::nchw}};
  syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& comm) {
    int calls = 0;
    for (auto const& failure : test::run_case(data, counting_communicator{comm, calls, 7e-6})) FAIL_CHECK(failure);
    // The first of each direction makes the ranks agree on the cut; the last is the test's own.
    CHECK(calls == 1 + 1 + 2 + 2 + 1);
  });
}

/// Whose collectives are over when they return.
struct blocking_communicator {
  [[nodiscard]] int rank() const { return 0; }
  [[nodiscard]] int size() const { return 2; }
  [[nodiscard]] double exchange_overhead() const { return 7e-6; }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const>, std::span<T>) const {}
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const>, std::span<T>, syncnorm::reduce_op) const {}
};

TEST_CASE("halves are not exchanged by what cannot exchange one while the other is summed") {
  auto const is_cut = [](auto const& comm) {
    auto const x = syncnorm::nchw<float>(nullptr, 8, 13, 4096);
    return syncnorm::detail::choose_parts(syncnorm::host::serial_executor{}, comm, x, 1).channels < x.channels;
  };
  int calls = 0;
  counting_communicator const counting{syncnorm::thread_group{2}.communicator(0), calls, 7e-6};
  CHECK(is_cut(counting));
  CHECK_FALSE(is_cut(blocking_communicator{}));
  CHECK_FALSE(is_cut(syncnorm::any_communicator{blocking_communicator{}}));
  CHECK(is_cut(syncnorm::any_communicator{syncnorm::any_communicator{syncnorm::thread_group{2}.communicator(0)}}));
}

TEST_CASE_TEMPLATE("batch norm over threads agrees with the oracle on the whole batch", T,
                   float AND_UNSANITIZED(double)) {
  for (int const ranks : {1, 2, 3, 4, 7})
    if (!test::sanitized || ranks % 2 != 0) check_grid<T>(ranks);
}

TEST_CASE_TEMPLATE("batch norm of one rank needs no group", T, float AND_UNSANITIZED(double)) {
  for (auto const order : test::layouts) {
    test::case_data<T> const data{{1, 5, 4, order == test::layout::nc ? 1 : 50, test::partition::even, order}};
    for (auto const& failure : test::run_case(data, syncnorm::self_communicator{})) FAIL_CHECK(failure);
  }
}

TEST_CASE("a copy of a layer shares nothing with it") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    using layer_type = syncnorm::batch_norm<double, syncnorm::thread_communicator>;
    constexpr std::int64_t channels = 3;
    auto const x = test::noise_vector(static_cast<std::uint64_t>(comm.rank()), 4 * channels * 5);
    auto const view = [](auto& values) { return syncnorm::nchw(values.data(), 4, channels, 5); };
    std::vector<double> y(x.size()), of_copy(x.size());
    std::optional<layer_type> layer{std::in_place, comm, channels};
    layer->forward(view(x), view(y));
    layer->forward(view(x), view(y));
    layer_type copy{comm, channels + 1};
    copy = *layer;
    layer->forward(view(x), view(y));
    copy.forward(view(x), view(of_copy));
    CHECK(of_copy == y);
    CHECK(copy.num_batches_tracked() == layer->num_batches_tracked());
    layer_type const unused{*layer};
    layer.reset();
    copy.forward(view(x), view(of_copy));
    copy.backward(view(x), view(x), view(of_copy));
    CHECK(copy.num_batches_tracked() == 4);
    CHECK(unused.channels() == channels);
  });
}
