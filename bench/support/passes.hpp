#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <unistd.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm.hpp>

#include "support/buffer.hpp"
#include "support/floor.hpp"
#include "support/harness.hpp"

namespace bench {

template <class T>
[[nodiscard]] std::string type_name() {
  return std::string{syncnorm::element_traits<T>::name};
}

/// x, dy and the output of one rank: y of a forward pass, dx of a backward pass.
template <class T>
struct tensors {
  explicit tensors(row_key const& key, std::uint32_t rank = 0)
      : x{size(key), 3 * rank + 1}, dy{size(key), 3 * rank + 2}, out{size(key), 3 * rank + 3} {}

  static std::int64_t size(row_key const& key) { return key.shape[0] * key.shape[1] * key.shape[2]; }

  buffer<T> x, dy, out;
};

template <class T>
using rank_tensors = std::shared_ptr<std::vector<tensors<T>>>;

/// Tensors for the ranks that are threads of this process, or for the one that is this process. Rows of equal size that
/// follow each other get the same ones, since making them takes longer than measuring.
template <class T>
[[nodiscard]] rank_tensors<T> make_tensors(row_key const& key, int rank_threads = 1) {
  static rank_tensors<T> latest;
  if (latest && latest->size() == static_cast<std::size_t>(rank_threads) &&
      latest->front().x.size() == tensors<T>::size(key))
    return latest;
  latest.reset();
  auto made = std::make_shared<std::vector<tensors<T>>>();
  for (int r = 0; r < rank_threads; ++r) made->emplace_back(key, static_cast<std::uint32_t>(r));
  latest = made;
  return made;
}

template <class T>
[[nodiscard]] syncnorm::tensor_view<T> view_of(row_key const& key, buffer<T> const& data) {
  auto const [n, c, s] = key.shape;
  if (key.layout == "NCHW") return syncnorm::nchw(data.data(), n, c, s);
  if (key.layout == "NHWC") return syncnorm::nhwc(data.data(), n, c, s);
  if (key.layout == "NC") return syncnorm::nc(data.data(), n, c);
  throw std::invalid_argument{"layout " + key.layout};
}

/// The passes of a row.
struct passes {
  explicit passes(row_key const& key)
      : forward{key.op.find("forward") != std::string::npos}, backward{key.op.find("backward") != std::string::npos} {}

  bool forward, backward;
};

/// The tensors like x that a pass moves: for its sums it reads the first `summed` of them, for its results the first `read`,
/// and it writes `written`.
struct traffic {
  std::int64_t summed, read, written;
};

/// That of the passes of a row which do nothing else; by constant statistics nothing has to be read for sums first.
[[nodiscard]] inline std::vector<traffic> traffic_of(row_key const& key) {
  passes const wanted{key};
  bool const constant = key.op.find("+eval") != std::string::npos;
  std::vector<traffic> all;
  if (wanted.forward) all.push_back({constant ? 0 : 1, 1, 1});
  if (wanted.backward) all.push_back({constant ? 0 : 2, 2, 1});
  return all;
}

/// Whether a pass has to read twice what it sums: the narrowest block of channels that can be read on its own, one channel
/// or those of a cache line, does not fit the second-level cache of a core.
template <class T>
[[nodiscard]] bool reads_twice(row_key const& key, traffic const& pass) {
  static std::int64_t const cache = std::max<std::int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 20);
  auto const [n, c, s] = key.shape;
  auto const bytes = static_cast<std::int64_t>(sizeof(T));
  std::int64_t const narrowest = key.layout == "NCHW" ? bytes : std::min<std::int64_t>(64, c * bytes);
  return n * s * narrowest * pass.summed > cache;
}

/// Bytes that passes cannot help moving.
template <class T>
[[nodiscard]] double floor_bytes(row_key const& key, std::vector<traffic> const& of) {
  std::int64_t all = 0;
  for (auto const& pass : of) all += (reads_twice<T>(key, pass) ? pass.summed : 0) + pass.read + pass.written;
  return static_cast<double>(all * tensors<T>::size(key)) * sizeof(T);
}
template <class T>
[[nodiscard]] double floor_bytes(row_key const& key) {
  return floor_bytes<T>(key, traffic_of(key));
}

/// The exchange policy that a row names, or else what the cost model says.
[[nodiscard]] inline syncnorm::exchange_policy policy_of(row_key const& key) {
  if (key.op.find("+gather") != std::string::npos) return syncnorm::exchange_policy::gather;
  if (key.op.find("+reduce") != std::string::npos) return syncnorm::exchange_policy::reduce;
  return syncnorm::exchange_policy::automatic;
}

/// The passes of a row by the layer of a rank; a backward pass alone needs one forward pass before it, on every rank.
template <class T, class Layer>
[[nodiscard]] contender::step layer_step(row_key const& key, rank_tensors<T> data, std::shared_ptr<Layer> layer) {
  auto const has_run = std::make_shared<bool>(false);
  passes const wanted{key};
  return [=](int rank) {
    auto const& tensor = (*data)[static_cast<std::size_t>(rank)];
    auto const x = view_of(key, tensor.x), dy = view_of(key, tensor.dy), out = view_of(key, tensor.out);
    if (wanted.forward || !*has_run) layer->forward(x, out);
    *has_run = true;
    if (wanted.backward) layer->backward(x, dy, out);
  };
}

