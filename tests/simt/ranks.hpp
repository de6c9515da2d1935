#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <host/tensors.hpp>
#include <simt/machine.hpp>
#include <support/epilogue_oracle.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/cuda/detail/prepare.hpp>
#include <syncnorm/cuda/operands.hpp>

namespace test {

namespace gpu = syncnorm::cuda;
using gpu::detail::axis;

/// How kernels are launched here: with fewer threads and more, shorter pieces than on a GPU.
struct launching {
  std::int64_t blocks = 12; ///< wanted in all
  std::int64_t least = 1;   ///< packs of a thread
  unsigned order = 0;       ///< in which blocks run
  int threads = 64;         ///< of a block of packs along positions, at most
  int map_threads = 64;     ///< of a block of a map of packs along channels
  gpu::device_limits limits{2, 1 << 16};
  bool early = false; ///< a map begins before the reduction has ended
  /// What kernels know of packs at most.
  gpu::detail::known known = gpu::detail::known::whole;
};

/// The access that the host finds out, or less.
template <class... Ops>
void set_access(gpu::detail::geometry& cut, launching const& how, Ops const&... ops) {
  gpu::detail::set_access(cut, ops...);
  cut.whole = cut.whole && how.known == gpu::detail::known::whole;
  cut.aligned = cut.aligned && how.known != gpu::detail::known::nothing;
}

template <class T>
void add_tensor(simt::memory& to, std::string const& name, syncnorm::tensor_view<T> const& t) {
  if (t.data == nullptr || t.size() == 0) return;
  auto const reach = (t.samples - 1) * t.stride_n + (t.channels - 1) * t.stride_c + (t.spatial - 1) * t.stride_s + 1;
  to.add(name, t.data, static_cast<std::size_t>(reach));
}

/// Threads of a block of packs along channels, and at most of one of packs along positions.
inline constexpr int few_threads = 64, most_threads = 128;

template <class Op>
void run_reduction(simt::machine& on, gpu::detail::reduce_arguments<Op> a, launching const& how) {
  bool const along_positions = gpu::detail::axis_of(a.op.lead()) == axis::positions;
  if (a.cut.groups != 0 && how.least != 0) {
    auto const made = a.cut;
    a.cut = gpu::detail::cut_tensor(a.op.lead(), along_positions ? how.threads : few_threads, how.blocks, how.least,
                                    gpu::detail::most_pieces, made.lanes);
    a.cut.columns = made.columns;
  }
  set_access(a.cut, how, a.op);
  if (a.cut.groups != 0 && how.known == gpu::detail::known::whole)
    gpu::detail::cut_by_units(a.cut, a.op, how.threads, gpu::detail::most_pieces, how.limits);
  auto const bytes = static_cast<std::size_t>(gpu::detail::unit_bytes(a.op, a.cut));
  simt::launch_shape const shape{std::max(1u, a.cut.blocks()), a.cut.threads, bytes, how.order};
  if (along_positions)
    on.launch(shape, [&](auto const& hw) { gpu::detail::reduce_kernel<Op, axis::positions, most_threads>(hw, a); });
  else
    on.launch(shape, [&](auto const& hw) { gpu::detail::reduce_kernel<Op, axis::channels, few_threads>(hw, a); });
}

template <class Op>
void run_map(simt::machine& on, gpu::detail::map_arguments<Op> a, launching const& how) {
  bool const along_positions = gpu::detail::axis_of(a.op.lead()) == axis::positions;
  if (how.least != 0) {
    auto const columns = a.cut.columns;
    int const most_lanes = gpu::detail::map_lanes<typename Op::element_type>(how.map_threads);
    a.cut = gpu::detail::cut_tensor(a.op.lead(), along_positions ? how.threads : how.map_threads, how.blocks, how.least,
                                    std::int64_t{1} << 20, gpu::detail::lanes_of_lines(a.op.lead(), most_lanes));
    a.cut.columns = columns;
  }
  set_access(a.cut, how, a.op);
  gpu::detail::set_stream(a.cut, a.op, how.limits);
  simt::launch_shape shape{std::max(1u, a.cut.blocks()), a.cut.threads, 0, how.order};
  shape.dynamic_shared = static_cast<std::size_t>(gpu::detail::stream_bytes<Op>(a.cut));
  shape.early = how.early;
  if (along_positions)
    on.launch(shape, [&](auto const& hw) { gpu::detail::map_kernel<Op, axis::positions>(hw, a); });
  else
    on.launch(shape, [&](auto const& hw) { gpu::detail::map_kernel<Op, axis::channels>(hw, a); });
}

/// Runs a pass of one rank whose channels stay on the chip.
template <class Sums, class Map>
void run_fused(simt::machine& on, gpu::detail::fused_arguments<Sums, Map> a, launching const& how) {
  set_access(a.cut, how, a.sums, a.map);
  auto const bytes = static_cast<std::size_t>(gpu::detail::kept_bytes(a.sums, a.cut));
  simt::launch_shape const shape{a.cut.blocks(), a.cut.threads, bytes, how.order, static_cast<int>(a.cut.pieces)};
  if (gpu::detail::axis_of(a.sums.lead()) == axis::positions)
    on.launch(shape,
              [&](auto const& hw) { gpu::detail::fused_kernel<Sums, Map, axis::positions, most_threads>(hw, a); });
  else
    on.launch(shape, [&](auto const& hw) { gpu::detail::fused_kernel<Sums, Map, axis::channels, few_threads>(hw, a); });
}

/// What a pass has in device memory on one rank besides its tensors.
template <class P>
struct rank_memory {
  std::vector<double> mean, inv_std, packet, work;
  std::vector<P> gamma, beta, running_mean, running_var, gamma_gradient, beta_gradient;
  std::int64_t count = 99, batches = 3;
  syncnorm::batch_variance normalized_by = syncnorm::batch_variance::biased;
  gpu::pass_fault fault = gpu::pass_fault::none;
  std::vector<syncnorm::detail::packet_header> headers;
  simt::machine machine;

