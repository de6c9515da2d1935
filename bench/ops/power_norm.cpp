// power_norm on one rank, in the warm-up and after it, with and without groups, beside the floor of its bytes.

#include <array>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include <syncnorm/host/openmp.hpp>
#include <syncnorm/ops/power_norm.hpp>

#include "support/harness.hpp"
#include "support/passes.hpp"

namespace {

int threads = 2;

/// Rows of both passes; `with` may say warmup and groups.
void add(std::vector<bench::row>& rows, std::string const& with, std::string const& layout,
         std::array<std::int64_t, 3> shape) {
  for (std::string const op : {"forward", "backward"}) {
    bench::row_key const key{op + with, layout, "float", shape, "self", 1, threads};
    bench::add_row<float>(rows, key, [=](bench::rank_tensors<float> const& data) -> bench::contender::step {
      using layer_type = syncnorm::power_norm<float, syncnorm::self_communicator, syncnorm::host::openmp_executor>;
      syncnorm::power_norm_options norm{.warmup_iters = 0};
      if (with.find("warmup") != std::string::npos) norm.warmup_iters = 1'000'000'000;
      if (with.find("groups") != std::string::npos) norm.groups = 8;
      auto const layer = std::make_shared<layer_type>(syncnorm::self_communicator{}, key.shape[1],
                                                      syncnorm::power_norm_layer_options{.norm = norm},
                                                      syncnorm::host::openmp_executor{threads});
      return bench::layer_step<float>(key, data, layer);
    });
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv, {"threads"});
    if (how.others.contains("threads")) threads = bench::whole_number("--threads", how.others.at("threads"));
    omp_set_num_threads(threads);
    using shape = std::array<std::int64_t, 3>;
    shape const tokens{16384, 1024, 1}, sequences{64, 1024, 512};
    std::vector<bench::row> rows;
    add(rows, "", "NC", tokens);
    add(rows, "+warmup", "NC", tokens);
    add(rows, "+groups", "NC", tokens);
    if (!how.quick) {
      add(rows, "", "NHWC", sequences);
      add(rows, "+groups", "NHWC", sequences);
      add(rows, "", "NCHW", sequences);
      add(rows, "+groups", "NCHW", sequences);
    }
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.ops.power_norm: " << error.what() << '\n';
    return 1;
  }
}
