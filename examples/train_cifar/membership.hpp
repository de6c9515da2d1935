#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include <syncnorm/core/error.hpp>

#include "options.hpp"

namespace train_cifar {

/// How this process comes to its rank.
enum class membership_kind : std::uint8_t {
  alone,   ///< it is the only rank
  threads, ///< its threads are the ranks
  starter, ///< it starts the ranks as processes, and is none itself
  gloo,    ///< it is one rank of several, which meet at the rendezvous over Gloo
  mpi      ///< it is one rank of MPI_COMM_WORLD
};

struct membership {
  membership_kind kind = membership_kind::alone;
  int rank = 0, ranks = 1;
};

/// Reads an environment; nullptr where a name has no value.
using environment = std::function<char const*(char const*)>;

namespace detail {

/// The number of the first of `names` that is set, or `missing`.
inline int number_of(environment const& env, std::initializer_list<char const*> names, int missing) {
  for (char const* name : names) {
    char const* const text = env(name);
    if (text == nullptr) continue;
    std::string_view const digits{text};
    int value = 0;
    auto const [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (status != std::errc{} || end != digits.data() + digits.size() || value < 0)
      throw syncnorm::invalid_argument_error{std::string{name} + " is '" + text + "', expected a number"};
    return value;
  }
  return missing;
}

} // namespace detail

/// Decides from the options and the environment what this process is. `backend_chosen`: whether the user named one.
[[nodiscard]] inline membership find_membership(options const& opts, bool backend_chosen, environment const& env) {
  using syncnorm::invalid_argument_error;
  if (opts.backend == backend_kind::nccl && opts.device != device_kind::cuda)
    throw invalid_argument_error{"--backend nccl exchanges between GPUs: it needs --device cuda"};
  if (int const ranks = detail::number_of(env, {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, 0); ranks > 0) {
    if (backend_chosen && opts.backend != backend_kind::mpi)
      throw invalid_argument_error{"mpirun has started this process: only --backend mpi can join its ranks"};
    return {membership_kind::mpi, detail::number_of(env, {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}, 0), ranks};
  }
  if (opts.backend == backend_kind::mpi)
    throw invalid_argument_error{"--backend mpi joins the ranks that mpirun starts: mpirun -n " +
                                 std::to_string(opts.ranks) + " train_cifar --backend mpi ..."};

  int const ranks = detail::number_of(env, {"WORLD_SIZE"}, 0);
  int const rank = detail::number_of(env, {"RANK"}, -1);
  if (opts.rendezvous.empty()) {
    if (ranks > 0 && rank >= 0)
      throw invalid_argument_error{"RANK and WORLD_SIZE are set: --rendezvous must say where the ranks meet"};
    if (opts.ranks == 1) return {};
    if (opts.backend == backend_kind::threads) return {membership_kind::threads, 0, opts.ranks};
    return {membership_kind::starter, 0, opts.ranks};
  }
  if (opts.backend != backend_kind::gloo && opts.backend != backend_kind::nccl)
    throw invalid_argument_error{"--rendezvous is for --backend gloo and nccl"};
  if (ranks < 1 || rank < 0 || rank >= ranks)
    throw invalid_argument_error{
        "--rendezvous needs RANK and WORLD_SIZE in the environment, 0 <= RANK < WORLD_SIZE; they are " +
        std::to_string(rank) + " and " + std::to_string(ranks)};
  return {membership_kind::gloo, rank, ranks};
}

} // namespace train_cifar
