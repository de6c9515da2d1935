#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/checked.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include <ops/power_norm_run.hpp>

using namespace std::chrono_literals;

namespace {

constexpr std::int64_t few_channels = 4, few_samples = 3, few_positions = 5;

/// What a communicator was asked for, in order: 's' starts an exchange, 'w' waits for one, 'b' does both at once.
using journal = std::string;

/// Brings nothing before it is waited for: the exchange itself takes place in `wait`.
class delayed_work {
public:
  delayed_work(syncnorm::thread_communicator comm, std::span<std::byte const> in, std::span<std::byte> out,
               journal& calls)
      : comm_{std::move(comm)}, in_{in}, out_{out}, calls_{&calls} {}
  delayed_work(delayed_work&& other) noexcept
      : comm_{std::move(other.comm_)}, in_{other.in_}, out_{other.out_}, calls_{std::exchange(other.calls_, nullptr)} {}
  delayed_work& operator=(delayed_work&&) = delete;
  ~delayed_work() {
    try {
      wait();
    } catch (syncnorm::error const&) { // nobody is left to hear of it
    }
  }

  bool test() { return calls_ == nullptr; }
  void wait() {
    if (calls_ == nullptr) return;
    std::exchange(calls_, nullptr)->push_back('w');
    syncnorm::allgather(comm_, in_, out_);
  }

private:
  syncnorm::thread_communicator comm_;
  std::span<std::byte const> in_;
  std::span<std::byte> out_;
  journal* calls_;
};

class delayed_communicator {
public:
  delayed_communicator(syncnorm::thread_communicator comm, journal& calls) : comm_{std::move(comm)}, calls_{&calls} {}

  [[nodiscard]] int rank() const { return comm_.rank(); }
  [[nodiscard]] int size() const { return comm_.size(); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    calls_->push_back('b');
    comm_.allgather(in, out);
  }
  template <syncnorm::wire_type T>
  [[nodiscard]] delayed_work allgather_async(std::span<T const> in, std::span<T> out) const {
    calls_->push_back('s');
    return {comm_, std::as_bytes(in), std::as_writable_bytes(out), *calls_};
  }

private:
  syncnorm::thread_communicator comm_;
  journal* calls_;
};

/// The same without asynchronous operations.
class blocking_communicator {
public:
  blocking_communicator(syncnorm::thread_communicator comm, journal& calls) : comm_{std::move(comm), calls} {}
  [[nodiscard]] int rank() const { return comm_.rank(); }
  [[nodiscard]] int size() const { return comm_.size(); }
  template <syncnorm::wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    comm_.allgather(in, out);
  }

private:
  delayed_communicator comm_;
};

/// One rank's layer with its tensors.
template <class C>
struct member {
  std::vector<float> x, y, dx;
  syncnorm::power_norm<float, C> layer;

  member(C comm, std::int64_t warmup)
      : x(static_cast<std::size_t>(few_samples * few_channels * few_positions)), y(x.size()),
        dx(x.size()), layer{comm, few_channels, {.norm = {.warmup_iters = warmup}}} {
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(test::noise(static_cast<std::uint64_t>(comm.rank()), i)) + 2;
  }
  [[nodiscard]] syncnorm::tensor_view<float> view(std::vector<float>& values) const {
    return syncnorm::tbc(values.data(), few_positions, few_samples, few_channels);
  }
  void forward() {
    std::ranges::fill(y, 0.0F);
    layer.forward(view(x), view(y));
  }
  void backward() {
    std::ranges::fill(dx, 0.0F);
    layer.backward(view(x), view(y), view(dx));
  }
  [[nodiscard]] bool wrote(std::vector<float> const& values) const {
    return std::ranges::none_of(values, [](float v) { return v == 0; });
  }
};

} // namespace

