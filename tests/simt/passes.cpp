#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <simt/ranks.hpp>

namespace {

using namespace syncnorm;
using namespace test;
using gpu::detail::epilogue_kind;
using enum epilogue_kind;

struct pass_case {
  std::vector<std::int64_t> samples; ///< of each rank
  std::int64_t channels, spatial;
  arrangement order = arrangement::nchw;
  std::int64_t offset = 0; ///< of x, in elements
  std::int64_t y_offset = 0;
  bool in_place = false;
  bool masked = false, residual = false;
  double slope = 1;
  masked_outputs outputs = masked_outputs::zero;
  bool on_chip = false; ///< of one rank, in one launch
  bool backward = true, exchange = true, dx = true, dresidual = true;
  batch_norm_options options{1e-3};
  launching how{};

  [[nodiscard]] pass_case unbiased() const {
    auto other = *this;
    other.options.normalize_by = batch_variance::unbiased;
    return other;
  }
};

std::string name_of(pass_case const& of) {
  std::string name = "ranks of";
  for (auto const n : of.samples) name += " " + std::to_string(n);
  return name + " x " + std::to_string(of.channels) + " x " + std::to_string(of.spatial) + " " +
         test::name_of(of.order) + " at " + std::to_string(of.offset) + (of.masked ? " masked" : "") +
         (of.residual ? " residual" : "");
}

/// Runs a forward and a backward pass on ranks in the interpreter, by packets that they exchange, against the oracle over
/// all samples.
template <class T, epilogue_kind Kind, class P = accumulate_t<T>>
void check_passes(pass_case const& of) {
  INFO(name_of(of));
  std::int64_t const channels = of.channels, spatial = of.spatial;
  double const of_state = std::max(accuracy<P>, accuracy<accumulate_t<T>>);
  std::int64_t all = 0;
  for (auto const n : of.samples) all += n;
  auto const x = deviates<T>(all, channels, spatial, 7, 3);
  auto const residual = deviates<T>(all, channels, spatial, 8, 0);
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(all * spatial), 1);
  if (of.masked)
    for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = (i * 2654435761u >> 16) % 3 != 0 ? 7 : 0;

