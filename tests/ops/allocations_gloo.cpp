#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include <doctest/doctest.h>
#include <gloo/rendezvous/hash_store.h>

#include <syncnorm/adapters/gloo.hpp>
#include <syncnorm/adapters/gloo_context.hpp>
#include <syncnorm/host/compiled_primitives.hpp>
#include <syncnorm/syncnorm.hpp>

#include "support/allocations.hpp"

namespace {

constexpr int steps = 20;

/// Allocations of two ranks, by step and rank, of `make(communicator)`, which gives a step.
template <class Make>
double allocations_per_step(Make const& make) {
  static_cast<void>(test::take_allocations());
  gloo::rendezvous::HashStore store;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] {
        auto const context = syncnorm::make_gloo_context(rank, 2, store, {.hostname = "127.0.0.1"});
        auto step = make(syncnorm::gloo_communicator{context});
        for (int i = 0; i < steps; ++i) step(); // until every slot of the channel has been used
        test::count_allocations(true);
        for (int i = 0; i < steps; ++i) step();
        test::count_allocations(false);
      });
  }
  return test::take_allocations() / (2.0 * steps);
}

/// Of a message to the other rank and one from it, by Gloo's own means alone.
double of_message() {
  return allocations_per_step([](syncnorm::gloo_communicator const& comm) {
    struct exchange {
      std::shared_ptr<gloo::Context> context;
      std::vector<std::byte> bytes = std::vector<std::byte>(64);
      std::unique_ptr<gloo::transport::UnboundBuffer> send = context->createUnboundBuffer(bytes.data(), 32),
                                                      receive = context->createUnboundBuffer(bytes.data() + 32, 32);
      std::uint64_t tag = 0x7000'0000;

      void operator()() {
        int const peer = 1 - context->rank;
        receive->recv(peer, tag);
        send->send(peer, tag++);
        send->waitSend();
        receive->waitRecv();
      }
    };
    return exchange{comm.context()};
  });
}

/// Of an allgather of so few bytes that they are one message.
double of_exchange() {
  return allocations_per_step([](syncnorm::gloo_communicator const& comm) {
    return [comm, bytes = std::vector<std::byte>(300)]() mutable {
      std::span const all{bytes};
      comm.allgather(std::span<std::byte const>{all.first(100)}, all.subspan(100));
    };
  });
}

double of_layer(std::int64_t samples, std::int64_t channels, std::int64_t spatial) {
  return allocations_per_step([&](syncnorm::gloo_communicator const& comm) {
    std::vector<float> x(static_cast<std::size_t>(samples * channels * spatial)), y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 97);
    return [=, layer = std::make_shared<syncnorm::batch_norm<float, syncnorm::gloo_communicator>>(comm,
                                                                                                  channels)]() mutable {
      auto const view = [&](std::vector<float>& values) {
        return syncnorm::nchw(values.data(), samples, channels, spatial);
      };
      layer->forward(view(x), view(y));
      layer->backward(view(x), view(x), view(y));
    };
  });
}

} // namespace

TEST_CASE("over Gloo a step allocates what Gloo does for its messages, and nothing else") {
  double const seldom = 0.5; // queues of Gloo's grow now and then
  double const exchange = of_exchange();
  CHECK(exchange <= of_message() + seldom);
  CHECK(of_layer(4, 24, 49) <= 2 * exchange + seldom);
  // What does not fit a packet takes the data, a signal behind them, and an answer, too, each a message.
  CHECK(of_layer(2, 4000, 3) <= 2 * 4 * exchange + seldom);
  CHECK(of_layer(32, 64, 1568) <= 4 * exchange + seldom); // exchanged in halves
}
