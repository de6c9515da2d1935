#pragma once

// What a CUDA compiler needs: elements, tensors, communicators, and the operations on a GPU. Those on the host are in
// syncnorm.hpp, for sources that the host's compiler compiles.
#include <syncnorm/config.hpp>

#include <syncnorm/comm/any.hpp>
#include <syncnorm/comm/checked.hpp>
#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/self.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/cuda_batch_norm.cuh>
#include <syncnorm/version.hpp>