  std::deque<rank_memory<P>> ranks;
  std::vector<tensor<T>> xs, ys, residuals;
  auto const part = [&](std::vector<T> const& values, std::int64_t first, std::int64_t n) {
    auto const sample = static_cast<std::ptrdiff_t>(channels * spatial);
    return std::vector<T>(values.begin() + first * sample, values.begin() + (first + n) * sample);
  };
  std::vector<batch_norm_epilogue<T>> epilogues;
  std::int64_t first = 0;
  for (auto const n : of.samples) {
    ranks.emplace_back(channels, static_cast<int>(of.samples.size())).normalized_by = of.options.normalize_by;
    xs.emplace_back(of.order, n, channels, spatial, part(x, first, n), of.offset);
    residuals.emplace_back(of.order, n, channels, spatial, part(residual, first, n), of.offset);
    ys.emplace_back(of.order, n, channels, spatial, of.y_offset);
    first += n;
  }
  first = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto& rank = ranks[r];
    auto const n = of.samples[r];
    auto& memory = rank.machine.memory;
    add_tensor(memory, "x", xs[r].view());
    add_tensor(memory, "y", ys[r].view());
    add_tensor<T const>(memory, "residual", residuals[r].view());
    auto const* const bytes = mask.data() + first * spatial;
    memory.add("mask", bytes, static_cast<std::size_t>(n * spatial));
    batch_norm_epilogue<T> epilogue;
    if (of.masked) epilogue.mask = mask_of(bytes, n, spatial);
    if (of.residual) epilogue.residual = residuals[r].view();
    epilogue.activation = {of.slope, Kind == exponential};
    epilogue.masked = of.outputs;
    epilogues.push_back(epilogue);
    if (of.on_chip) break;
    gpu::detail::moments_op<T> const op{xs[r].view(), epilogue.mask};
    run_reduction(rank.machine,
                  gpu::detail::make_reduction(op, header_of(channels, n * spatial), rank.packet_data(),
                                              rank.workspace(), {2, 1 << 16}, 64),
                  of.how);
    first += n;
  }
  auto const packets = gather(ranks);
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto& rank = ranks[r];
    rank.machine.memory.add("packets", packets.data(), packets.size());
    gpu::gathered_packets gathered{reinterpret_cast<std::byte const*>(packets.data()), static_cast<int>(ranks.size())};
    if (of.how.early) gathered = {rank.packet_data(), 1};
    gpu::detail::workspace_layout const layout{rank.workspace(), channels};
    auto const statistics = gpu::detail::make_statistics(rank.affine(), of.options, gathered, rank.saved(),
                                                         rank.running(), rank.report(), layout.pass_ticket);
    auto const op = gpu::detail::make_normalize<T, Kind>(xs[r].view(), of.in_place ? xs[r].view() : ys[r].view(),
                                                         epilogues[r], statistics);
    if (of.on_chip)
      run_fused(rank.machine,
                gpu::detail::make_fused(gpu::detail::moments_op<T>{xs[r].view(), epilogues[r].mask}, op,
                                        header_of(channels, all * spatial), rank.packet_data(), of.how.limits,
                                        of.how.threads),
                of.how);
    else
      run_map(rank.machine, gpu::detail::make_map(op, {2, 1 << 16}, 64), of.how);
  }

  epilogue_oracle oracle{all,
                         channels,
                         spatial,
                         as_long(x),
                         as_long(ranks[0].gamma),
                         as_long(ranks[0].beta),
                         of.residual ? as_long(residual) : std::vector<long double>{},
                         of.masked ? mask : std::vector<std::uint8_t>{}};
  oracle.zeroes = of.outputs == masked_outputs::zero;
  oracle.slope = of.slope, oracle.exponential = Kind == exponential;
  oracle.unbiased = of.options.normalize_by == batch_variance::unbiased;
  oracle.forward();
  first = 0;
  double const weight = of.options.momentum.value_or(0.25); // the counter is 3
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto& rank = ranks[r];
    CHECK(rank.fault == gpu::pass_fault::none);
    CHECK(rank.count == oracle.count);
    CHECK(rank.batches == 4);
    CHECK(rank.mean == ranks[0].mean);
    CHECK(rank.inv_std == ranks[0].inv_std);
    CHECK(error_of(rank.mean, oracle.mean) < accuracy<accumulate_t<T>> / 10);
    CHECK(error_of(rank.inv_std, oracle.inv_std) < accuracy<accumulate_t<T>> / 10);
    std::vector<long double> running_mean, running_var;
    for (std::size_t c = 0; c < oracle.mean.size(); ++c) {
      running_mean.push_back(0.5L * (1 - weight) + weight * oracle.mean[c]);
      running_var.push_back(2.0L * (1 - weight) + weight * oracle.m2[c] / static_cast<long double>(oracle.count - 1));
    }
    CHECK(error_of(as_long(rank.running_mean), running_mean) < of_state);
    CHECK(error_of(as_long(rank.running_var), running_var) < of_state);
    auto const sample = static_cast<std::ptrdiff_t>(channels * spatial);
    std::vector<long double> const expected(oracle.y.begin() + first * sample,
                                            oracle.y.begin() + (first + of.samples[r]) * sample);
    CHECK(error_of(as_long((of.in_place ? xs : ys)[r].values()), expected) < accuracy<T>);
    CHECK(xs[r].intact());
    CHECK(ys[r].intact());
    first += of.samples[r];
  }
  if (!of.backward) return;

  auto dy = deviates<T>(all, channels, spatial, 9, 0.25);
  oracle.for_each_near_kink(sizeof(T) == 2 ? 0.05 : 1e-3, [&](std::size_t i) { dy[i] = T(0.0f); });
  std::vector<tensor<T>> dys, dxs, dresiduals;
  first = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto const n = of.samples[r];
    if (of.in_place) xs[r] = tensor<T>{of.order, n, channels, spatial, part(x, first, n), of.offset};
    dys.emplace_back(of.order, n, channels, spatial, part(dy, first, n), of.y_offset);
    dxs.emplace_back(of.order, n, channels, spatial, of.offset);
    dresiduals.emplace_back(of.order, n, channels, spatial, of.offset);
    first += n;
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto& rank = ranks[r];
    rank.register_all();
    auto& memory = rank.machine.memory;
    add_tensor<T const>(memory, "x", xs[r].view());
    add_tensor(memory, "dy", dys[r].view());
    add_tensor(memory, "dx", dxs[r].view());
    add_tensor(memory, "dresidual", dresiduals[r].view());
    add_tensor<T const>(memory, "residual", residuals[r].view());
    if (of.masked) memory.add("mask", epilogues[r].mask.data, static_cast<std::size_t>(of.samples[r] * spatial));
    if (of.on_chip) break;
    auto const op = gpu::detail::make_backward_sums<T, Kind>(dys[r].view(), xs[r].view(), rank.affine(), epilogues[r],
                                                             rank.saved());
    run_reduction(rank.machine,
                  gpu::detail::make_reduction(op, header_of(channels, of.samples[r] * spatial), rank.packet_data(),
                                              rank.workspace(), {2, 1 << 16}, 64),
                  of.how);
  }
  auto const sums = gather(ranks);
  first = 0;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto& rank = ranks[r];
    auto const n = of.samples[r];
    rank.machine.memory.add("packets", sums.data(), sums.size());
    gpu::gathered_packets gathered{reinterpret_cast<std::byte const*>(sums.data()), static_cast<int>(ranks.size())};
    if (!of.exchange || of.how.early) gathered = {rank.packet_data(), 1};
    gpu::detail::backward_statistics const statistics{gathered,      rank.packet_data(), rank.saved(),
                                                      rank.affine(), rank.gradients(),   rank.report()};
    auto dx = of.in_place ? dys[r].view() : dxs[r].view();
    if (!of.dx) dx = {};
    auto const dresidual = of.residual && of.dresidual ? dresiduals[r].view() : tensor_view<T>{};
    auto const op =
        gpu::detail::make_gradient<T, Kind>(dys[r].view(), xs[r].view(), dx, dresidual, epilogues[r], statistics);
    if (of.on_chip)
      run_fused(rank.machine,
                gpu::detail::make_fused(gpu::detail::make_backward_sums<T, Kind>(
                                            dys[r].view(), xs[r].view(), rank.affine(), epilogues[r], rank.saved()),
                                        op, header_of(channels, all * spatial), rank.packet_data(), of.how.limits,
                                        of.how.threads),
                of.how);
    else
      run_map(rank.machine, gpu::detail::make_map(op, {2, 1 << 16}, 64), of.how);

    // Without exchange, the gradients of the others are as if they were 0.
    auto seen = as_long(dy);
    auto const sample = channels * spatial;
    if (!of.exchange)
      for (std::int64_t i = 0; i < all * sample; ++i)
        if (i < first * sample || i >= (first + n) * sample) seen[static_cast<std::size_t>(i)] = 0;
    auto const expected = oracle.backward(seen, first, first + n);
    auto const of_rank = [&](std::vector<long double> const& values) {
      return std::vector<long double>(values.begin() + first * sample, values.begin() + (first + n) * sample);
    };
    CHECK(rank.fault == gpu::pass_fault::none);
    // The scale of dx is that of dy·gamma·inv_std, from which it comes by subtraction.
    auto const greatest = [](std::vector<long double> const& values) {
      long double most = 0;
      for (auto const value : values) most = std::max(most, std::abs(value));
      return most;
    };
    long double slope = 0;
    for (std::size_t c = 0; c < oracle.inv_std.size(); ++c)
      slope = std::max(slope, std::abs(static_cast<long double>(rank.gamma[c])) * oracle.inv_std[c]);
    auto const terms = slope * greatest(of_rank(seen)), left = greatest(of_rank(expected.dx));
    double const of_dx = accuracy<T> * (left > 0 ? static_cast<double>(std::max(1.0L, terms / left)) : 1);
    if (of.dx) CHECK(error_of(as_long((of.in_place ? dys : dxs)[r].values()), of_rank(expected.dx)) < of_dx);
    if (of.residual && of.dresidual)
      CHECK(error_of(as_long(dresiduals[r].values()), of_rank(expected.dresidual)) < accuracy<T>);
    auto gamma = expected.gamma, beta = expected.beta;
    for (auto& each : gamma) each += 1;
    for (auto& each : beta) each -= 1;
    CHECK(error_of(as_long(rank.gamma_gradient), gamma) < of_state);
    CHECK(error_of(as_long(rank.beta_gradient), beta) < of_state);
    CHECK(dxs[r].intact());
    CHECK(dys[r].intact());
    CHECK(dresiduals[r].intact());
    first += n;
  }
}

} // namespace

