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

/// Whether a pass that reads `inputs` tensors has to read them twice: the narrowest block of channels that can be read on
/// its own, one channel or those of a cache line, does not fit the second-level cache of a core.
template <class T>
[[nodiscard]] bool reads_twice(row_key const& key, std::int64_t inputs) {
  static std::int64_t const cache = std::max<std::int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 1 << 20);
  auto const [n, c, s] = key.shape;
  auto const bytes = static_cast<std::int64_t>(sizeof(T));
  std::int64_t const narrowest = key.layout == "NCHW" ? bytes : std::min<std::int64_t>(64, c * bytes);
  return n * s * narrowest * inputs > cache;
}

/// Bytes that the passes of a row cannot help moving.
template <class T>
[[nodiscard]] double floor_bytes(row_key const& key) {
  passes const wanted{key};
  int const forward = wanted.forward ? (reads_twice<T>(key, 1) ? 3 : 2) : 0;
  int const backward = wanted.backward ? (reads_twice<T>(key, 2) ? 5 : 3) : 0;
  return (forward + backward) * static_cast<double>(tensors<T>::size(key)) * sizeof(T);
}

/// The exchange policy that a row names, or else what the cost model says.
[[nodiscard]] inline syncnorm::exchange_policy policy_of(row_key const& key) {
  if (key.op.find("+gather") != std::string::npos) return syncnorm::exchange_policy::gather;
  if (key.op.find("+reduce") != std::string::npos) return syncnorm::exchange_policy::reduce;
  return syncnorm::exchange_policy::automatic;
}

/// One layer per rank, each stepped by its own thread. `comm_of(rank)` gives the communicators.
template <class T, class CommOf, class E>
[[nodiscard]] contender::step syncnorm_step(row_key const& key, rank_tensors<T> data, CommOf const& comm_of, E exec) {
  using comm = std::invoke_result_t<CommOf const&, int>;
  struct member {
    member(comm c, row_key const& key, E e)
        : layer{std::move(c), key.shape[1], {.norm = {.exchange = policy_of(key)}}, e} {}
    syncnorm::batch_norm<T, comm, E> layer;
    bool has_run = false;
  };
  std::vector<std::shared_ptr<member>> members;
  for (int r = 0; r < static_cast<int>(data->size()); ++r)
    members.push_back(std::make_shared<member>(comm_of(r), key, exec));
  passes const wanted{key};
  return [=](int rank) {
    auto& own = *members[static_cast<std::size_t>(rank)];
    auto const& tensor = (*data)[static_cast<std::size_t>(rank)];
    auto const x = view_of(key, tensor.x), dy = view_of(key, tensor.dy), out = view_of(key, tensor.out);
    // A backward pass alone needs one forward pass before it, on every rank.
    if (wanted.forward || !own.has_run) own.layer.forward(x, out);
    own.has_run = true;
    if (wanted.backward) own.layer.backward(x, dy, out);
  };
}

/// The copies that the passes of the row cannot avoid, after a reading where they have to read twice. `once`: without that.
template <class T>
[[nodiscard]] contender::step floor_step(row_key const& key, rank_tensors<T> data, bool once = false) {
  bool const forward_twice = !once && reads_twice<T>(key, 1), backward_twice = !once && reads_twice<T>(key, 2);
  return [=, wanted = passes{key}, threads = key.threads](int rank) {
    auto const& tensor = (*data)[static_cast<std::size_t>(rank)];
    auto const bytes = tensor.x.size() * static_cast<std::int64_t>(sizeof(T));
    if (wanted.forward && forward_twice) floor_read(tensor.x.data(), nullptr, bytes, threads);
    if (wanted.forward) floor_copy(tensor.out.data(), tensor.x.data(), nullptr, bytes, threads);
    if (wanted.backward && backward_twice) floor_read(tensor.x.data(), tensor.dy.data(), bytes, threads);
    if (wanted.backward) floor_copy(tensor.out.data(), tensor.x.data(), tensor.dy.data(), bytes, threads);
  };
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
