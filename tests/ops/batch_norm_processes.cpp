#include <ops/over_processes.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/host/compiled_primitives.hpp>

#include <ops/complex_case.hpp>
#include <ops/complex_host_case.hpp>
#include <ops/complex_second_order.hpp>
#include <ops/double_backward_cases.hpp>
#include <ops/epilogue_cases.hpp>
#include <ops/grid.hpp>
#include <ops/micro_batches.hpp>
#include <ops/pending_cases.hpp>

namespace test {

void check_batch_norm_over_processes(syncnorm::any_communicator const& world) {
  int const rank = syncnorm::rank(world);
  for (int const ranks : {1, 2, 3, 4, 7}) {
    if (ranks > syncnorm::size(world)) break;
    auto const comm = syncnorm::split(world, rank < ranks ? 1 : 0);
    if (rank >= ranks) continue;
    // The element types take turns, since the oracle is asked on every rank.
    int turn = ranks;
    for_each_case(ranks, [&](grid_case const& cell) {
      if (++turn % 2 == 0)
        for (auto const& failure : run_case(case_data<float>{cell}, comm)) FAIL_CHECK(failure);
      else
        for (auto const& failure : run_case(case_data<double>{cell}, comm)) FAIL_CHECK(failure);
      // The exchange is the same for all types; one size shows that it is.
      if (cell.channels == 128)
        for (auto const& failure : run_case(case_data<syncnorm::bfloat16>{cell}, comm)) FAIL_CHECK(failure);
    });
    if (ranks < 2) continue;
    // Under either policy, with as many ranks as there are shares.
    for (auto const& shares : micro_batch_shares)
      for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce})
        if (static_cast<int>(shares.size()) == ranks) {
          for (auto const& failure : check_micro_batches<float>(comm, shares, layout::nhwc, 150, policy))
            FAIL_CHECK(failure);
          complex_case of{shares, 70, 5, layout::nchw, {.eps = 1e-3, .momentum = 0.3, .exchange = policy}};
          for (auto const gamma : {syncnorm::gamma_numbers::real, syncnorm::gamma_numbers::complex}) {
            of.gamma = gamma;
            for (auto const& failure : run_complex_case<float>(of, comm)) FAIL_CHECK(failure);
            complex_second_order_case<double> second{of};
            second.of.channels = 2;
            for (auto const& failure : check_complex_double_backward(second, comm)) FAIL_CHECK(failure);
          }
        }
    if (ranks > 3) continue;
    for (std::size_t k = 0; k < epilogue_choices.size(); ++k) {
      epilogue_case<float> const data{{ranks, 140, 5, 9, partitions[k % 3], k % 2 == 0 ? layout::nhwc : layout::nchw},
                                      epilogue_choices[k]};
      for (auto const& failure : run_epilogue_case(data, comm)) FAIL_CHECK(failure);
    }
    for (auto const policy : {syncnorm::exchange_policy::gather, syncnorm::exchange_policy::reduce}) {
      for (auto const& failure : check_two_phases(comm, policy)) FAIL_CHECK(failure);
      for (auto const& failure : check_groups(comm, policy)) FAIL_CHECK(failure);
      for (auto const& failure : check_abandoned(comm, 200, policy)) FAIL_CHECK(failure);
      std::vector<std::int64_t> const shares =
          ranks == 2 ? std::vector<std::int64_t>{3, 2} : std::vector<std::int64_t>{0, 3, 1};
      for (auto const& failure : check_double_backward(comm, second_order_case{shares}, policy)) FAIL_CHECK(failure);
    }
  }
  syncnorm::barrier(world);
  if (syncnorm::size(world) == 1) return;

  for (std::int64_t const channels : {3, 200}) {
    std::vector<float> values(static_cast<std::size_t>(4 * 2 * channels), 1.0F);
    auto const spoiled = [&](bool null, std::int64_t own_channels) -> std::string {
      syncnorm::batch_norm<float, syncnorm::any_communicator> layer{world, own_channels};
      auto x = syncnorm::nchw(values.data(), 2, own_channels, 4);
      auto const y = x;
      if (null) x.data = nullptr;
      try {
        layer.forward(x, y);
      } catch (syncnorm::mismatch_error const& error) {
        return error.what();
      } catch (syncnorm::invalid_argument_error const& error) {
        return error.what();
      }
      return "nothing thrown";
    };
    auto const null = spoiled(rank == 1, channels);
    CHECK_MESSAGE(null.find("rank 1: x is null") != std::string::npos, null);
    auto const mismatch = spoiled(false, rank == 1 ? channels - 1 : channels);
    CHECK_MESSAGE(mismatch.find("rank 1 has " + std::to_string(channels - 1)) != std::string::npos, mismatch);
  }
}

std::function<void(syncnorm::any_communicator const&)> batch_norm_check(int ranks) {
  std::vector<case_data<float>> floats;
  std::vector<case_data<double>> doubles;
  int turn = ranks; // the element types take turns, since the oracle is the slowest part
  for_each_case(ranks, [&](grid_case const& cell) {
    if (++turn % 2 == 0)
      floats.emplace_back(cell);
    else
      doubles.emplace_back(cell);
  });
  return [floats = std::move(floats), doubles = std::move(doubles)](syncnorm::any_communicator const& comm) {
    auto const check = [&](auto const& cases) {
      for (auto const& data : cases)
        for (auto const& failure : run_case(data, comm)) FAIL_CHECK(failure);
    };
    check(floats);
    check(doubles);
  };
}

} // namespace test