TEST_CASE("Kernels normalize by the statistics of all ranks, over any extents and strides") {
  for (auto const order : arrangements)
    for (auto const& e :
         {extents{3, 2, 49}, extents{2, 5, 1}, extents{5, 37, 9}, extents{2, 1, 131}, extents{40, 17, 1}})
      check_passes<float, none>({{e.n}, e.c, e.s, order});
}

TEST_CASE("Rows that begin and end within packs, by batches of these and one after the other") {
  auto const check = [&]<class T>(T) {
    for (auto const most : {gpu::detail::known::nothing, gpu::detail::known::aligned, gpu::detail::known::whole})
      for (std::int64_t const spatial : {49, 64, 196, 7}) {
        pass_case of{{3}, 5, spatial};
        of.how.known = most;
        for (of.offset = 0; of.offset < 4; of.offset += 3) {
          of.y_offset = of.offset;
          check_passes<T, none>(of);
          of.in_place = of.masked = of.residual = true;
          of.slope = 0.5;
          check_passes<T, linear>(of);
          of.in_place = of.masked = of.residual = false;
          of.slope = 1;
        }
        of.offset = of.y_offset = 1, of.on_chip = true, of.masked = true;
        check_passes<T, linear>(of);
        of.order = arrangement::nhwc, of.channels = 32, of.offset = of.y_offset = 0, of.on_chip = false;
        check_passes<T, linear>(of);
        of.on_chip = true;
        check_passes<T, linear>(of);
      }
  };
  check(float{}), check(double{}), check(bfloat16{});
}

