// batch_norm on one rank with 16-bit elements, activations, residuals and masks, and in place, beside the floor of its
// bytes.

#include <array>
#include <cstdint>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <omp.h>

#include <syncnorm/core/half.hpp>
#include <syncnorm/host/openmp.hpp>

#include "support/harness.hpp"
#include "support/passes.hpp"

namespace {

int threads = 2;

/// What a row does besides normalizing, by the words in its name: relu, elu, residual, padded, scattered.
template <class T>
struct extras {
  extras(bench::row_key const& key) : has_residual{key.op.find("residual") != std::string::npos} {
    auto const has = [&](char const* word) { return key.op.find(word) != std::string::npos; };
    if (has("+relu")) activation = syncnorm::activation::relu();
    if (has("+elu")) activation = syncnorm::activation::elu();
    if (has_residual) {
      residual.emplace_back(bench::tensors<T>::size(key), 11);
      residual.emplace_back(bench::tensors<T>::size(key), 12);
    }
    auto const [n, c, s] = key.shape;
    if (has("padded") || has("scattered"))
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t j = 0; j < s; ++j) {
          auto const random = static_cast<std::uint32_t>(i * s + j) * 0x9e3779b9U >> 29;
          mask.push_back((has("padded") ? j < s - s * i / (2 * n) : random != 0) ? 1 : 0);
        }
  }

  [[nodiscard]] syncnorm::batch_norm_epilogue<T> epilogue(bench::row_key const& key) const {
    syncnorm::batch_norm_epilogue<T> made{.activation = activation, .masked = syncnorm::masked_outputs::zero};
    if (has_residual) made.residual = bench::view_of(key, residual[0]);
    if (!mask.empty()) made.mask = syncnorm::mask_of(mask.data(), key.shape[0], key.shape[2]);
    return made;
  }

  bool has_residual;
  syncnorm::activation activation{};
  std::vector<bench::buffer<T>> residual; ///< and its gradient
  std::vector<std::uint8_t> mask;
};

template <class T>
void add(std::vector<bench::row>& rows, std::string const& with, std::string const& layout,
         std::array<std::int64_t, 3> shape) {
  bool const in_place = with == "+in_place"; // both passes, after which x is x again
  std::vector<std::string> const ops{in_place ? std::vector<std::string>{"forward+backward"}
                                              : std::vector<std::string>{"forward", "backward"}};
  for (auto const& op : ops) {
    bench::row_key const key{op + with, layout, bench::type_name<T>(), shape, "self", 1, threads};
    bool const residual = with.find("residual") != std::string::npos, backward = op == "backward";
    auto traffic = bench::traffic_of(key);
    bool const activates = with.find("relu") != std::string::npos; // else no gradient depends on the residual
    if (residual && !backward) traffic = {{1, 2, 1}};
    if (residual && backward) traffic = {activates ? bench::traffic{3, 3, 2} : bench::traffic{2, 2, 2}};
    double const bytes = bench::floor_bytes<T>(key, traffic);
    auto const make = [=] {
      auto const data = bench::make_tensors<T>(key);
      auto const more = std::make_shared<extras<T>>(key);
      syncnorm::host::openmp_executor const exec{threads};
      auto const steps = bench::iterations_for(bytes);
      auto const ours = [=] {
        using layer_type = syncnorm::batch_norm<T, syncnorm::self_communicator, syncnorm::host::openmp_executor>;
        auto const layer = std::make_shared<layer_type>(syncnorm::self_communicator{}, key.shape[1],
                                                        syncnorm::batch_norm_layer_options{}, exec);
        auto const has_run = std::make_shared<bool>(false);
        return [=](int) {
          auto const& tensor = data->front();
          auto const x = bench::view_of(key, tensor.x), dy = bench::view_of(key, tensor.dy);
          auto const out = bench::view_of(key, tensor.out);
          auto const epilogue = more->epilogue(key);
          if (in_place) {
            layer->forward_in_place(x);
            layer->backward_in_place(x, dy, out);
            return;
          }
          if (!backward || !*has_run) layer->forward(x, out, epilogue);
          *has_run = true;
          if (backward)
            layer->backward(x, dy, out, epilogue,
                            residual ? bench::view_of(key, more->residual[1]) : syncnorm::tensor_view<T>{});
        };
      };
      std::vector<bench::contender> contenders{{"ours", ours, steps, bench::settling_steps}};
      bench::add_floors<T>(contenders, key, traffic, [=](int) {
        auto const& tensor = data->front();
        bench::moved_tensors moved{{tensor.x.data()}, {tensor.out.data()}};
        if (backward || in_place) moved.in.push_back(tensor.dy.data());
        if (residual) moved.in.push_back(more->residual[0].data()), moved.out.push_back(more->residual[1].data());
        return moved;
      });
      return contenders;
    };
    rows.push_back({key, bytes, make});
  }
}

} // namespace

int main(int argc, char** argv) {
  try {
    auto const how = bench::parse(argc, argv, {"threads"});
    if (how.others.contains("threads")) threads = bench::whole_number("--threads", how.others.at("threads"));
    omp_set_num_threads(threads);
    using shape = std::array<std::int64_t, 3>;
    shape const images{32, 256, 3136}, small_images{32, 1024, 196}, half_lines{32, 512, 784}, sequences{64, 1024, 512};
    std::vector<bench::row> rows;
    for (char const* layout : {"NCHW", "NHWC"}) {
      if (how.quick && std::string{layout} == "NHWC") continue;
      add<syncnorm::bfloat16>(rows, "", layout, images);
      add<syncnorm::bfloat16>(rows, "", layout, half_lines);
      if (!how.quick) add<syncnorm::float16>(rows, "", layout, images);
      add<float>(rows, "+relu", layout, images);
      add<syncnorm::bfloat16>(rows, "+relu", layout, small_images);
      add<float>(rows, "+relu", layout, small_images);
      add<float>(rows, "+elu", layout, images);
      add<float>(rows, "+residual+relu", layout, images);
      if (!how.quick) add<syncnorm::bfloat16>(rows, "+residual+relu", layout, images);
      if (!how.quick) add<float>(rows, "+residual", layout, images);
      add<float>(rows, "+padded", layout, sequences);
      add<float>(rows, "+in_place", layout, images);
      if (!how.quick) add<float>(rows, "+scattered", layout, sequences);
    }
    return bench::run(how, rows);
  } catch (std::exception const& error) {
    std::cerr << "bench.ops.epilogue: " << error.what() << '\n';
    return 1;
  }
}
