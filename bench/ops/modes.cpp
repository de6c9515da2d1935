// batch_norm on one rank over micro-batches by one statistic, by constant statistics, of complex numbers, and double backward, beside the
// floor of their bytes.

#include <array>
#include <complex>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <omp.h>

#include <syncnorm/host/openmp.hpp>
#include <syncnorm/ops/complex_batch_norm.hpp>

#include "support/harness.hpp"
#include "support/passes.hpp"

namespace {

int threads = 2;

template <class T>
using layer_of = syncnorm::batch_norm<T, syncnorm::self_communicator, syncnorm::host::openmp_executor>;

template <class T>
[[nodiscard]] std::shared_ptr<layer_of<T>> make_layer(bench::row_key const& key) {
  return std::make_shared<layer_of<T>>(syncnorm::self_communicator{}, key.shape[1],
                                       syncnorm::batch_norm_layer_options{}, syncnorm::host::openmp_executor{threads});
}

/// Passes over four micro-batches, which are the samples of one tensor; the floor is that of the whole tensor.
template <class T>
void add_micro_batches(std::vector<bench::row>& rows, std::string const& layout, std::array<std::int64_t, 3> shape) {
  for (std::string const op : {"forward", "backward"}) {
    bench::row_key const key{op + "+4_batches", layout, bench::type_name<T>(), shape, "self", 1, threads};
    bench::add_row<T>(rows, key, [=](bench::rank_tensors<T> const& data) -> bench::contender::step {
      auto const layer = make_layer<T>(key);
      auto const has_run = std::make_shared<bool>(false);
      return [=](int) {
        auto const& tensor = data->front();
        constexpr std::size_t batches = 4;
        auto const length = key.shape[0] / static_cast<std::int64_t>(batches);
        std::array<syncnorm::tensor_view<T const>, batches> x, dy;
        std::array<syncnorm::tensor_view<T>, batches> out;
        for (std::size_t k = 0; k < batches; ++k) {
          auto const first = static_cast<std::int64_t>(k) * length;
          x[k] = bench::view_of(key, tensor.x).sample_range(first, length);
          dy[k] = bench::view_of(key, tensor.dy).sample_range(first, length);
          out[k] = bench::view_of(key, tensor.out).sample_range(first, length);
        }
        if (op == "forward" || !*has_run) layer->forward(x, out);
        *has_run = true;
        if (op == "backward") layer->backward(x, dy, out);
      };
    });
  }
}

/// Passes by constant statistics, with the gradients of gamma and beta.
template <class T>
void add_evaluation(std::vector<bench::row>& rows, std::string const& layout, std::array<std::int64_t, 3> shape) {
  for (std::string const op : {"forward", "backward"}) {
    bench::row_key const key{op + "+eval", layout, bench::type_name<T>(), shape, "self", 1, threads};
    bench::add_row<T>(rows, key, [=](bench::rank_tensors<T> const& data) -> bench::contender::step {
      auto const layer = make_layer<T>(key);
      layer->eval();
      return bench::layer_step<T>(key, data, layer);
    });
  }
}

using number = std::complex<float>;
using complex_layer = syncnorm::complex_batch_norm<float, syncnorm::self_communicator, syncnorm::host::openmp_executor>;

/// A layer of complex numbers, whose gamma is complex where the name of what it does ends so.
[[nodiscard]] std::shared_ptr<complex_layer> make_complex_layer(bench::row_key const& key) {
  using syncnorm::gamma_numbers;
  return std::make_shared<complex_layer>(syncnorm::self_communicator{}, key.shape[1],
                                         syncnorm::batch_norm_layer_options{}, syncnorm::host::openmp_executor{threads},
                                         key.op.ends_with("gamma") ? gamma_numbers::complex : gamma_numbers::real);
}

/// Passes over complex numbers, by a real and by a complex gamma.
void add_complex(std::vector<bench::row>& rows, std::string const& layout, std::array<std::int64_t, 3> shape) {
  for (std::string const op : {"forward", "backward", "forward+complex_gamma", "backward+complex_gamma"}) {
    bench::row_key const key{op, layout, bench::type_name<number>(), shape, "self", 1, threads};
    bench::add_row<number>(rows, key, [=](bench::rank_tensors<number> const& data) -> bench::contender::step {
      return bench::layer_step<number>(key, data, make_complex_layer(key));
    });
  }
}

/// Double backward, which reads x, dy and the gradient u with respect to dx, and writes those to dy and to x, by steps
/// `make_step(key)`, each of which is called with (first, x, dy, u, to_dy, to_x).
template <class T, class MakeStep>
void add_double_backward(std::vector<bench::row>& rows, std::string const& op, std::string const& layout,
                         std::array<std::int64_t, 3> shape, MakeStep const& make_step) {
  bench::row_key const key{op, layout, bench::type_name<T>(), shape, "self", 1, threads};
  std::vector<bench::traffic> const traffic{{3, 3, 2}};
  double const bytes = bench::floor_bytes<T>(key, traffic);
  auto const make = [=] {
    auto const data = bench::make_tensors<T>(key);
    auto const more = std::make_shared<std::vector<bench::buffer<T>>>();
    for (std::uint32_t seed : {21U, 22U}) more->emplace_back(bench::tensors<T>::size(key), seed);
    auto const steps = bench::iterations_for(bytes);
    auto const ours = [=] {
      auto const step = make_step(key);
      auto const has_run = std::make_shared<bool>(false);
      return [=](int) {
        auto const& tensor = data->front();
        step(!std::exchange(*has_run, true), bench::view_of(key, tensor.x), bench::view_of(key, tensor.dy),
             bench::view_of(key, (*more)[0]), bench::view_of(key, tensor.out), bench::view_of(key, (*more)[1]));
      };
    };
    std::vector<bench::contender> contenders{{"ours", ours, steps, bench::settling_steps}};
    bench::add_floors<T>(contenders, key, traffic, [=](int) {
      auto const& tensor = data->front();
      return bench::moved_tensors{{tensor.x.data(), tensor.dy.data(), (*more)[0].data()},
                                  {tensor.out.data(), (*more)[1].data()}};
    });
    return contenders;
  };
  rows.push_back({key, bytes, make});
}

template <class T>
void add_double_backward_of_real(std::vector<bench::row>& rows, bool activates, std::string const& layout,
                                 std::array<std::int64_t, 3> shape) {
  add_double_backward<T>(rows, activates ? "double_backward+relu" : "double_backward", layout, shape,
                         [=](bench::row_key const& key) {
                           syncnorm::batch_norm_epilogue<T> epilogue;
                           if (activates) epilogue.activation = syncnorm::activation::relu();
                           return [=, layer = make_layer<T>(key)](bool first, auto const& x, auto const& dy,
                                                                  auto const& u, auto const& to_dy, auto const& to_x) {
                             if (first) layer->forward(x, to_x, epilogue);
                             layer->double_backward({.dx = u}, x, dy, to_dy, to_x, epilogue);
                           };
                         });
}

void add_double_backward_of_complex(std::vector<bench::row>& rows, std::string const& layout,
                                    std::array<std::int64_t, 3> shape) {
  for (std::string const op : {"double_backward", "double_backward+complex_gamma"})
    add_double_backward<number>(rows, op, layout, shape, [](bench::row_key const& key) {
      return [layer = make_complex_layer(key)](bool first, auto const& x, auto const& dy, complex_layer::input const& u,
                                               auto const& to_dy, auto const& to_x) {
        if (first) layer->forward(x, to_x);
        layer->double_backward({.dx = {&u, 1}}, x, dy, to_dy, to_x);
      };
    });
}

} // namespace

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv, {"threads"});
    if (how.others.contains("threads")) threads = bench::whole_number("--threads", how.others.at("threads"));
    omp_set_num_threads(threads);
    std::array<std::int64_t, 3> const images{32, 256, 3136};
    std::vector<bench::row> rows;
    for (char const* layout : {"NCHW", "NHWC"}) {
      if (how.quick && std::string{layout} == "NHWC") continue;
      add_micro_batches<float>(rows, layout, images);
      add_evaluation<float>(rows, layout, images);
      add_complex(rows, layout, {32, 128, 3136});
      for (bool const activates : {false, true}) add_double_backward_of_real<float>(rows, activates, layout, images);
      add_double_backward_of_complex(rows, layout, {32, 128, 3136});
    }
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.ops.modes: " << error.what() << '\n';
    return 1;
  }
}
