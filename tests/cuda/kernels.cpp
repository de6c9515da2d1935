#include <syncnorm/cuda/kernels.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/core/cuda_element.hpp>
#include <syncnorm/core/half.hpp>
#include <syncnorm/cuda/workspace.hpp>

#include <support/sanitized.hpp>

#include "ops/cuda_support.hpp"

// The primitives by themselves, over the interpreter.
namespace {

namespace cuda = syncnorm::cuda;
using cuda::pass_fault;

constexpr std::int64_t samples = 2, channels = 3, spatial = 20;

/// What the primitives of one rank take, in device memory.
template <class T = float>
struct operands {
  using kernels = cuda::kernels_of<T, test::simt_kernels>;
  template <class E>
  using buffer = test::device_buffer<E>;

  cuda::device_limits limits{4, 48 * 1024};
  buffer<T> values_x{numbers(1)}, values_y{numbers(2)}, values_dy{numbers(3)}, values_dx{numbers(4)},
      values_residual{numbers(5)};
  buffer<std::byte> packet_bytes{std::vector<std::byte>(cuda::packet_bytes(channels, 7))},
      work_bytes{std::vector<std::byte>(cuda::workspace_bytes(channels, limits))};
  buffer<double> mean{std::vector<double>(channels)}, inv_std{std::vector<double>(channels, 1)};
  buffer<float> running{std::vector<float>(2 * channels, 1)}, gradients_of{std::vector<float>(2 * channels, 1)};
  buffer<std::int64_t> counts{std::vector<std::int64_t>{samples * spatial, 0, 0, 0}};
  buffer<std::int32_t> list{channels};
  buffer<pass_fault> fault{std::vector{pass_fault::none}};
  buffer<syncnorm::detail::packet_header> headers{std::vector<syncnorm::detail::packet_header>(1)};
  test::stream on{};

  syncnorm::tensor_view<T> x = view(values_x), y = view(values_y), dx = view(values_dx), dresidual{}, to_dy{}, to_x{};
  syncnorm::tensor_view<T const> dy = view(values_dy);
  cuda::second_order<T> second{};
  syncnorm::batch_norm_epilogue<T> epilogue{};
  syncnorm::detail::packet_header header{};
  cuda::packet_place packet{packet_bytes.data()};
  cuda::gathered_packets packets = own_packet(packet);
  cuda::workspace work{work_bytes.data(), work_bytes.size()};
  cuda::saved_statistics saved{mean.data(), inv_std.data(), counts.data()};
  cuda::running_outputs tracked{cuda::channel_outputs{running.data()}, cuda::channel_outputs{running.data() + channels},
                                counts.data() + 1};
  cuda::affine_outputs gradients{cuda::channel_outputs{gradients_of.data()},
                                 cuda::channel_outputs{gradients_of.data() + channels}};
  cuda::kept_channels kept{list.data(), counts.data() + 2, values_dx.data(), 1};
  cuda::fault_report report{fault.data(), headers.data()};
  cuda::reduced_packets reduced{packets, packet, packet, nullptr, nullptr, channels};
  cuda::gathered_headers of_group{packet_bytes.data(), packet_bytes.data()};

  operands() {
    header.channels = channels;
    header.count = samples * spatial;
    header.eps = 1e-5;
  }

  static std::vector<T> numbers(std::uint64_t seed) {
    std::vector<T> all(samples * channels * spatial);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = T(static_cast<float>(test::noise(seed, i)));
    return all;
  }
  static syncnorm::tensor_view<T> view(buffer<T> const& of) {
    return syncnorm::nchw(of.data(), samples, channels, spatial);
  }