TEST_CASE("Kernels take every element type, alignment and number of ranks") {
  auto const check = [&]<class T>(T) {
    for (std::int64_t const offset : {0, 1, 3})
      for (auto const order : {arrangement::nchw, arrangement::nhwc, arrangement::padded_channels})
        check_passes<T, none>({{2, 0, 3}, 19, 21, order, offset, offset == 3 ? 2 : offset});
    pass_case of{{1, 2}, 16, 24, arrangement::nhwc};
    of.masked = of.residual = of.in_place = true;
    of.slope = 0.1;
    check_passes<T, linear>(of);
    of.order = arrangement::nchw;
    of.in_place = false;
    of.slope = 0;
    check_passes<T, linear>(of);
    of.outputs = masked_outputs::normalized;
    of.spatial = 47;
    check_passes<T, linear>(of);
  };
  check(float{}), check(bfloat16{});
  check(double{}), check(float16{});
}

TEST_CASE("Blocks of as many threads as there is work for") {
  for (std::int64_t const spatial : {20, 60, 400}) {
    pass_case of{{3, 2}, 2, spatial};
    of.how.threads = 128;
    of.how.blocks = 2;
    check_passes<float, none>(of);
    of.samples = {4};
    of.on_chip = true;
    check_passes<float, none>(of);
  }
}

TEST_CASE("Maps of as many channels at a time as a block has threads") {
  auto const check = [&]<class T>(T, std::int64_t channels) {
    for (int const threads : {64, 128, 256}) {
      pass_case of{{3, 2}, channels, 5, arrangement::nhwc};
      of.how.map_threads = threads;
      check_passes<T, none>(of);
    }
  };
  check(float{}, 253), check(float{}, 70), check(bfloat16{}, 256), check(double{}, 61);
}

TEST_CASE("A channel of more pieces than a warp has lanes") {
  pass_case of{{1}, 1, 24000};
  of.how.blocks = 90;
  of.how.order = 2;
  check_passes<float, none>(of);
}

TEST_CASE("Backward without exchange, and without what is not needed") {
  pass_case of{{2, 3, 1}, 5, 30};
  of.exchange = false;
  check_passes<float, none>(of);
  of.residual = true;
  of.dx = false;
  check_passes<float, linear>(of);
  of.dx = true, of.dresidual = false;
  check_passes<float, linear>(of);
}

TEST_CASE("Rows of 16-bit elements that are multiples of 8 bytes") {
  auto const check = [&]<class T>(T) {
    for (std::int64_t const spatial : {4, 12, 196})
      for (int const room : {256, 1 << 15}) { // for several pieces, or one
        pass_case of{{7, 0, 3}, 5, spatial};
        of.how.limits.shared_per_block = 2 * (2048 + room);
        of.how.order = 3;
        check_passes<T, none>(of);
        of.slope = 0.25;
        check_passes<T, linear>(of);
        of.residual = of.in_place = true;
        check_passes<T, linear>(of);
        of.samples = {9}, of.how.early = true;
        check_passes<T, linear>(of);
        of.masked = true;
        check_passes<T, linear>(of);
      }
  };
  check(float16{}), check(bfloat16{});
}

