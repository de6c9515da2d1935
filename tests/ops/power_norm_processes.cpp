#include <ops/over_processes.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/host/compiled_primitives.hpp>

#include <ops/power_norm_run.hpp>

#include <support/message_of.hpp>

namespace test {

void check_power_norm_over_processes(syncnorm::any_communicator const& world) {
  int const rank = syncnorm::rank(world);
  for (int const ranks : {1, 2, 3, 4, 7}) {
    if (ranks > syncnorm::size(world)) break;
    auto const comm = syncnorm::split(world, rank < ranks ? 1 : 0);
    if (rank < ranks) {
      // Threads run all cases; here each number of ranks takes three of ten.
      int turn = ranks, taken = 0;
      for_each_power_norm_case(ranks, [&](power_norm_case const& c) {
        if (int const place = ++turn % 10; place != 0 && place != 3 && place != 7) return;
        if (++taken % 2 == 0)
          for (auto const& failure : run_power_norm(power_norm_data<float>{c}, comm)) FAIL_CHECK(failure);
        else
          for (auto const& failure : run_power_norm(power_norm_data<double>{c}, comm)) FAIL_CHECK(failure);
      });
    }
    syncnorm::barrier(world);
  }
  if (syncnorm::size(world) == 1) return;

  for (std::int64_t const channels : {4, 200}) {
    std::vector<float> x(static_cast<std::size_t>(2 * channels * 3), 1.5F), y(x.size());
    std::vector<std::uint8_t> const mask(6, 1);
    auto const view = [&](std::vector<float>& values) { return syncnorm::tbc(values.data(), 3, 2, channels); };
    syncnorm::power_norm<float, syncnorm::any_communicator> layer{world, channels, {.norm = {.warmup_iters = 1}}};
    for (int step = 0; step < 3; ++step) {
      auto const text = test_support::message_of<syncnorm::invalid_argument_error>([&] {
        layer.forward(view(x), view(y), syncnorm::mask_of(mask.data(), rank == 1 ? 1 : 2, 3));
        layer.backward(view(x), view(x), view(y));
      });
      CHECK_MESSAGE(text.find("rank 1: the mask is [1, 3], expected [2, 3]") != std::string::npos, text);
      CHECK(layer.iters() == step);
      auto dy = view(x);
      layer.forward(view(x), view(y), syncnorm::mask_of(mask.data(), 2, 3));
      if (rank == 1) dy.samples = 1;
      auto const later = test_support::message_of<syncnorm::invalid_argument_error>([&] {
        layer.backward(view(x), dy, view(y));
        layer.synchronize();
      });
      CHECK_MESSAGE(later.find("rank 1: dy is [1, ") != std::string::npos, later);
    }
    layer.forward(view(x), view(y));
    layer.backward(view(x), view(x), view(y)); // and goes with something in flight
  }
  syncnorm::barrier(world);
}

void check_power_norm_layouts(syncnorm::any_communicator const& comm) {
  for (auto const order : {layout::nc, layout::nhwc}) {
    power_norm_case run{{syncnorm::size(comm), 6, 2, order == layout::nc ? 1 : 5, partition::with_empty_ranks, order}};
    run.groups = order == layout::nc ? 0 : 2, run.warmup = 6, run.steps = 14;
    for (auto const& failure : run_power_norm(power_norm_data<double>{run}, comm)) FAIL_CHECK(failure);
  }
}

} // namespace test
