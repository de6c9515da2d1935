#include "support/peers.hpp"

#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include <oneapi/dnnl/dnnl.hpp>

namespace bench {

namespace {

using dnnl::memory;

/// One pass in one layout, with all the memory that it works on.
class onednn_pass {
public:
  onednn_pass(peer_problem const& problem, memory::format_tag tag) : problem_{problem}, tag_{tag} {
    memory::dims extents{problem.samples, problem.channels};
    if (tag != memory::format_tag::nc) extents.insert(extents.end(), {problem.spatial, 1});
    memory::desc const tensor{extents, memory::data_type::f32, tag};
    memory::desc const per_channel{{problem.channels}, memory::data_type::f32, memory::format_tag::x};
    auto const flags = dnnl::normalization_flags::use_scale | dnnl::normalization_flags::use_shift;
    float const eps = 1e-5f;

    dnnl::batch_normalization_forward::primitive_desc const forward{
        {dnnl::prop_kind::forward_training, tensor, eps, flags}, engine_};
    auto const channel_memory = [&] {
      memory made{per_channel, engine_};
      auto* const values = static_cast<float*>(made.get_data_handle());
      for (std::int64_t c = 0; c < problem.channels; ++c) values[c] = 1;
      return made;
    };
    auto const x = tensor_memory(tensor, problem.x), mean = channel_memory(), variance = channel_memory();
    arguments_ = {{DNNL_ARG_SRC, x},
                  {DNNL_ARG_MEAN, mean},
                  {DNNL_ARG_VARIANCE, variance},
                  {DNNL_ARG_SCALE, channel_memory()},
                  {DNNL_ARG_SHIFT, channel_memory()}};
    auto const out = tensor_memory(tensor, problem.out);
    if (!problem.backward) {
      arguments_.emplace(DNNL_ARG_DST, out);
      pass_ = dnnl::batch_normalization_forward{forward};
      return;
    }
    auto first = arguments_;
    first.emplace(DNNL_ARG_DST, out);
    dnnl::batch_normalization_forward{forward}.execute(stream_, first);
    stream_.wait();
    arguments_.emplace(DNNL_ARG_DIFF_DST, tensor_memory(tensor, problem.dy));
    arguments_.emplace(DNNL_ARG_DIFF_SRC, out);
    arguments_.emplace(DNNL_ARG_DIFF_SCALE, channel_memory());
    arguments_.emplace(DNNL_ARG_DIFF_SHIFT, channel_memory());
    pass_ =
        dnnl::batch_normalization_backward{{{dnnl::prop_kind::backward, tensor, tensor, eps, flags}, engine_, forward}};
  }

  void operator()() {
    pass_.execute(stream_, arguments_);
    stream_.wait();
  }

private:
  [[nodiscard]] bool is_given_layout() const {
    // With one position in space they are all the same.
    if (problem_.spatial == 1) return tag_ != memory::format_tag::nChw16c;
    return tag_ == (problem_.channels_last ? memory::format_tag::nhwc : memory::format_tag::nchw);
  }

  /// The data themselves where they are in this layout, a copy where not.
  memory tensor_memory(memory::desc const& tensor, void* data) {
    if (is_given_layout()) return {tensor, engine_, data};
    memory copy{tensor, engine_};
    memory given{{tensor.dims(), memory::data_type::f32, memory::format_tag::nchw}, engine_, data};
    dnnl::reorder{given, copy}.execute(stream_, given, copy);
    stream_.wait();
    return copy;
  }

  peer_problem problem_;
  memory::format_tag tag_;
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::unordered_map<int, memory> arguments_;
  dnnl::primitive pass_;
};

} // namespace

peer_step onednn_batch_norm(peer_problem const& problem, std::string const& layout) {
  using tag = memory::format_tag;
  std::map<std::string, tag> const tags{
      {"nc", tag::nc}, {"nchw", tag::nchw}, {"nhwc", tag::nhwc}, {"nChw16c", tag::nChw16c}};
  return [pass = std::make_shared<onednn_pass>(problem, tags.at(layout))] { (*pass)(); };
}

} // namespace bench
