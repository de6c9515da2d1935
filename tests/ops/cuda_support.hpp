#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/adapters/nccl.hpp>
#include <syncnorm/adapters/staged.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/ops/cuda_batch_norm_layer.hpp>

#include "cuda/fake_nccl.hpp"
#include "cuda/layer_cases.hpp"
#include "cuda/simt_kernels.hpp"
#include "support/message_of.hpp"

// The layer itself and the kernels' source, on the CPU: kernels run on the interpreter, the CUDA runtime and NCCL are
// stand-ins, ranks are threads. Nothing here runs on a GPU.
namespace test {

template <class C>
using layer_over = syncnorm::cuda::basic_batch_norm<float, C, float, simt_kernels>;
using staged_threads = syncnorm::staged<syncnorm::thread_communicator>;
using syncnorm::nccl_communicator;

/// f(comm) on a thread for each of `size` ranks. Where one throws, all are aborted, lest the others wait for it.
inline void over_nccl(int size, std::function<void(nccl_communicator const&)> const& f) {
  std::vector<nccl_communicator> ranks;
  for (auto* const comm : fake_nccl::make_group(size)) ranks.push_back(nccl_communicator::adopt(comm));
  std::vector<std::jthread> threads;
  for (auto const& rank : ranks)
    threads.emplace_back([&] {
      try {
        f(rank);
      } catch (std::exception const& e) {
        FAIL_CHECK("rank " << rank.rank() << ": " << std::string{e.what()});
        for (auto const& each : ranks) each.abort();
      }
    });
}
inline void over_threads(int size, std::function<void(staged_threads const&)> const& f) {
  syncnorm::run_ranks(size, [&](auto const& threads) { f(staged_threads{threads}); });
}

/// Unloads all kernels, so that none of what follows is to launch one for the first time: that may wait for the device.
inline void unload_kernels() {
  simt_kernels::unload();
  fake_cuda::reset();
}
inline void check_no_first_launches() { CHECK(fake_cuda::calls("first launch") == 0); }

inline void check_no_violations() {
  for (auto const& what : fake_cuda::noted()) FAIL_CHECK(what);
}

using test_support::thrown;

} // namespace test