  rank_memory(std::int64_t channels, int ranks, int values = 2, std::size_t pieces = 300)
      : mean(static_cast<std::size_t>(channels)), inv_std(mean),
        packet(32 + mean.size() * static_cast<std::size_t>(values)),
        work(mean.size() + 4 + pieces * 8 * (mean.size() + 64)), headers(static_cast<std::size_t>(ranks)) {
    for (std::size_t c = 0; c < mean.size(); ++c) {
      gamma.push_back(P(static_cast<float>(1 + 0.25 * static_cast<double>(c % 5))));
      beta.push_back(P(static_cast<float>(0.5 - 0.25 * static_cast<double>(c % 7))));
      running_mean.push_back(P(0.5f)), running_var.push_back(P(2.0f));
      gamma_gradient.push_back(P(1.0f)), beta_gradient.push_back(P(-1.0f));
    }
    register_all();
  }
  rank_memory(rank_memory const&) = delete;

  void register_all() {
    auto& to = machine.memory;
    to.clear();
    to.add("mean", mean.data(), mean.size());
    to.add("inv_std", inv_std.data(), inv_std.size());
    to.add("packet", packet.data(), packet.size());
    to.add("work", reinterpret_cast<std::uint32_t*>(work.data()), 2 * work.size());
    to.add("gamma", gamma.data(), gamma.size());
    to.add("beta", beta.data(), beta.size());
    to.add("running_mean", running_mean.data(), running_mean.size());
    to.add("running_var", running_var.data(), running_var.size());
    to.add("gamma_gradient", gamma_gradient.data(), gamma_gradient.size());
    to.add("beta_gradient", beta_gradient.data(), beta_gradient.size());
    to.add("count", &count, 1);
    to.add("batches", &batches, 1);
    to.add("fault", reinterpret_cast<std::uint32_t*>(&fault), 1);
    to.add("headers", reinterpret_cast<std::uint64_t*>(headers.data()), 32 * headers.size());
  }

  [[nodiscard]] gpu::workspace workspace() { return {work.data(), work.size() * sizeof(double)}; }
  [[nodiscard]] std::byte* packet_data() { return reinterpret_cast<std::byte*>(packet.data()); }
  [[nodiscard]] gpu::saved_statistics saved() { return {mean.data(), inv_std.data(), &count, normalized_by}; }
  [[nodiscard]] gpu::affine_values affine() {
    return {gpu::channel_values{gamma.data()}, gpu::channel_values{beta.data()}};
  }
  [[nodiscard]] gpu::running_outputs running() {
    return {gpu::channel_outputs{running_mean.data()}, gpu::channel_outputs{running_var.data()}, &batches};
  }
  [[nodiscard]] gpu::affine_outputs gradients() {
    return {gpu::channel_outputs{gamma_gradient.data()}, gpu::channel_outputs{beta_gradient.data()}};
  }
  [[nodiscard]] gpu::fault_report report() { return {&fault, headers.data()}; }
};

/// The packets of all ranks, as an allgather leaves them.
template <class Ranks>
std::vector<double> gather(Ranks const& ranks) {
  std::vector<double> all;
  for (auto const& rank : ranks) all.insert(all.end(), rank.packet.begin(), rank.packet.end());
  return all;
}

/// A header as all ranks have it.
inline syncnorm::detail::packet_header header_of(std::int64_t channels, std::int64_t count) {
  syncnorm::detail::packet_header header;
  std::ranges::copy(std::string{"a pass"}, header.pass.begin());
  header.channels = channels;
  header.count = count;
  header.eps = 1e-3;
  return header;
}

template <class T>
std::vector<long double> as_long(std::vector<T> const& values) {
  std::vector<long double> all;
  for (auto const& each : values) all.push_back(static_cast<long double>(static_cast<syncnorm::accumulate_t<T>>(each)));
  return all;
}

} // namespace test