/// One layer per rank, each stepped by its own thread. `comm_of(rank)` gives the communicators.
template <class T, class CommOf, class E>
[[nodiscard]] contender::step syncnorm_step(row_key const& key, rank_tensors<T> data, CommOf const& comm_of, E exec) {
  using layer_type = syncnorm::batch_norm<T, std::invoke_result_t<CommOf const&, int>, E>;
  syncnorm::batch_norm_layer_options const options{.norm = {.exchange = policy_of(key)}};
  std::vector<contender::step> steps;
  for (int r = 0; r < static_cast<int>(data->size()); ++r)
    steps.push_back(layer_step<T>(key, data, std::make_shared<layer_type>(comm_of(r), key.shape[1], options, exec)));
  return [=](int rank) { steps[static_cast<std::size_t>(rank)](rank); };
}

/// The tensors of a rank whose `traffic` counts, in the order in which passes take them.
struct moved_tensors {
  std::vector<void const*> in;
  std::vector<void*> out;
};

/// The copies that passes cannot avoid, after a reading where they have to read twice; `once`: without that. Each tensor
/// that is written takes one or two of those that are read.
template <class T, class TensorsOf>
[[nodiscard]] contender::step floor_step(row_key const& key, std::vector<traffic> const& of,
                                         TensorsOf const& tensors_of, bool once = false) {
  return [=](int rank) {
    moved_tensors const moved = tensors_of(rank);
    std::int64_t const bytes = tensors<T>::size(key) * static_cast<std::int64_t>(sizeof(T));
    for (auto const& pass : of) {
      auto const in = [&](std::int64_t i, std::int64_t end) {
        return i < end ? moved.in[static_cast<std::size_t>(i)] : nullptr;
      };
      if (!once && reads_twice<T>(key, pass))
        for (std::int64_t i = 0; i < pass.summed; i += 2)
          floor_read(in(i, pass.summed), in(i + 1, pass.summed), bytes, key.threads);
      std::int64_t const each = (pass.read + pass.written - 1) / pass.written;
      for (std::int64_t j = 0; j < pass.written; ++j)
        floor_copy(moved.out[static_cast<std::size_t>(j)], in(each * j, pass.read),
                   each == 2 ? in(2 * j + 1, pass.read) : nullptr, bytes, key.threads);
    }
  };
}
/// x, dy and the output of each rank.
template <class T>
[[nodiscard]] auto tensors_of(rank_tensors<T> data) {
  return [=](int rank) {
    auto const& own = (*data)[static_cast<std::size_t>(rank)];
    return moved_tensors{{own.x.data(), own.dy.data()}, {own.out.data()}};
  };
}
template <class T>
[[nodiscard]] contender::step floor_step(row_key const& key, rank_tensors<T> data) {
  return floor_step<T>(key, traffic_of(key), tensors_of<T>(data));
}

/// The floor of passes as a contender, and, where they have to read twice, that which reads once as another.
template <class T, class TensorsOf>
void add_floors(std::vector<contender>& to, row_key const& key, std::vector<traffic> const& of,
                TensorsOf const& tensors_of) {
  auto const steps = iterations_for(floor_bytes<T>(key, of));
  to.push_back({"floor", [=] { return floor_step<T>(key, of, tensors_of); }, steps, settling_steps});
  if (std::ranges::any_of(of, [&](auto const& pass) { return reads_twice<T>(key, pass); }))
    to.push_back({"floor_once", [=] { return floor_step<T>(key, of, tensors_of, true); }, steps, settling_steps});
}

/// A row of one rank that moves x, dy and the output, and nothing else; `step_over(data)` makes ours.
template <class T, class StepOver>
void add_row(std::vector<row>& rows, row_key const& key, StepOver const& step_over) {
  auto const make = [=] {
    auto const data = make_tensors<T>(key);
    auto const steps = iterations_for(floor_bytes<T>(key));
    std::vector<contender> contenders{{"ours", [=] { return step_over(data); }, steps, settling_steps}};
    add_floors<T>(contenders, key, traffic_of(key), tensors_of<T>(data));
    return contenders;
  };
  rows.push_back({key, floor_bytes<T>(key), make});
}

/// What every row of several ranks compares: ours, the floor, and ours on each rank by itself at the same time.
template <class T, class CommOf, class E = syncnorm::host::serial_executor>
[[nodiscard]] std::vector<contender> rank_contenders(row_key const& key, rank_tensors<T> data, CommOf comm_of,
                                                     E exec = {}) {
  auto const steps = iterations_for(floor_bytes<T>(key));
  return {{"ours", [=] { return syncnorm_step<T>(key, data, comm_of, exec); }, steps, settling_steps},
          {"alone",
           [=] {
             return syncnorm_step<T>(
                 key, data, [](int) { return syncnorm::self_communicator{}; }, exec);
           },
           steps},
          {"floor", [=] { return floor_step<T>(key, data); }, steps, settling_steps}};
}

} // namespace bench