TEST_CASE("Short rows by columns") {
  auto const check = [&]<class T, epilogue_kind Kind>(T, std::integral_constant<epilogue_kind, Kind>, pass_case of) {
    for (auto const& how : {launching{}, launching{.blocks = 40, .order = 1}, launching{.least = 0}}) {
      of.how = how;
      check_passes<T, Kind>(of);
    }
  };
  std::integral_constant<epilogue_kind, none> const plain{};
  std::integral_constant<epilogue_kind, linear> const with_epilogue{};
  check(bfloat16{}, plain, {.samples = {40, 8, 61}, .channels = 16, .spatial = 7});
  check(bfloat16{}, with_epilogue,
        {.samples = {40, 0, 31}, .channels = 24, .spatial = 9, .residual = true, .slope = 0.25});
  check(bfloat16{}, plain, {.samples = {48}, .channels = 6, .spatial = 49 * 4, .in_place = true});
  check(float16{}, plain, {.samples = {29, 30}, .channels = 40, .spatial = 7, .y_offset = 8});
  check(float{}, plain, {.samples = {21, 8}, .channels = 12, .spatial = 31});
  check(float{}, plain, {.samples = {64, 9}, .channels = 5, .spatial = 8}); // of whole packs
  check(float{}, with_epilogue, {.samples = {39, 0, 41, 3}, .channels = 8, .spatial = 7, .residual = true, .slope = 0});
  check(double{}, plain, {.samples = {8, 31}, .channels = 6, .spatial = 15, .in_place = true});
}

TEST_CASE("The second kernel of one rank begins before the first has ended") {
  auto const check = [&]<class T>(T) {
    for (auto const order : {arrangement::nchw, arrangement::nhwc, arrangement::padded_channels}) {
      pass_case of{{6}, 19, 37, order};
      of.how.early = true;
      check_passes<T, none>(of);
      of.channels = 32;
      check_passes<T, none>(of);
      of.slope = 0.1, of.residual = of.in_place = true;
      check_passes<T, linear>(of);
      of.how.limits.shared_per_block = 16 << 10; // which have no room for packs on their way
      of.masked = true;
      check_passes<T, linear>(of);
      of.masked = of.in_place = false;
      check_passes<T, linear>(of);
    }
  };
  check(float{}), check(double{}), check(bfloat16{});
}

TEST_CASE("The cumulative average, one rank to seven, several orders of blocks, and parameters of 16 bits") {
  for (unsigned order = 0; order < 5; ++order) {
    pass_case of{{1, 0, 2, 1, 3, 1, 1}, 21, 40, order % 2 == 0 ? arrangement::nchw : arrangement::nhwc};
    of.samples.resize(order + 3);
    of.options.momentum = {};
    of.how.order = order;
    of.how.blocks = 60;
    check_passes<float, none, float>(of);
    check_passes<float, none, float>(of.unbiased());
    check_passes<bfloat16, none, bfloat16>(of);
    check_passes<float16, none, double>(of);
  }
}

TEST_CASE("One rank's channels on the chip") {
  auto const check = [&]<class T>(T) {
    pass_case of{{5}, 3, 49};
    of.on_chip = true;
    for (std::int64_t const offset : {0, 1}) {
      of.offset = of.y_offset = offset;
      check_passes<T, none>(of);
    }
    of.spatial = 52, of.offset = of.y_offset = 0, of.in_place = true;
    check_passes<T, none>(of);
    of.order = arrangement::every_other, of.in_place = false;
    of.masked = of.residual = true;
    of.slope = 0.1;
    check_passes<T, linear>(of);
    of.order = arrangement::nchw, of.outputs = masked_outputs::normalized;
    of.options.momentum = {};
    of.how.order = 3;
    check_passes<T, linear>(of);
    check_passes<T, linear>(of.unbiased());
    of.slope = 0.75;
    check_passes<T, exponential>(of);
    of.order = arrangement::nhwc, of.residual = false;
    check_passes<T, exponential>(of);
  };
  check(float{}), check(double{}), check(bfloat16{});
}

