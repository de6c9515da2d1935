// What nvcc compiles of a consumer. Without a GPU, the layer says so.

#include <cstdio>
#include <vector>

#include <syncnorm/syncnorm.cuh>

namespace gpu = syncnorm::cuda;
using view = syncnorm::tensor_view<float>;
using input = syncnorm::tensor_view<float const>;
using epilogue = syncnorm::batch_norm_epilogue<float>;

bool can_make_a_layer() {
  int devices = 0;
  bool const has_gpu = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
  try {
    gpu::batch_norm<float> const layer{{}, 3};
    return has_gpu;
  } catch (syncnorm::cuda_error const& e) {
    std::puts(e.what());
    return !has_gpu;
  }
}

// The primitives have the names of the host's. Called by nobody.
void name_all(gpu::reduced_packets const& sums, gpu::gathered_headers const& headers, gpu::fault_report const& report,
              cudaStream_t stream) {
  gpu::load_kernels<float>();
  gpu::load_double_backward_kernels<float>();
  (void)&gpu::local_moments<float>, (void)&gpu::normalize<float>, (void)&gpu::normalize_constant<float>;
  (void)&gpu::backward_reduce<float>, (void)&gpu::backward_elemt<float>;
  (void)&gpu::double_backward_reduce<float>, (void)&gpu::double_backward_elemt<float>;
  (void)&gpu::forward_alone<float>, (void)&gpu::backward_alone<float>;
  (void)&gpu::keep<float>, (void)&gpu::recover<float>;
  gpu::accept_sums(sums, report, stream);
  gpu::agree_on_group(headers, true, report, stream);
}

// Passes without a layer. Called by nobody.
void run_without_a_layer(view x, view y, epilogue const& done, cudaStream_t stream) {
  syncnorm::self_communicator const alone;
  auto const limits = gpu::current_limits();
  gpu::batch_norm_workspace workspace{x.channels, 1, limits, gpu::workspace_bytes(x.channels, limits)};
  gpu::batch_norm_saved saved{x.channels};
  syncnorm::affine_parameters<float> const affine;
  syncnorm::running_statistics<float> const running;
  gpu::batch_norm_forward(alone, x, y, affine, running, {}, done, saved, workspace, stream);
  gpu::batch_norm_backward(alone, y, x, y, x, affine, syncnorm::affine_gradients<float>{}, done, {}, saved, workspace,
                           stream);
  gpu::batch_norm_inference(x, y, affine, running.mean, running.var, {}, done, saved, workspace, stream);
}

// Every way to run a pass. Called by nobody.
void run_all(gpu::batch_norm<float>& layer, view x, view y, epilogue const& done, cudaStream_t stream) {
  layer.forward(x, y, done, stream);
  layer.backward(x, y, y, done, y, {}, stream);
  layer.forward_in_place(x, done, stream);
  layer.backward_in_place(x, y, y, done, y, {}, stream);
  std::vector<input> const in{x, x};
  std::vector<view> const out{y, y};
  std::vector<epilogue> const each{done, done};
  layer.forward(in, out, each, stream);
  layer.backward(in, in, out, each, out, {}, stream);
  layer.double_backward({}, x, x, y, y, done, {}, stream);
  layer.double_backward({}, in, in, out, out, each, {}, stream);
  layer.begin_forward(x, y, done, stream).finish(stream);
  layer.begin_backward(x, y, y, done, y, {}, stream).finish(stream);
  gpu::batch_norm_group group{layer.comm()};
  group.run(gpu::passes(layer.plan_forward(x, y, done), layer.plan_forward(in, out, each)), stream);
  group.run(gpu::passes(layer.plan_backward(x, y, y, done, y), layer.plan_backward(in, in, out, each, out)), stream);
}
