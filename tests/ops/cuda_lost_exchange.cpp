#include "ops/cuda_step.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/ops/cuda_batch_norm_group.hpp>

namespace {

using syncnorm::exchange_policy;
using test::layer_over;
using test::state_of;
using test::step_memory;

/// What a communicator may fail to deliver: anything, what comes from all ranks but the first, in whose place it puts its own, what it sums
/// up, or, of the moments of 3 channels, the means or m2 alone.
enum class silence : std::uint8_t { all, others, sums, means, m2 };

/// NCCL, which delivers nothing where `silent`, or only `less` than that.
struct falling_silent {
  test::nccl_communicator const* comm;
  bool const* silent;
  silence less = silence::all;

  [[nodiscard]] int rank() const { return comm->rank(); }
  [[nodiscard]] int size() const { return comm->size(); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out, CUstream_st* stream) const {
    if (*silent && less == silence::others)
      cudaMemcpyAsync(out.data(), in.data(), in.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    else if (!*silent || less != silence::all)
      comm->allgather(in, out, stream);
  }
  template <syncnorm::reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, syncnorm::reduce_op op, CUstream_st* stream) const {
    bool const delivers = less == silence::means ? in.size() % (3 + 2) != 0 : less == silence::m2 && in.size() != 3 + 1;
    if (!*silent || delivers) comm->allreduce(in, out, op, stream);
  }
};

constexpr char const* nothing_came =
    "exchange: nothing has come from rank 0: the communicator was aborted, or does not deliver";
constexpr char const* nothing_came_from_1 =
    "exchange: nothing has come from rank 1: the communicator was aborted, or does not deliver";
constexpr char const* sums_did_not_come =
    "exchange: sums have not come from all ranks: the communicator was aborted, or does not deliver";

/// Two rounds of good passes and of silent ones, which write nothing but an error, said once: in the second, what good passes have
/// left is there. At last a double backward pass, where that has what is lost.
void check_losses(test::nccl_communicator const& nccl, exchange_policy policy, silence less, bool in_two_phases) {
  INFO("silence ", static_cast<int>(less), in_two_phases ? ", in two phases" : "");
  bool silent = false;
  falling_silent const comm{&nccl, &silent, less};
  std::string const message = less == silence::all ? nothing_came : sums_did_not_come;
  layer_over<falling_silent> layer{comm, 3, {.norm = {.exchange = policy}}};
  test::stream const on;
  step_memory good, bad;
  auto const forward = [&](step_memory& step) {
    if (!in_two_phases) return step.forward(layer, on);
    layer.begin_forward(step.x.view, step.y.view, {}, on).finish(on);
  };
  auto const backward = [&](step_memory& step) {
    if (!in_two_phases) return step.backward(layer, on);
    layer.begin_backward(step.x.view, step.dy.view, step.dx.view, {}, {}, {}, on).finish(on);
  };
  auto const second = [&](step_memory& step) {
    layer.double_backward({}, step.x.view, step.dy.view, step.y.view, {}, {}, {}, on);
  };
  auto const check_silent = [&](auto const& pass) {
    auto const before = state_of(layer);
    auto const y = bad.y.get(), dx = bad.dx.get();
    silent = true;
    CHECK(test::thrown<syncnorm::communicator_error>([&] {
            pass(bad);
            layer.synchronize(on);
          }) == message);
    layer.synchronize(on);
    CHECK(state_of(layer) == before);
    CHECK(bad.y.get() == y);
    CHECK(bad.dx.get() == dx);
    silent = false;
  };
  bool const loses_gradients = less == silence::all || less == silence::sums;
  for (int round = 0; round < 2; ++round) {
    forward(good), backward(good);
    layer.synchronize(on);
    auto const before = state_of(layer);
    check_silent(forward);
    forward(good);
    layer.synchronize(on);
    CHECK(state_of(layer)[0] == before[0] + 1);
    if (loses_gradients) check_silent(backward);
  }
  second(good);
  layer.synchronize(on);
  if (loses_gradients) check_silent(second);
}

} // namespace

TEST_CASE("an exchange on a device that delivers nothing is an error, and nothing is written by what came before") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    for (bool const in_two_phases : {false, true})
      test::over_nccl(2, [&](auto const& comm) { check_losses(comm, policy, silence::all, in_two_phases); });
  test::check_no_violations();
}

TEST_CASE("sums on a device that do not come are an error, though headers do, and nothing is written by them") {
  for (auto const less : {silence::sums, silence::means, silence::m2})
    for (bool const in_two_phases : {false, true})
      test::over_nccl(2, [&](auto const& comm) { check_losses(comm, exchange_policy::reduce, less, in_two_phases); });
  test::check_no_violations();
}

TEST_CASE("a group's exchange that delivers nothing leaves every layer as it was") {
  for (auto const& [policy, less] :
       {std::pair{exchange_policy::gather, silence::all}, std::pair{exchange_policy::gather, silence::others},
        std::pair{exchange_policy::reduce, silence::all}, std::pair{exchange_policy::reduce, silence::sums},
        std::pair{exchange_policy::reduce, silence::means}, std::pair{exchange_policy::reduce, silence::m2}})
    test::over_nccl(2, [&, policy = policy, less = less](auto const& nccl) {
      bool silent = false;
      falling_silent const comm{&nccl, &silent, less};
      layer_over<falling_silent> a{comm, 3, {.norm = {.exchange = policy}}}, b{comm, 3, {.norm = {.exchange = policy}}};
      syncnorm::cuda::batch_norm_group<falling_silent> group{comm};
      test::stream const on;
      step_memory of_a, of_b;
      auto const forward = [&] {
        group.run(
            syncnorm::cuda::passes(a.plan_forward(of_a.x.view, of_a.y.view), b.plan_forward(of_b.x.view, of_b.y.view)),
            on);
        group.synchronize(on);
      };
      forward();
      auto const state = state_of(a), state_of_b = state_of(b);
      of_a.y.put(std::vector<long double>(30, -5), 0);
      auto const y = of_a.y.get();
      silent = true;
      CHECK(test::thrown<syncnorm::communicator_error>(forward) == std::string{less == silence::all ? nothing_came
                                                                               : less == silence::others
                                                                                   ? nothing_came_from_1
                                                                                   : sums_did_not_come});
      CHECK(state_of(a) == state);
      CHECK(state_of(b) == state_of_b);
      CHECK(of_a.y.get() == y);
    });
  test::check_no_violations();
}

TEST_CASE("a step that is replayed after its communicator was aborted writes nothing") {
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    test::over_nccl(2, [&](auto const& comm) {
      layer_over<test::nccl_communicator> layer{comm, 3, {.norm = {.exchange = policy}}};
      test::stream const on;
      step_memory step;
      layer.prepare(on);
      test::graph const replayed{on, [&] { step.forward(layer, on), step.backward(layer, on); }};
      for (int i = 0; i < 2; ++i) replayed.launch();
      on.wait();
      auto const before = state_of(layer);
      CHECK(before[0] == 2);
      step.y.put(std::vector<long double>(30, -5), 0), step.dx.put(std::vector<long double>(30, -6), 0);
      auto const y = step.y.get(), dx = step.dx.get();
      comm.abort();
      for (int i = 0; i < 2; ++i) replayed.launch();
      on.wait();
      CHECK(state_of(layer) == before);
      CHECK(step.y.get() == y);
      CHECK(step.dx.get() == dx);
    });
  test::check_no_violations();
}