  void local_moments() { kernels::local_moments(x, epilogue.mask, header, packet, work, limits, on); }
  void normalize() { kernels::normalize(x, y, {}, epilogue, {}, packets, saved, tracked, report, work, limits, on); }
  void normalize_constant() {
    kernels::normalize_constant(x, y, {}, epilogue, {}, tracked.mean, tracked.var, saved, nullptr, report, limits, on);
  }
  void forward_alone() {
    kernels::forward_alone(x, y, {}, epilogue, {}, header, packet, saved, tracked, report, work, limits, on);
  }
  void backward_reduce() { kernels::backward_reduce(dy, x, {}, epilogue, saved, header, packet, work, limits, on); }
  void backward_elemt() {
    kernels::backward_elemt(dy, x, dx, dresidual, {}, epilogue, saved, packets, packet, gradients, report, limits, on);
  }
  void backward_alone() {
    kernels::backward_alone(dy, x, dx, dresidual, {}, epilogue, saved, header, packet, gradients, report, work, limits,
                            on);
  }
  void backward_constant() { kernels::backward_constant(dy, x, dx, dresidual, {}, epilogue, saved, limits, on); }
  void double_backward_reduce() {
    kernels::double_backward_reduce(second, dy, x, {}, epilogue, saved, header, packet, work, limits, on);
  }
  void double_backward_elemt() {
    kernels::double_backward_elemt(second, dy, x, to_dy, to_x, {}, epilogue, saved, packets, packet, gradients.gamma,
                                   report, limits, on);
  }
  void keep() { kernels::keep(x, {}, epilogue.activation, kept, limits, on); }
  void recover() { kernels::recover(y, epilogue, {}, saved, kept, limits, on); }
  void accept_sums() { kernels::accept_sums(reduced, report, on); }
  void agree_on_group() { kernels::agree_on_group(of_group, true, report, on); }
};

} // namespace

TEST_CASE(
    "a pass of one rank whose header has a fault reports it and writes nothing else, also where one launch would do") {
  for (bool const backward : {false, true})
    for (bool const faulty : {false, true}) {
      operands<> of;
      if (faulty) std::ranges::copy(std::string{"a fault"}, of.header.fault.begin());
      auto const state = [&] {
        return std::tuple{of.values_y.get(), of.values_dx.get(), of.running.get(), of.gradients_of.get(),
                          of.counts.get()[1]};
      };
      auto const before = state();
      fake_cuda::reset();
      backward ? of.backward_alone() : of.forward_alone();
      of.on.wait();
      CHECK(fake_cuda::calls("kernel") == (faulty ? 2 : 1));
      CHECK((state() == before) == faulty);
      CHECK((of.fault.get()[0] == pass_fault::disagreement) == faulty);
      CHECK(std::string{of.headers.get()[0].fault.data()} == (faulty ? "a fault" : ""));
      if (!backward) CHECK(of.counts.get()[0] == (faulty ? -1 : samples * spatial));
    }
  test::check_no_violations();
}