TEST_CASE("One rank's channels on the chip, each on several multiprocessors") {
  auto const check = [&]<class T>(T) {
    for (int const blocks : {2, 4, 8})
      for (std::int64_t const spatial : {49, 52, 256}) {
        pass_case of{{9}, 3, spatial};
        of.on_chip = true;
        of.how.limits.cluster_blocks = blocks;
        of.how.limits.shared_per_block =
            2 * (2048 + static_cast<int>(9 * spatial * static_cast<int>(sizeof(T))) / blocks);
        of.offset = of.y_offset = spatial == 49 ? 1 : 0;
        check_passes<T, none>(of);
        of.masked = of.residual = of.in_place = true;
        of.slope = 0.1;
        of.options.momentum = {};
        of.how.order = 3;
        check_passes<T, linear>(of);
      }
  };
  check(float{}), check(double{}), check(bfloat16{});
}

TEST_CASE("One rank's channels on the chip, of rows that are accessed by units of each size") {
  auto const check = [&]<class T>(T) {
    for (std::int64_t const bytes : {16, 24, 12, 14, 98}) {
      if (bytes % static_cast<std::int64_t>(sizeof(T)) != 0) continue;
      for (int const blocks : {1, 4, 8}) {
        std::int64_t const samples = blocks == 8 ? 3 : 13; // some of 8 blocks have nothing
        pass_case of{{samples}, 2, bytes / static_cast<std::int64_t>(sizeof(T))};
        of.on_chip = true;
        of.how.limits.cluster_blocks = blocks;
        if (blocks > 1) of.how.limits.shared_per_block = 3 * 2048 + (blocks == 8 ? 0 : static_cast<int>(20 * bytes));
        check_passes<T, none>(of);
        of.slope = 0.25;
        of.residual = blocks != 4, of.dx = bytes != 24, of.dresidual = bytes != 14;
        of.how.order = 3;
        check_passes<T, linear>(of);
        if (blocks != 1) continue;
        of.y_offset = 1; // whose rows begin elsewhere than those of x
        check_passes<T, linear>(of);
      }
    }
  };
  check(float{}), check(double{}), check(bfloat16{});
}

TEST_CASE("What threads add up in float, and what rounding the mean lost, is made up for in double") {
  for (auto const order : {arrangement::nchw, arrangement::nhwc}) {
    // A thread that has met 2²⁴ loses ones until it puts what it has into its double: fewer than 96 of its 400.
    std::int64_t const channels = order == arrangement::nchw ? 1 : 4, spatial = 64 * 400;
    std::vector<float> ones(static_cast<std::size_t>(channels * spatial), 1), x(ones.size());
    auto dy = ones;
    for (std::int64_t c = 0; c < channels; ++c) dy[static_cast<std::size_t>(c * spatial)] = 0x1p24F;
    // The mean, a third of the last bit of its elements above 2²⁰, is no float, and Σ(x − mean) is 0.
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0x1p20F + (i % 3 == 0 ? 0.125F : 0);
    for (bool const of_ones : {false, true}) {
      rank_memory<float> rank{channels, 1};
      tensor<float> xs{order, 1, channels, spatial, x, 0}, dys{order, 1, channels, spatial, of_ones ? ones : dy, 0};
      add_tensor(rank.machine.memory, "x", xs.view());
      add_tensor(rank.machine.memory, "dy", dys.view());
      for (std::int64_t c = 0; c < channels; ++c) {
        double above = 0; // exact
        for (std::int64_t i = 0; i < spatial; ++i) above += x[static_cast<std::size_t>(c * spatial + i)] - 0x1p20F;
        rank.mean[static_cast<std::size_t>(c)] = 0x1p20 + above / static_cast<double>(spatial);
      }
      auto const op =
          gpu::detail::make_backward_sums<float, none>(dys.view(), xs.view(), rank.affine(), {}, rank.saved());
      launching how;
      how.blocks = 1;
      run_reduction(rank.machine,
                    gpu::detail::make_reduction(op, header_of(channels, spatial), rank.packet_data(), rank.workspace(),
                                                {2, 1 << 16}, 64),
                    how);
      auto const* const sums = rank.packet.data() + sizeof(syncnorm::detail::packet_header) / sizeof(double);
      for (std::int64_t c = 0; c < channels; ++c) {
        auto const expected = static_cast<double>(spatial) + (of_ones ? 0 : 0x1p24 - 1);
        CHECK(std::abs(sums[c] - expected) < (of_ones ? 0.5 : 96));
        if (of_ones) CHECK(std::abs(sums[channels + c]) < 1e-3);
      }
    }
  }
}
