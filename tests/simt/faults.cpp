#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <ops/grid_case.hpp>
#include <simt/ranks.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace {

using namespace syncnorm;
using namespace test;
using enum gpu::detail::epilogue_kind;
using syncnorm::detail::packet_header;

constexpr gpu::device_limits limits{2, 1 << 16};

/// Ranks with a tensor of ones and twos, and what a pass did to them.
struct group {
  struct rank : rank_memory<float> {
    rank(std::int64_t channels, int ranks, std::int64_t samples)
        : rank_memory{channels, ranks}, header{header_of(channels, samples)},
          x(arrangement::nchw, samples, channels, 1), y(arrangement::nchw, samples, channels, 1), dy{y} {
      for (std::int64_t i = 0; i < samples * channels; ++i) {
        x.view().data[i] = 1 + static_cast<float>(i % 2) + static_cast<float>(i % 3);
        y.view().data[i] = dy.view().data[i] = 77;
      }
      register_tensors();
    }
    void register_tensors() {
      register_all();
      add_tensor<float const>(machine.memory, "x", x.view());
      add_tensor(machine.memory, "y", y.view());
      add_tensor<float const>(machine.memory, "dy", dy.view());
    }
    packet_header header;
    tensor<float> x, y, dy;
  };
  std::int64_t channels;
  std::deque<rank> ranks;
  std::vector<double> packets;

  group(std::vector<std::int64_t> const& counts, std::int64_t c = 3) : channels{c} {
    for (auto const count : counts) ranks.emplace_back(c, static_cast<int>(counts.size()), count);
  }
  void exchange() {
    packets = gather(ranks);
    for (auto& each : ranks) {
      each.register_tensors();
      each.machine.memory.add("packets", packets.data(), packets.size());
    }
  }
  [[nodiscard]] gpu::gathered_packets gathered() const {
    return {reinterpret_cast<std::byte const*>(packets.data()), static_cast<int>(ranks.size())};
  }
  void forward() {
    for (auto& each : ranks)
      run_reduction(each.machine,
                    gpu::detail::make_reduction(gpu::detail::moments_op<float>{each.x.view()}, each.header,
                                                each.packet_data(), each.workspace(), limits, 64),
                    {});
    exchange();
    for (auto& each : ranks) {
      gpu::detail::workspace_layout const layout{each.workspace(), channels};
      auto const statistics = gpu::detail::make_statistics(each.affine(), {1e-3, 0.1}, gathered(), each.saved(),
                                                           each.running(), each.report(), layout.pass_ticket);
      run_map(each.machine,
              gpu::detail::make_map(
                  gpu::detail::make_normalize<float, none>(each.x.view(), each.y.view(), {}, statistics), limits, 64),
              {});
    }
  }
  void backward() {
    for (auto& each : ranks)
      run_reduction(each.machine,
                    gpu::detail::make_reduction(gpu::detail::make_backward_sums<float, none>(
                                                    each.dy.view(), each.x.view(), each.affine(), {}, each.saved()),
                                                each.header, each.packet_data(), each.workspace(), limits, 64),
                    {});
    exchange();
    for (auto& each : ranks) {
      gpu::detail::backward_statistics const statistics{gathered(),    each.packet_data(), each.saved(),
                                                        each.affine(), each.gradients(),   each.report()};
      run_map(each.machine,
              gpu::detail::make_map(gpu::detail::make_gradient<float, none>(each.dy.view(), each.x.view(),
                                                                            each.y.view(), {}, {}, statistics),
                                    limits, 64),
              {});
    }
  }
  /// Whether no rank's outputs, running statistics, counter and gradients were written.
  [[nodiscard]] bool untouched() {
    return std::ranges::all_of(ranks, [](rank& each) {
      auto const all = [](auto const& values, float value) {
        return std::ranges::all_of(values, [=](float v) { return v == value; });
      };
      return all(each.y.values(), 77) && all(each.running_mean, 0.5f) && all(each.running_var, 2) &&
             each.batches == 3 && all(each.gamma_gradient, 1) && all(each.beta_gradient, -1);
    });
  }
  /// What the host makes of the headers that a failed pass left: the same on every rank.
  [[nodiscard]] std::string message() {
    std::string first;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      std::string now = "nothing";
      try {
        syncnorm::detail::require_agreement(ranks[r].headers);
      } catch (error const& what) {
        now = what.what();
      }
      if (r == 0) first = now;
      CHECK(now == first);
      CHECK(ranks[r].fault == gpu::pass_fault::disagreement);
    }
    return first;
  }
};

} // namespace