TEST_CASE("what no kernel can take is an error, and nothing is launched") {
  using all = operands<>;
  using spoil = std::function<void(all&)>;
  struct spoiled {
    void (all::*call)();
    spoil by;
    std::string message;
  };
  auto const no_x = [](all& of) { of.x.data = nullptr; };
  auto const flat_y = [](all& of) { of.y.spatial = 1; };
  auto const flat_dy = [](all& of) { of.dy.spatial = 1; };
  auto const flat_residual = [](all& of) { of.epilogue.residual = of.dy, of.epilogue.residual.spatial = 1; };
  auto const wide_mask = [](all& of) {
    of.epilogue.mask = syncnorm::mask_of(static_cast<std::uint8_t const*>(nullptr), samples, spatial + 1);
  };
  auto const crooked_packet = [](all& of) { of.packet.data += 4; };
  auto const no_packets = [](all& of) { of.packets.ranks = 0; };
  auto const little_work = [](all& of) { of.work.bytes = 16; };
  auto const no_saved = [](all& of) { of.saved.mean = nullptr; };
  auto const no_count = [](all& of) { of.saved.count = nullptr; };
  auto const no_residual = [](all& of) { of.dresidual = of.y; };
  auto const same_memory = [](all& of) { of.epilogue.residual = of.dy, of.dresidual = of.dx; };
  auto const no_list = [](all& of) { of.kept.list = nullptr; };
  auto const needed = std::to_string(cuda::workspace_bytes(channels, all{}.limits));
  std::vector<spoiled> const cases{
      {&all::local_moments, no_x, "local_moments: x is null"},
      {&all::local_moments, [](all& of) { of.x.samples = -1; }, "local_moments: x has a negative extent"},
      {&all::local_moments, wide_mask, "local_moments: the mask has other extents than x"},
      {&all::local_moments, crooked_packet, "local_moments: a packet is null or not aligned to 8 bytes"},
      {&all::local_moments, little_work, "local_moments: the workspace has 16 bytes, of " + needed},
      {&all::normalize, no_x, "normalize: x is null"},
      {&all::normalize, flat_y, "normalize: y has other extents than x"},
      {&all::normalize, flat_residual, "normalize: the residual has other extents than x"},
      {&all::normalize, no_packets, "normalize: there are no packets"},
      {&all::normalize, no_saved, "normalize: the saved statistics are null"},
      {&all::normalize, little_work, "normalize: the workspace has 16 bytes, of " + needed},
      {&all::normalize_constant, no_x, "normalize_constant: x is null"},
      {&all::normalize_constant, flat_y, "normalize_constant: y has other extents than x"},
      {&all::normalize_constant, wide_mask, "normalize_constant: the mask has other extents than x"},
      {&all::normalize_constant, [](all& of) { of.tracked.var.data = nullptr; },
       "normalize_constant: the running statistics are null"},
      {&all::forward_alone, no_x, "forward_alone: x is null"},
      {&all::forward_alone, flat_y, "forward_alone: y has other extents than x"},
      {&all::forward_alone, flat_residual, "forward_alone: the residual has other extents than x"},
      {&all::forward_alone, crooked_packet, "forward_alone: a packet is null or not aligned to 8 bytes"},
      {&all::forward_alone, no_count, "forward_alone: the saved count is null"},
      {&all::forward_alone, little_work, "forward_alone: the workspace has 16 bytes, of " + needed},
      {&all::backward_reduce, no_x, "backward_reduce: x is null"},
      {&all::backward_reduce, flat_dy, "backward_reduce: dy has other extents than x"},
      {&all::backward_reduce, wide_mask, "backward_reduce: the mask has other extents than x"},
      {&all::backward_reduce, no_saved, "backward_reduce: the saved statistics are null"},
      {&all::backward_reduce, crooked_packet, "backward_reduce: a packet is null or not aligned to 8 bytes"},
      {&all::backward_reduce, little_work, "backward_reduce: the workspace has 16 bytes, of " + needed},
      {&all::backward_elemt, no_residual,
       "backward_elemt: the gradient of a residual is asked for, but there is no residual"},
      {&all::backward_elemt, same_memory, "backward_elemt: dx and dresidual are the same memory"},
      {&all::backward_elemt, no_packets, "backward_elemt: there are no packets"},
      {&all::backward_elemt, crooked_packet, "backward_elemt: a packet is null or not aligned to 8 bytes"},
      {&all::backward_alone, flat_dy, "backward_alone: dy has other extents than x"},
      {&all::backward_alone, no_count, "backward_alone: the saved count is null"},
      {&all::backward_alone, crooked_packet, "backward_alone: a packet is null or not aligned to 8 bytes"},
      {&all::backward_constant, flat_dy, "backward_constant: dy has other extents than x"},
      {&all::backward_constant, same_memory, "backward_constant: dx and dresidual are the same memory"},
      {&all::backward_constant, no_saved, "backward_constant: the saved statistics are null"},
      {&all::double_backward_reduce, flat_dy, "double_backward_reduce: dy has other extents than x"},
      {&all::double_backward_reduce, [](all& of) { of.second.dx = of.y, of.second.dx.samples = 1; },
       "double_backward_reduce: the gradient with respect to dx has other extents than x"},
      {&all::double_backward_reduce, no_saved, "double_backward_reduce: the saved statistics are null"},
      {&all::double_backward_reduce, little_work, "double_backward_reduce: the workspace has 16 bytes, of " + needed},
      {&all::double_backward_elemt, [](all& of) { of.second.dresidual = of.dy; },
       "double_backward_elemt: there is a gradient with respect to dresidual, but no residual"},
      {&all::double_backward_elemt, [](all& of) { of.to_dy = of.to_x = of.y; },
       "double_backward_elemt: the gradients to dy and x are the same memory"},
      {&all::double_backward_elemt, no_packets, "double_backward_elemt: there are no packets"},
      {&all::keep, no_x, "keep: x is null"},
      {&all::keep, no_list, "keep: there is no memory for the list of kept channels"},
      {&all::keep, [](all& of) { of.kept.elements = nullptr; }, "keep: there is no memory for kept channels"},
      {&all::recover, flat_residual, "recover: the residual has other extents than x"},
      {&all::recover, no_count, "recover: the saved count is null"},
      {&all::recover, no_list, "recover: there is no memory for the list of kept channels"},
      {&all::accept_sums, [](all& of) { of.reduced.headers.ranks = 0; }, "accept_sums: there are no packets"},
      {&all::accept_sums, [](all& of) { of.reduced.merged.data = nullptr; },
       "accept_sums: a packet is null or not aligned to 8 bytes"},
      {&all::agree_on_group, [](all& of) { of.of_group.layers = 0; }, "agree_on_group: there are no packets"},
      {&all::agree_on_group, [](all& of) { of.of_group.data = nullptr; },
       "agree_on_group: a packet is null or not aligned to 8 bytes"},
      {&all::agree_on_group, [](all& of) { of.report.fault = nullptr; },
       "agree_on_group: there is no memory for faults"},
  };
  for (auto const& each : cases) {
    INFO(each.message);
    all of;
    each.by(of);
    fake_cuda::reset();
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] { (of.*each.call)(); }) == each.message);
    CHECK(fake_cuda::calls("kernel") == 0);
  }
}

