#pragma once

#include <c10/core/Device.h>

#include <syncnorm/comm/any.hpp>

#include "options.hpp"

namespace torch::nn {
class Module;
}

namespace train_cifar {

/// The GPU of a rank: those of a host are dealt out to its ranks in turn. Makes it the current device of this thread. Collective.
/// Throws syncnorm::error where there is none, or fewer than ranks that are threads, or where libtorch has no CUDA.
[[nodiscard]] c10::Device cuda_device(syncnorm::any_communicator const& comm, options const& opts);

/// Lets every SyncBatchNorm of the network take CUDA tensors of that device: over NCCL as the backend, whose ranks `comm` tells of each
/// other, else over `comm` itself, through memory of the host. Collective.
void use_cuda(torch::nn::Module& network, syncnorm::any_communicator const& comm, options const& opts);

} // namespace train_cifar