TEST_CASE("Where headers disagree, every rank reports and writes nothing") {
  using changing = std::function<void(packet_header&)>;
  std::pair<changing, std::string> const cases[] = {
      {[](packet_header& h) { h.eps = 1; }, "ranks disagree on eps"},
      {[](packet_header& h) { h.momentum = 1; }, "ranks disagree on momentum"},
      {[](packet_header& h) { h.pass[3] = 'x'; }, "ranks disagree on the operation"},
      {[](packet_header& h) { h.element[0] = 'x'; }, "ranks disagree on the element type"},
      {[](packet_header& h) { h.shape = 5; }, "ranks disagree on the channels of their layers"},
      {[](packet_header& h) { h.affine = 5; }, "ranks disagree on affine parameters"},
      {[](packet_header& h) { h.fault[0] = 'x'; }, "rank 2: x"},
      {[](packet_header& h) { h.backward = 2; }, "rank 2 records no gradients"},
  };
  for (auto const& [change, text] : cases) {
    bool const many = text == "rank 2: x"; // packs, which are on their way
    group of = many ? group{{900, 3, 1}, 8} : group{{2, 3, 1}};
    of.ranks[1].header.backward = 1;
    change(of.ranks[2].header);
    of.forward();
    auto const said = of.message();
    INFO(said);
    CHECK(said.find(text) != std::string::npos);
    CHECK(of.untouched());
    for (auto& each : of.ranks) CHECK(each.count == -1);
    // The backward pass says that the forward pass failed, but the first report stays.
    of.backward();
    CHECK(of.untouched());
    CHECK(of.message() == said);
    for (auto& each : of.ranks) each.fault = gpu::pass_fault::none;
    of.backward();
    CHECK(of.untouched());
    if (text != "rank 2: x") CHECK(of.message().find("rank 0: the forward pass failed") != std::string::npos);
  }
}

TEST_CASE("Fields that may differ do not make ranks disagree") {
  for (std::int32_t const backward : {1, 2}) { // needed or impossible, and elsewhere possible
    group of{{2, 3, 1}};
    of.ranks[1].header.part_channels = 7;
    of.ranks[1].header.backward = backward;
    of.forward();
    CHECK(!of.untouched());
    for (auto& each : of.ranks) {
      CHECK(each.fault == gpu::pass_fault::none);
      CHECK(each.count == 6);
    }
  }
}

TEST_CASE("One value per channel over all ranks is reported, none is nothing") {
  group one{{0, 1, 0}};
  one.forward();
  for (auto& each : one.ranks) CHECK(each.fault == gpu::pass_fault::one_value);
  CHECK(one.untouched());

  group none{{0, 0}};
  none.forward();
  none.backward();
  CHECK(none.untouched());
  for (auto& each : none.ranks) {
    CHECK(each.fault == gpu::pass_fault::none);
    CHECK(each.count == 0);
    CHECK(each.inv_std == std::vector<double>(3));
  }

  group no_channels{{2, 3}, 0};
  no_channels.forward();
  no_channels.backward();
  CHECK(no_channels.ranks[0].fault == gpu::pass_fault::none);
  no_channels.ranks[1].header.eps = 2;
  no_channels.forward();
  CHECK(no_channels.message().find("eps") != std::string::npos);
}

