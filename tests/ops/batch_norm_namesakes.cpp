#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/batch_norm.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include <comm/namesakes.hpp>

namespace {

/// What steps of layers over such a communicator write.
template <class C>
std::vector<float> steps_over(C const& comm, syncnorm::exchange_policy policy) {
  constexpr std::int64_t channels = 4;
  std::vector<float> x(60), all;
  std::iota(x.begin(), x.end(), static_cast<float>(syncnorm::rank(comm)));
  auto const view = [](std::vector<float>& of) { return syncnorm::nchw(of.data(), 3, channels, 5); };
  auto const step = [&](auto& layer) {
    std::vector<float> y(x.size()), dx(x.size());
    layer.forward(view(x), view(y));
    layer.backward(view(x), view(x), view(dx));
    all.insert(all.end(), y.begin(), y.end());
    all.insert(all.end(), dx.begin(), dx.end());
  };
  syncnorm::batch_norm_layer_options options;
  options.norm.exchange = policy;
  syncnorm::batch_norm<float, C> batch{comm, channels, options};
  step(batch);
  syncnorm::power_norm<float, C> power{comm, channels};
  step(power);
  step(power);
  return all;
}

} // namespace

TEST_CASE("functions of a communicator's namespace that have the names of syncnorm's are not called") {
  using syncnorm::exchange_policy;
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    syncnorm::run_ranks(2, [&](syncnorm::thread_communicator const& threads) {
      namesakes::communicator const comm{threads};
      CHECK(steps_over(comm, policy) == steps_over(threads, policy));
      syncnorm::barrier(comm);
      float value = 3, sum = 0;
      syncnorm::broadcast(comm, std::span{&value, 1}, 1);
      syncnorm::reduce(comm, std::span<float const>{&value, 1}, std::span{&sum, 1}, 0);
      if (threads.rank() == 0) CHECK(sum == 6);
    });
}
