#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

#include "shapes_data_set.hpp"

namespace train_cifar {

/// What the ranks are and how they talk.
enum class backend_kind : std::uint8_t { threads, gloo, mpi, nccl };

/// Where the network is.
enum class device_kind : std::uint8_t { cpu, cuda };

/// Whose statistics normalize: those of the rank's own share of a batch, or those of the whole batch.
enum class batch_norm_kind : std::uint8_t { local, sync };

enum class number_kind : std::uint8_t { float32, float64 };

/// What to train, and how. The defaults are those of the command line.
struct options {
  std::filesystem::path data;
  std::filesystem::path data_cache;
  shapes_options shapes;

  int ranks = 2;
  backend_kind backend = backend_kind::gloo;
  device_kind device = device_kind::cpu;
  /// file:PATH or redis:HOST:PORT, where ranks that were started by somebody else meet.
  std::string rendezvous;
  /// Tells runs apart that meet at one rendezvous.
  std::string prefix = "syncnorm";
  /// The network interface that Gloo binds to. Empty: loopback for ranks started here, else the host's address.
  std::string interface;
  std::chrono::milliseconds timeout{60000};

  batch_norm_kind batch_norm = batch_norm_kind::sync;
  /// Samples of one pass forward and backward, over all ranks.
  std::size_t batch_size = 64;
  /// Passes whose gradients make one step.
  std::size_t grad_accumulation = 1;
  /// Samples of one step, of so many images at most.
  [[nodiscard]] std::size_t step_samples(std::size_t images) const {
    return batch_size > images / grad_accumulation ? images : batch_size * grad_accumulation;
  }
  std::size_t epochs = 5;
  /// At most so many steps an epoch.
  std::size_t steps = std::numeric_limits<std::size_t>::max();
  double learning_rate = 0.05;
  std::uint64_t seed = 1;
  number_kind dtype = number_kind::float32;

  std::filesystem::path record;
  std::size_t record_steps = 5;
  std::filesystem::path result;
  bool evaluate = true;
  bool quiet = false;
};

[[nodiscard]] inline char const* name_of(backend_kind backend) {
  switch (backend) {
  case backend_kind::threads:
    return "threads";
  case backend_kind::gloo:
    return "Gloo";
  case backend_kind::mpi:
    return "MPI";
  case backend_kind::nccl:
    return "NCCL";
  }
  return "";
}

} // namespace train_cifar