TEST_CASE("a launch that fails is an error that says whose it is") {
  using all = operands<>;
  std::vector<std::pair<void (all::*)(), std::string>> const cases{
      {&all::local_moments, "local_moments"},
      {&all::normalize, "normalize"},
      {&all::normalize_constant, "normalize_constant"},
      {&all::forward_alone, "forward_alone"},
      {&all::backward_reduce, "backward_reduce"},
      {&all::backward_elemt, "backward_elemt"},
      {&all::backward_alone, "backward_alone"},
      {&all::backward_constant, "backward_constant"},
      {&all::double_backward_reduce, "double_backward_reduce"},
      {&all::double_backward_elemt, "double_backward_elemt"},
      {&all::keep, "keep"},
      {&all::recover, "recover"},
      {&all::accept_sums, "accept_sums"},
      {&all::agree_on_group, "agree_on_group"}};
  for (auto const& [call, name] : cases) {
    all of;
    fake_cuda::reset();
    fake_cuda::fail_next("kernel", cudaErrorInvalidConfiguration);
    auto const said = test::thrown<syncnorm::cuda_error>([&, what = call] { (of.*what)(); });
    CHECK(said == "cuda: " + name + ": fake error (cudaErrorFake)");
    CHECK(fake_cuda::calls("kernel") == 1);
  }
}

TEST_CASE("where the activation has no inverse, x is recovered by a copy alone") {
  for (double const slope : {0.0, 0.5}) {
    operands<> of;
    of.epilogue.activation.negative_slope = slope;
    fake_cuda::reset();
    of.recover();
    of.on.wait();
    CHECK(fake_cuda::calls("kernel") == (slope > 0 ? 2 : 1));
  }
  test::check_no_violations();
}

TEST_CASE_TEMPLATE("an element type with a 16-bit format is what CUDA's type of that format is", T,
                   syncnorm::bfloat16 AND_UNSANITIZED(syncnorm::float16)) {
  auto const of_type = []<class E>(E) {
    operands<E> of;
    of.forward_alone();
    of.backward_alone();
    of.on.wait();
    std::vector<std::uint16_t> bits;
    for (auto const& values : {of.values_y.get(), of.values_dx.get()})
      for (auto const value : values) bits.push_back(std::bit_cast<std::uint16_t>(value));
    return bits;
  };
  using of_cuda = std::conditional_t<std::is_same_v<T, syncnorm::float16>, __half, __nv_bfloat16>;
  CHECK(of_type(T{}) == of_type(of_cuda{}));
  test::check_no_violations();
}
