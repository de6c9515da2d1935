#include <cstdint>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/core/function_ref.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/channel_values.hpp>
#include <syncnorm/host/executor.hpp>

namespace host = syncnorm::host;

namespace {

/// Runs backwards, and counts what it runs.
struct counting_executor {
  std::int64_t* count;
  int claimed = 3;
  [[nodiscard]] int concurrency() const noexcept { return claimed; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    for (std::int64_t i = n; i-- > 0; ++*count) f(i);
  }
};

/// Without state; at most two at a time.
struct pair_executor {
  [[nodiscard]] int concurrency() const noexcept { return 2; }
  template <class F>
  void for_each(std::int64_t n, F const& f) const {
    for (std::int64_t i = 0; i < n; ++i) f(i ^ 1);
  }
};

std::vector<std::int64_t> order_of(host::executor_ref exec, std::int64_t n) {
  std::vector<std::int64_t> order;
  exec.for_each(n, [&](std::int64_t i) { order.push_back(i); });
  return order;
}

} // namespace

static_assert(host::executor<host::executor_ref>);

TEST_CASE("a reference to an executor runs what the executor runs") {
  using indices = std::vector<std::int64_t>;
  std::int64_t count = 0;
  counting_executor const backwards{&count};
  CHECK(host::executor_ref{backwards}.concurrency() == 3);
  CHECK(order_of(backwards, 4) == indices{3, 2, 1, 0});
  CHECK(count == 4);
  CHECK(order_of(backwards, 0).empty());
  CHECK(host::executor_ref{host::serial_executor{}}.concurrency() == 1);
  CHECK(order_of(host::serial_executor{}, 3) == indices{0, 1, 2});

  CHECK(host::executor_ref{counting_executor{&count, 0}}.concurrency() == 1);

  host::executor_ref const outlives = pair_executor{};
  CHECK(outlives.concurrency() == 2);
  CHECK(order_of(outlives, 4) == indices{1, 0, 3, 2});
  host::executor_ref const copy = outlives;
  CHECK(order_of(copy, 2) == indices{1, 0});

  auto const failing = [](std::int64_t i) {
    if (i == 1) throw std::runtime_error{"one"};
  };
  CHECK_THROWS_WITH_AS(host::executor_ref{backwards}.for_each(3, failing), "one", std::runtime_error);
}

TEST_CASE("values of channels are those of the parameter, from any channel on") {
  auto const check = []<class P>(P) {
    std::vector<P> const values{syncnorm::from_double<P>(0.5), syncnorm::from_double<P>(-2),
                                syncnorm::from_double<P>(7)};
    host::channel_values const all{std::span{values}}, later = all.from(1);
    CHECK(all[0] == 0.5);
    CHECK(all[2] == 7);
    CHECK(later[0] == -2);
    CHECK(later.from(1)[0] == 7);
  };
  check(float{}), check(double{}), check(syncnorm::float16{}), check(syncnorm::bfloat16{});

  std::vector<float> const beta{1, 2};
  host::affine_values const none{syncnorm::affine_parameters<float>{}},
      shifted{syncnorm::affine_parameters<float>{{}, beta}};
  CHECK(none.gamma[5] == 1);
  CHECK(none.beta[5] == 0);
  CHECK(shifted.from(1).gamma[0] == 1);
  CHECK(shifted.from(1).beta[0] == 2);
  CHECK(host::affine_values{}.beta[0] == 0);
}

TEST_CASE("a reference to a callable calls it") {
  int calls = 0;
  auto const add = [&](int a, int b) { return ++calls, a + b; };
  syncnorm::function_ref<int(int, int)> const ref = add;
  CHECK(ref(2, 3) == 5);
  CHECK(calls == 1);
}