TEST_CASE("a step after the warm-up waits for no exchange of its own before its outputs are written") {
  syncnorm::run_ranks(3, [](syncnorm::thread_communicator const& comm) {
    journal calls;
    member<delayed_communicator> m{{comm, calls}, 2};
    auto const did = [&](auto&& f) {
      calls.clear();
      f();
      return calls;
    };
    auto const forward = [&] { m.forward(); };
    auto const backward = [&] { m.backward(); };

    // In the warm-up the statistics are needed at once; the first exchange finds out the number of channels.
    CHECK(did(forward) == "b");
    CHECK(did(backward) == "s");
    CHECK(m.wrote(m.dx));
    CHECK(m.layer.in_flight());
    CHECK(did(forward) == "sw"); // of the forward pass alone: the backward pass is still on its way
    CHECK(did(backward) == "ws");
    for (int step = 0; step < 3; ++step) {
      CHECK(did(forward) == "s"); // nothing is waited for, not even the backward pass before
      CHECK(m.wrote(m.y));
      CHECK(did(backward) == "wws"); // the forward pass, and ema_gz of the backward pass before; not its own
      CHECK(m.wrote(m.dx));
    }
    CHECK(did([&] { (void)m.layer.ema_gz(); }) == "w");
    CHECK_FALSE(m.layer.in_flight());
    CHECK(did([&] { CHECK(m.layer.iters() == 5); }).empty());

    // Without backward passes, a forward pass waits for the one before, whose running_phi it takes.
    CHECK(did(forward) == "s");
    CHECK(did(forward) == "ws");
    CHECK(did([&] { m.layer.synchronize(); }) == "w");
    // So does evaluation; and the next backward pass finds it done.
    CHECK(did(forward) == "s");
    m.layer.eval();
    CHECK(did(forward) == "w");
    CHECK(did(backward).empty());
  });
}

TEST_CASE("two ranks on one thread, of which neither can wait for the other") {
  // A wait for what the other rank has not started yet would end in the timeout.
  syncnorm::thread_group const group{2, 2s};
  member<syncnorm::thread_communicator> a{group.communicator(0), 0}, b{group.communicator(1), 0};
  {
    std::jthread const other{[&] { b.forward(); }}; // the first exchange alone is blocking
    a.forward();
  }
  a.backward();
  for (int step = 0; step < 20; ++step) {
    a.forward();
    CHECK(a.wrote(a.y));
    b.backward(); // of the step before
    b.forward();
    b.backward();
    CHECK(b.wrote(b.dx));
    a.backward();
    a.forward();
    b.forward();
    b.backward();
    a.backward();
    a.forward(); // one rank is a pass ahead
    b.forward();
    a.backward();
  }
  b.backward();
  CHECK(a.layer.iters() == 61);
  CHECK(b.layer.iters() == 61);
  CHECK(std::ranges::equal(a.layer.running_phi(), b.layer.running_phi()));
  CHECK(std::ranges::equal(a.layer.ema_gz(), b.layer.ema_gz()));
}

TEST_CASE("a communicator that cannot overlap does everything at once, and to the same effect") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    journal calls;
    member<blocking_communicator> plain{{comm, calls}, 2};
    member<syncnorm::thread_communicator> overlapping{comm, 2};
    for (int step = 0; step < 5; ++step) {
      calls.clear();
      plain.forward();
      CHECK(calls == "b");
      CHECK_FALSE(plain.layer.in_flight());
      plain.backward();
      CHECK(calls == "bb");
      CHECK_FALSE(plain.layer.in_flight());
      overlapping.forward();
      overlapping.backward();
      CHECK((plain.y == overlapping.y && plain.dx == overlapping.dx));
    }
    CHECK(std::ranges::equal(plain.layer.running_phi(), overlapping.layer.running_phi()));
    CHECK(std::ranges::equal(plain.layer.ema_gz(), overlapping.layer.ema_gz()));
  });
}

TEST_CASE("the whole run over communicators that delay, block and check") {
  test::power_norm_case c{{3, 6, 2, 5, test::partition::with_empty_ranks, test::layout::tbc}};
  c.warmup = 10;
  test::power_norm_data<double> const data{c};
  std::vector<std::vector<std::string>> failures(3);
  syncnorm::run_ranks(3, [&](syncnorm::thread_communicator const& comm) {
    auto& of_rank = failures[static_cast<std::size_t>(comm.rank())];
    journal calls;
    auto const add = [&](std::vector<std::string> const& more) {
      of_rank.insert(of_rank.end(), more.begin(), more.end());
    };
    add(test::run_power_norm(data, delayed_communicator{comm, calls}));
    add(test::run_power_norm(data, blocking_communicator{comm, calls}));
    add(test::run_power_norm(data, syncnorm::checked_communicator{comm}));
    add(test::run_power_norm(data, syncnorm::any_communicator{comm}));
  });
  for (auto const& of_rank : failures)
    for (auto const& failure : of_rank) FAIL_CHECK(failure);
}

