// The local primitives, two threads, each beside the traffic that it cannot avoid.

#include <array>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <omp.h>

#include <syncnorm/host/backward_elemt.hpp>
#include <syncnorm/host/backward_reduce.hpp>
#include <syncnorm/host/local_moments.hpp>
#include <syncnorm/host/normalize.hpp>
#include <syncnorm/host/openmp.hpp>

#include "support/floor.hpp"
#include "support/harness.hpp"
#include "support/passes.hpp"

namespace {

constexpr int threads = 2;

/// The statistics of the channels.
struct statistics {
  explicit statistics(std::int64_t channels)
      : mean(static_cast<std::size_t>(channels), 0.25), m2(mean), inv_std(mean.size(), 1.7), sum_dy(mean),
        sum_dy_xmu(mean) {}

  std::vector<double> mean, m2, inv_std, sum_dy, sum_dy_xmu;
};

template <class T>
void add(std::vector<bench::row>& rows, std::string const& op, std::string const& layout,
         std::array<std::int64_t, 3> shape) {
  bench::row_key const key{op, layout, bench::type_name<T>(), shape, "self", 1, threads};
  bool const two = op.starts_with("backward"), writes = op == "normalize" || op == "backward_elemt";
  auto const tensor_bytes = static_cast<double>(bench::tensors<T>::size(key)) * sizeof(T);
  double const bytes = tensor_bytes * (1 + two + writes);
  auto const make = [=] {
    auto const data = bench::make_tensors<T>(key);
    auto const run = [=] {
      auto const values = std::make_shared<statistics>(key.shape[1]);
      std::vector<T> const gamma(static_cast<std::size_t>(key.shape[1]), T{1}), beta(gamma.size(), T{0});
      return [=](int) {
        namespace host = syncnorm::host;
        host::openmp_executor const exec{threads};
        auto const& tensor = data->front();
        auto const x = bench::view_of(key, tensor.x), dy = bench::view_of(key, tensor.dy);
        auto const out = bench::view_of(key, tensor.out);
        auto& v = *values;
        syncnorm::affine_parameters<T> const affine{gamma, beta};
        using fixed = std::span<double const>;
        if (op == "local_moments") host::local_moments<T>(exec, x, v.mean, v.m2);
        if (op == "normalize") host::normalize<T>(exec, x, out, fixed{v.mean}, fixed{v.inv_std}, affine);
        if (op == "backward_reduce") host::backward_reduce<T>(exec, dy, x, fixed{v.mean}, v.sum_dy, v.sum_dy_xmu);
        if (op == "backward_elemt")
          host::backward_elemt<T>(exec, dy, x, out, fixed{v.mean}, fixed{v.inv_std}, std::span<T const>{gamma},
                                  fixed{v.sum_dy}, fixed{v.sum_dy_xmu}, x.count());
      };
    };
    auto const floor = [=] {
      return [=](int) {
        auto const& tensor = data->front();
        auto const n = static_cast<std::int64_t>(tensor_bytes);
        if (writes)
          bench::floor_copy(tensor.out.data(), tensor.x.data(), two ? tensor.dy.data() : nullptr, n, threads);
        else
          bench::floor_read(tensor.x.data(), two ? tensor.dy.data() : nullptr, n, threads);
      };
    };
    auto const steps = bench::iterations_for(bytes);
    return std::vector<bench::contender>{{"ours", run, steps, bench::settling_steps},
                                         {"floor", floor, steps, bench::settling_steps}};
  };
  rows.push_back({key, bytes, make});
}

} // namespace

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv);
    omp_set_num_threads(threads);
    std::vector<bench::row> rows;
    for (std::string const op : {"local_moments", "normalize", "backward_reduce", "backward_elemt"})
      for (std::string const layout : {"NCHW", "NHWC"}) {
        add<float>(rows, op, layout, {32, 256, 3136});
        if (!how.quick) add<double>(rows, op, layout, {32, 256, 3136});
      }
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.host: " << error.what() << '\n';
    return 1;
  }
}
