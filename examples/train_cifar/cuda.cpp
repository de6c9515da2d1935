#include "cuda.hpp"

#include <syncnorm/core/error.hpp>

#if TRAIN_CIFAR_HAVE_CUDA
#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <unistd.h>

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/adapters/nccl_error.hpp>
#include <syncnorm/adapters/staged.hpp>
#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/torch/cuda.hpp>

#include "in_order.hpp"
#endif

namespace train_cifar {

#if TRAIN_CIFAR_HAVE_CUDA

c10::Device cuda_device(syncnorm::any_communicator const& comm, options const& opts) {
  char name[64] = "";
  ::gethostname(name, sizeof name - 1);
  auto const hosts = gather_lines(comm, name);
  auto const own = hosts.begin() + syncnorm::rank(comm);
  int devices = 0;
  if (auto const code = cudaGetDeviceCount(&devices); code != cudaSuccess || devices == 0)
    throw syncnorm::error{std::string{"--device cuda: there is no GPU on "} + name + ": " + cudaGetErrorString(code)};
  if (opts.backend == backend_kind::threads && syncnorm::size(comm) > devices)
    throw syncnorm::error{"--device cuda: ranks that are threads take a GPU each, of which there are " +
                          std::to_string(devices)}; // autograd has one thread for each
  auto const index = std::count(hosts.begin(), own, *own) % devices;
  cudaSetDevice(static_cast<int>(index));
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

void use_cuda(torch::nn::Module& network, syncnorm::any_communicator const& comm, options const& opts) {
  if (opts.backend != backend_kind::nccl || syncnorm::size(comm) == 1)
    return syncnorm::torch::use_cuda(network, syncnorm::staged<syncnorm::any_communicator>{comm});
  ncclUniqueId id{};
  if (syncnorm::rank(comm) == 0 && ncclGetUniqueId(&id) != ncclSuccess) throw syncnorm::error{"ncclGetUniqueId failed"};
  syncnorm::broadcast(comm, std::span<std::byte>{std::as_writable_bytes(std::span{id.internal})}, 0);
  ncclComm_t made = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0; // so that the timeout holds while ranks connect, too
  auto const code = ncclCommInitRankConfig(&made, syncnorm::size(comm), id, syncnorm::rank(comm), &config);
  if (code != ncclSuccess && code != ncclInProgress)
    throw syncnorm::error{std::string{"ncclCommInitRankConfig: "} + ncclGetErrorString(code)};
  syncnorm::torch::use_cuda(network, syncnorm::nccl_communicator::adopt(made, opts.timeout));
}

#else

c10::Device cuda_device(syncnorm::any_communicator const&, options const&) {
  throw syncnorm::error{
      "--device cuda: this train_cifar was built without CUDA; it takes a libtorch that has CUDA, nvcc, and "
      "NCCL"};
}
void use_cuda(torch::nn::Module&, syncnorm::any_communicator const&, options const&) {}

#endif

} // namespace train_cifar
