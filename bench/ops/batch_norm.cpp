// batch_norm on one rank, beside its floor and the peers.

#include <array>
#include <cstdint>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <omp.h>

#include <syncnorm/host/openmp.hpp>

#include "support/harness.hpp"
#include "support/passes.hpp"
#include "support/peers.hpp"

namespace {

int threads = 2;

#if defined(SYNCNORM_BENCH_PORTABLE)
std::string const suffix = " (x86-64)";
#else
std::string const suffix;
#endif

void add_peers([[maybe_unused]] std::vector<bench::contender>& contenders,
               [[maybe_unused]] bench::peer_problem const& problem, [[maybe_unused]] std::int64_t steps) {
#if SYNCNORM_BENCH_ONEDNN
  if (!problem.is_double) {
    std::vector<std::string> layouts{"nchw", "nhwc", "nChw16c"};
    if (problem.channels_last) layouts = {"nhwc"};
    if (problem.spatial == 1) layouts.push_back("nc");
    for (auto const& layout : layouts)
      contenders.push_back({"onednn/" + layout,
                            [=] {
                              auto const step = bench::onednn_batch_norm(problem, layout);
                              return [=](int) { step(); };
                            },
                            steps, bench::settling_steps / 2});
  }
#endif
#if SYNCNORM_BENCH_TORCH
  contenders.push_back({"torch",
                        [=] {
                          auto const step = bench::torch_batch_norm(problem, threads);
                          return [=](int) { step(); };
                        },
                        std::max<std::int64_t>(1, steps / 4)});
#endif
}

template <class T>
void add(std::vector<bench::row>& rows, std::string const& layout, std::array<std::int64_t, 3> shape) {
  for (char const* op : {"forward", "backward"}) {
    bench::row_key const key{op + suffix, layout, bench::type_name<T>(), shape, "self", 1, threads};
    auto const make = [key] {
      auto const data = bench::make_tensors<T>(key);
      syncnorm::host::openmp_executor const exec{threads};
      auto const self = [](int) { return syncnorm::self_communicator{}; };
      auto const steps = bench::iterations_for(bench::floor_bytes<T>(key));
      std::vector<bench::contender> contenders{
          {"ours", [=] { return bench::syncnorm_step<T>(key, data, self, exec); }, steps, bench::settling_steps}};
      bench::add_floors<T>(contenders, key, bench::traffic_of(key), bench::tensors_of<T>(data));
      if (suffix.empty()) {
        auto const& tensor = data->front();
        add_peers(contenders,
                  {.samples = key.shape[0],
                   .channels = key.shape[1],
                   .spatial = key.shape[2],
                   .channels_last = key.layout == "NHWC",
                   .is_double = std::is_same_v<T, double>,
                   .backward = bench::passes{key}.backward,
                   .x = tensor.x.data(),
                   .dy = tensor.dy.data(),
                   .out = tensor.out.data()},
                  steps);
      }
      return contenders;
    };
    rows.push_back({key, bench::floor_bytes<T>(key), make});
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv, {"threads"});
    if (how.others.contains("threads")) threads = bench::whole_number("--threads", how.others.at("threads"));
    omp_set_num_threads(threads);
    using shape = std::array<std::int64_t, 3>;
    std::vector<shape> const large{{32, 64, 12544}, {32, 256, 3136}, {32, 512, 784}};
    // A quick run leaves to a full one what differs least from the rest.
    bool const all = !how.quick, native = suffix.empty();
    std::vector<bench::row> rows;
    for (auto const& each : large) add<float>(rows, "NCHW", each);
    for (auto const& each : large)
      if (all || native || each == large[1]) add<float>(rows, "NHWC", each);
    if (all || native) {
      add<float>(rows, "NCHW", {32, 2048, 49});
      add<float>(rows, "NC", {4096, 1024, 1});
    }
    for (auto const& each : large)
      if (all || (native && each == large[1])) add<double>(rows, "NCHW", each);
    for (auto const& each : large)
      if (all) add<double>(rows, "NHWC", each);
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.ops: " << error.what() << '\n';
    return 1;
  }
}