TEST_CASE("layers whose exchanges are in flight side by side do not mix them up") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    std::vector<std::unique_ptr<member<syncnorm::thread_communicator>>> layers, alone;
    for (int i = 0; i < 3; ++i) {
      layers.push_back(std::make_unique<member<syncnorm::thread_communicator>>(comm, 1));
      alone.push_back(std::make_unique<member<syncnorm::thread_communicator>>(comm, 1));
      for (auto* const m : {layers.back().get(), alone.back().get()})
        for (float& value : m->x) value *= static_cast<float>(i + 1);
    }
    for (int step = 0; step < 4; ++step) {
      for (auto& layer : layers) layer->forward();
      for (std::size_t i = layers.size(); i-- > 0;) layers[i]->backward();
      for (auto& layer : alone) {
        layer->forward();
        layer->backward();
        layer->layer.synchronize();
      }
    }
    for (std::size_t i = 0; i < layers.size(); ++i) {
      CHECK(std::ranges::equal(layers[i]->layer.running_phi(), alone[i]->layer.running_phi()));
      CHECK(std::ranges::equal(layers[i]->layer.ema_gz(), alone[i]->layer.ema_gz()));
    }
  });
}

TEST_CASE("a layer may be moved and destroyed while something is in flight") {
  syncnorm::run_ranks(2, [](syncnorm::thread_communicator const& comm) {
    member<syncnorm::thread_communicator> stays{comm, 0}, moves{comm, 0};
    for (auto* const m : {&stays, &moves})
      for (int step = 0; step < 3; ++step) m->forward(), m->backward();
    CHECK(moves.layer.in_flight());
    auto moved = std::move(moves.layer);
    CHECK(std::ranges::equal(moved.ema_gz(), stays.layer.ema_gz()));
    CHECK(moved.iters() == 3);
    moved.forward(stays.view(stays.x), stays.view(stays.y));
    CHECK(moved.in_flight()); // and goes
  });
}

TEST_CASE("an exception on one rank while something is in flight hangs no one") {
  for (bool const in_forward : {false, true})
    CHECK_THROWS_WITH_AS(syncnorm::run_ranks(3,
                                             [&](syncnorm::thread_communicator const& comm) {
                                               member<syncnorm::thread_communicator> m{comm, 0};
                                               m.forward();
                                               m.backward();
                                               m.forward();
                                               if (!in_forward) m.backward();
                                               if (comm.rank() == 1) throw std::runtime_error{"rank 1 gives up"};
                                               for (int step = 0; step < 5; ++step) m.backward(), m.forward();
                                             }),
                         "rank 1 gives up", std::runtime_error);
}

TEST_CASE("a peer that never comes is a timeout where its result is needed, and the state stays") {
  syncnorm::thread_group const group{2, 50ms};
  member<syncnorm::thread_communicator> a{group.communicator(0), 0};
  auto b = std::make_unique<member<syncnorm::thread_communicator>>(group.communicator(1), 0);
  {
    std::jthread const other{[&] { b->forward(), b->backward(); }};
    a.forward();
    a.backward();
  }
  a.layer.synchronize();
  b->layer.synchronize();
  std::vector<float> const phi(a.layer.running_phi().begin(), a.layer.running_phi().end());
  std::vector<float> const ema(a.layer.ema_gz().begin(), a.layer.ema_gz().end());
  a.forward(); // on rank 0 alone
  CHECK(a.wrote(a.y));
  CHECK_THROWS_AS(a.backward(), syncnorm::timeout_error);
  CHECK_THROWS_AS(a.backward(), syncnorm::timeout_error); // the forward pass stays failed
  CHECK(std::ranges::equal(a.layer.running_phi(), phi));
  CHECK(std::ranges::equal(a.layer.ema_gz(), ema));
  CHECK(a.layer.iters() == 1);
  CHECK_THROWS_AS(a.forward(), syncnorm::communicator_error);
  CHECK(a.layer.iters() == 1);
  a.layer.eval(); // which needs nobody
  a.forward();
  CHECK(a.wrote(a.y));
}