TEST_CASE("On the chip, one value per channel, and a forward pass that failed, are reported") {
  for (int const blocks : {1, 2}) {
    gpu::device_limits const of_device{2, 4096, blocks};
    group of{{1}};
    auto& rank = of.ranks[0];
    gpu::gathered_packets const packets{rank.packet_data(), 1};
    gpu::detail::workspace_layout const layout{rank.workspace(), 3};
    auto const forward = gpu::detail::make_normalize<float, none>(
        rank.x.view(), rank.y.view(), {},
        gpu::detail::make_statistics(rank.affine(), {1e-3, 0.1}, packets, rank.saved(), rank.running(), rank.report(),
                                     layout.pass_ticket));
    run_fused(rank.machine,
              gpu::detail::make_fused(gpu::detail::moments_op<float>{rank.x.view()}, forward, rank.header,
                                      rank.packet_data(), of_device, 64),
              {});
    CHECK(rank.fault == gpu::pass_fault::one_value);
    CHECK(rank.count == -1);
    CHECK(of.untouched());
    rank.fault = gpu::pass_fault::none;
    auto const sums =
        gpu::detail::make_backward_sums<float, none>(rank.dy.view(), rank.x.view(), rank.affine(), {}, rank.saved());
    gpu::detail::backward_statistics const statistics{packets,       rank.packet_data(), rank.saved(),
                                                      rank.affine(), rank.gradients(),   rank.report()};
    auto const backward =
        gpu::detail::make_gradient<float, none>(rank.dy.view(), rank.x.view(), rank.y.view(), {}, {}, statistics);
    run_fused(rank.machine, gpu::detail::make_fused(sums, backward, rank.header, rank.packet_data(), of_device, 64),
              {});
    CHECK(of.untouched());
    CHECK(of.message().find("the forward pass failed") != std::string::npos);
  }
}

TEST_CASE("The running statistics normalize in evaluation, and their gradient is constant") {
  for (auto const kind : {running_variance::unbiased, running_variance::standard_deviation}) {
    group of{{4}};
    auto& rank = of.ranks[0];
    gpu::running_outputs const running = rank.running();
    auto const statistics =
        gpu::detail::make_statistics(rank.affine(), {0.25, 0.1, kind}, {}, rank.saved(), running, {}, nullptr);
    run_map(rank.machine,
            gpu::detail::make_map(
                gpu::detail::make_normalize<float, none>(rank.x.view(), rank.y.view(), {}, statistics), limits, 64),
            {});
    double const inv_std = kind == running_variance::unbiased ? 1 / 1.5 : 0.5;
    std::vector<double> expected;
    for (std::size_t i = 0; i < 12; ++i)
      expected.push_back((rank.x.values()[i] - 0.5) * inv_std * rank.gamma[i % 3] + rank.beta[i % 3]);
    CHECK(error_of(rank.y.values(), expected) < 1e-6);
    CHECK(rank.count == 0);
    CHECK(rank.batches == 3);
    CHECK(rank.running_mean[0] == 0.5f);
    of.backward();
    for (std::size_t i = 0; i < 12; ++i) expected[i] = 77 * inv_std * rank.gamma[i % 3];
    CHECK(error_of(rank.y.values(), expected) < 1e-6);
  }
}

TEST_CASE("Statistics keep their accuracy far from 0, and beside an element that is far from all others") {
  // 64 squares of the distance to the far element, summed in float, of which one is part of m2.
  constexpr double bound = 64 * 64 * 0x1p-24;
  constexpr std::int64_t spatial = 30000; // a block's threads have 470 elements each
  for (double const mean : {1e4, -3e5}) {
    auto values = deviates<float>(1, 2, spatial, 5, mean);
    if (mean < 0) values[0] = 1e6f;
    rank_memory<float> rank{2, 1};
    tensor<float> of{arrangement::nchw, 1, 2, spatial, values};
    add_tensor<float const>(rank.machine.memory, "x", of.view());
    run_reduction(rank.machine,
                  gpu::detail::make_reduction(gpu::detail::moments_op<float>{of.view()}, header_of(2, spatial),
                                              rank.packet_data(), rank.workspace(), limits, 64),
                  {.blocks = 2});
    epilogue_oracle oracle{1, 2, spatial, as_long(values), {1, 1}, {0, 0}, {}, {}};
    oracle.forward();
    for (std::size_t c = 0; c < 2; ++c) {
      auto const deviation = std::sqrt(oracle.m2[c] / spatial);
      CHECK(std::abs(rank.packet[32 + c] - static_cast<double>(oracle.mean[c])) <
            1e-5 * static_cast<double>(deviation));
      CHECK(std::abs(rank.packet[34 + c] / static_cast<double>(oracle.m2[c]) - 1) < bound);
    }
  }
}
