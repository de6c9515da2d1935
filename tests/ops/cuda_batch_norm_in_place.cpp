#include "ops/cuda_support.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <syncnorm/comm/self.hpp>
#include <syncnorm/ops/cuda_batch_norm_group.hpp>

#include "cuda/in_place_case.hpp"

using test::layer_over;

TEST_CASE("a pass in place on a device recovers x, or keeps it, enqueued and replayed from a graph") {
  using layer_cases::dx_over;
  test::unload_kernels();
  for (auto const& of : layer_cases::in_place_cases()) {
    test::over_nccl(2, [&](auto const& comm) {
      using layer = layer_over<test::nccl_communicator>;
      layer_cases::check_in_place<layer>(comm, of, true, dx_over::neither);
      layer_cases::check_in_place<layer>(comm, of, false, dx_over::y);
    });
    using alone = layer_over<syncnorm::self_communicator>;
    layer_cases::check_in_place<alone>(syncnorm::self_communicator{}, of, true, dx_over::neither);
    layer_cases::check_in_place<alone>(syncnorm::self_communicator{}, of, false, dx_over::dy);
    layer_cases::check_in_place<alone>(syncnorm::self_communicator{}, of, of.residual, dx_over::neither, true);
  }
  test::check_no_first_launches();
  test::check_no_violations();
}

TEST_CASE("x is recovered on a device once after each forward pass, whichever of the passes a graph has") {
  using layer = layer_over<syncnorm::self_communicator>;
  using layer_cases::device_tensor;
  constexpr std::int64_t n = 2, c = 4, s = 9;
  std::vector<long double> values;
  for (int i = 0; i < n * c * s; ++i) values.push_back(i * i % 17);
  auto const tensor = [] { return device_tensor<float>{test::layout::nchw, n, c, s}; };
  auto x = tensor(), over = tensor(), y = tensor(), dy = tensor(), dx = tensor(), into = tensor();
  test::stream const on;
  layer in_place{{}, c}, apart{{}, c};
  for (auto* const each : {&in_place, &apart}) // one that is recovered, and one that is kept
    layer_cases::put(each->gamma(), {0.75, 0x1p-10L, -1.5, 0.75});
  x.put(values, 0), dy.put({values.rbegin(), values.rend()}, 0);
  apart.forward(x.view, y.view, on);
  apart.backward(x.view, dy.view, dx.view, on);
  on.wait();

  auto const forward = [&] { in_place.forward_in_place(over.view, on); };
  auto const backward = [&] { in_place.backward_in_place(over.view, dy.view, into.view, on); };
  over.put(values, 0);
  forward(); // makes room
  on.wait();
  test::graph const captured_backward{on, backward}, captured_forward{on, forward};
  test::graph const captured_again{on, backward}; // by a host that has seen one after the latest forward pass
  test::graph const both{on, [&] { forward(), backward(); }};
  auto const check = [&](auto const& first, auto const& second) {
    over.put(values, 0);
    first();
    for (int i = 0; i < 2; ++i) {
      into.put(std::vector<long double>(values.size(), -7), 0);
      second();
      in_place.synchronize(on);
      CHECK(layer_cases::error_of(into.get(), dx.get()) < 1e-5);
      CHECK(layer_cases::error_of(over.get(), values) < 1e-5);
    }
  };
  for (int i = 0; i < 2; ++i) {
    check([&] { captured_forward.launch(); }, backward);
    check(forward, [&] { captured_backward.launch(); });
    check(forward, [&] { captured_again.launch(); });
    check([&] { captured_forward.launch(); }, [&] { captured_backward.launch(); });
    check([&] { both.launch(); }, backward);
    check(forward, backward);
  }
  test::check_no_violations();
}

TEST_CASE("what is kept on a device goes back to a y of other strides") {
  using layer_cases::device_tensor;
  constexpr std::int64_t n = 2, c = 3, s = 5;
  layer_over<syncnorm::self_communicator> layer{{}, c};
  syncnorm::batch_norm_epilogue<float> const relu{.activation = syncnorm::activation::relu()}; // every channel is kept
  std::vector<long double> values;
  for (int i = 0; i < n * c * s; ++i) values.push_back(i * i % 17);
  device_tensor<float> x{test::layout::nhwc, n, c, s}, y{test::layout::nchw, n, c, s}, dx{test::layout::nchw, n, c, s};
  x.put(values, 0);
  test::stream const on;
  layer.forward_in_place(x.view, relu, on);
  on.wait();
  y.put(x.get(), 0);
  layer.backward_in_place(y.view, y.view, dx.view, relu, {}, {}, on);
  layer.synchronize(on);
  CHECK(y.get() == values);
  test::check_no_violations();
}

TEST_CASE("micro-batches in place on a device are what they are apart, enqueued and replayed from a graph") {
  using syncnorm::exchange_policy;
  using test::layout;
  using alone = layer_over<syncnorm::self_communicator>;
  syncnorm::self_communicator const self;
  for (bool const captured : {true, false}) {
    for (auto const& share : {std::vector<std::int64_t>{3}, {0, 2}, {2, 1, 3}, {}})
      layer_cases::check_micro_batches_in_place<alone>(self, {share}, layout::nchw, captured, !captured);
    layer_cases::check_micro_batches_in_place<alone>(self, {{2, 0, 3}}, layout::nhwc, captured, captured, true);
  }
  std::vector<std::vector<std::int64_t>> const shares{{2, 1, 3}, {}, {0, 4}}, fewer{{1}, {2, 2}};
  for (auto const policy : {exchange_policy::gather, exchange_policy::reduce})
    test::over_nccl(3, [&](auto const& comm) {
      using layer = layer_over<test::nccl_communicator>;
      layer_cases::check_micro_batches_in_place<layer>(comm, shares, layout::nchw, true, false, false, policy);
      layer_cases::check_micro_batches_in_place<layer>(comm, shares, layout::strided, false, true, false, policy);
    });
  test::over_threads(2, [&](auto const& comm) {
    layer_cases::check_micro_batches_in_place<layer_over<test::staged_threads>>(comm, fewer, layout::nhwc, false,
                                                                                false);
  });
  test::check_no_violations();
}

namespace {

struct in_place_memory {
  layer_cases::device_tensor<float> x{test::layout::nchw, 2, 3, 5}, dy{test::layout::nchw, 2, 3, 5},
      dx{test::layout::nchw, 2, 3, 5};
  std::vector<long double> values = std::vector<long double>(30);
  test::stream on{};

  in_place_memory() {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 7);
    x.put(values, 0), dy.put(values, 0);
  }
};

} // namespace

TEST_CASE("more channels to keep than there is room for are an error on every rank, and x stays") {
  std::string const message = "more channels to keep than room";
  auto const check = [&](auto const& comm, int spoiled, std::string const& expected) {
    layer_over<std::remove_cvref_t<decltype(comm)>> layer{comm, 3};
    in_place_memory m;
    layer.prepare(m.on);
    layer.reserve_in_place(m.x.view, {}, 1, m.on);
    CHECK(layer.kept().room() == 1);
    if (syncnorm::rank(comm) == spoiled) layer_cases::put(layer.gamma(), {0, 1, 0});
    auto const wrong = [&](auto const& f) { return test::thrown<syncnorm::invalid_argument_error>(f); };
    CHECK(wrong([&] {
            layer.forward_in_place(m.x.view, m.on);
            layer.synchronize(m.on);
          }) == expected);
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    layer.synchronize(m.on);
    CHECK(m.x.get() == m.values);
    CHECK(layer_cases::get(std::span{layer.num_batches_tracked(), 1})[0] == 0);
    // With room for them, and in evaluation first without.
    layer.eval();
    bool const here = syncnorm::rank(comm) == spoiled;
    CHECK(wrong([&] {
            layer.forward_in_place(m.x.view, m.on);
            layer.synchronize(m.on);
          }) == (here ? "batch_norm inference: " + message : ""));
    if (here) CHECK(m.x.get() == m.values);
    m.x.put(m.values, 0);
    layer.train();
    layer.reserve_in_place(m.x.view, {}, 0, m.on);
    layer.forward_in_place(m.x.view, m.on);
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    layer.synchronize(m.on);
    CHECK(layer_cases::error_of(m.x.get(), m.values) < 1e-6);
  };
  test::over_nccl(2, [&](auto const& comm) { check(comm, 1, "batch_norm forward: rank 1: " + message); });
  check(syncnorm::self_communicator{}, 0, "batch_norm forward: rank 0: " + message);
  test::check_no_violations();
}

TEST_CASE(
    "a graph of passes in place is replayed after more room was made, and what it had is given back with the layer") {
  auto const before = fake_cuda::allocated();
  {
    layer_over<syncnorm::self_communicator> layer{{}, 3};
    in_place_memory m;
    layer_cases::put(layer.gamma(), {0, 1, 0});
    auto const step = [&] {
      layer.forward_in_place(m.x.view, m.on);
      layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    };
    layer.reserve_in_place(m.x.view, {}, 0, m.on);
    test::graph const captured{m.on, step};
    for (std::int64_t const spare : {1, 0}) {
      auto const with_graph = fake_cuda::allocated();
      layer.reserve_in_place(m.x.view, {}, spare, m.on);
      layer.reserve_in_place(m.x.view, {}, spare, m.on); // whose room before no graph has
      CHECK(fake_cuda::allocated() <= with_graph + 3 * 10 * sizeof(float));
      captured.launch();
      step();
      layer.synchronize(m.on);
      CHECK(layer_cases::error_of(m.x.get(), m.values) < 1e-6);
      test::check_no_violations();
    }
  }
  CHECK(fake_cuda::allocated() == before);
}

TEST_CASE("to make room for a pass in place waits no longer than the communicator lets it") {
  auto const raw = fake_nccl::make_group(2);
  auto const as_rank = [&](std::size_t r) {
    auto const comm = test::nccl_communicator::adopt(raw[r], std::chrono::milliseconds{300});
    layer_over<test::nccl_communicator> layer{comm, 3};
    in_place_memory m;
    test::device_buffer<float> const y{std::vector<float>(30)};
    layer.prepare(m.on);
    if (r == 1) return; // and is not heard of any more
    layer.forward(m.x.view, syncnorm::nchw(y.data(), 2, 3, 5), m.on);
    CHECK_THROWS_AS(layer.reserve_in_place(m.x.view, {}, 0, m.on), syncnorm::communicator_error);
    CHECK_THROWS_AS(layer.forward_in_place(m.x.view, m.on), syncnorm::communicator_error);
  };
  std::jthread const other{as_rank, std::size_t{1}};
  as_rank(0);
}

TEST_CASE("what is wrong with a pass in place on one rank is an error on every rank") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    in_place_memory m;
    auto const thrown = [&](auto const& f) {
      return test::thrown<syncnorm::invalid_argument_error>([&] {
        f();
        layer.synchronize(m.on);
      });
    };
    layer.prepare(m.on);
    bool const here = comm.rank() == 1;
    if (here) layer.reserve_in_place(m.x.view, {}, 0, m.on);
    CHECK(thrown([&] {
            test::run_on(m.on, true, [&](cudaStream_t stream) { layer.forward_in_place(m.x.view, stream); });
          }).find("rank 0: the stream is being captured in a graph before there is memory for what is kept") !=
          std::string::npos);
    CHECK(m.x.get() == m.values);
    fake_cuda::reset();
    layer.forward_in_place(m.x.view, m.on); // rank 0 makes room
    layer.forward_in_place(m.x.view, m.on);
    auto y = m.x.view;
    if (here) y.spatial = 4;
    CHECK(thrown([&] { layer.backward_in_place(y, m.dy.view, m.dx.view, m.on); }) ==
          "batch_norm backward: rank 1: y is [2, 3, 4], expected [2, 3, 5] as x");
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    m.on.wait();
    auto const once = m.dx.get();
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on); // x is there already
    layer.synchronize(m.on);
    CHECK(m.dx.get() == once);
    test::device_buffer<float> const elsewhere{std::vector<float>(30)};
    layer.forward(m.x.view, syncnorm::nchw(elsewhere.data(), 2, 3, 5), m.on);
    auto const after = m.x.get();
    CHECK(thrown([&] { layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on); })
              .starts_with("batch_norm backward: rank 0: the latest forward pass was not in place, or failed; rank 1: "
                           "the latest"));
    CHECK(m.x.get() == after);
    // What an earlier pass has kept does not go over what a pass that failed has left.
    layer_cases::put(layer.gamma(), {0, 1, 1});
    layer.reserve_in_place(m.x.view, {}, 0, m.on);
    layer.forward_in_place(m.x.view, m.on);
    m.on.wait();
    auto const left = m.x.get();
    auto none = m.x.view;
    if (here) none.data = nullptr;
    CHECK(thrown([&] { layer.forward_in_place(none, m.on); }) ==
          "batch_norm forward: rank 1: x is null, its extents are [2, 3, 5]");
    layer.backward_in_place(m.x.view, m.dy.view, m.dx.view, m.on);
    layer.synchronize(m.on);
    CHECK(m.x.get() == left);

    if (here) {
      layer.reserve_in_place(m.x.view, {}, 3, m.on);
      CHECK(layer.kept().bytes() == 3 * 10 * sizeof(float));
      fake_cuda::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
      CHECK_THROWS_AS(layer.reserve_in_place(m.x.view, {}, 3, m.on), syncnorm::cuda_error);
      CHECK(layer.kept().room() == 0);
    }
  });
  test::check_no_violations();
}

namespace {

namespace cuda = syncnorm::cuda;
using layer_cases::batches_in_place;

enum class way : std::uint8_t { at_once, begun, grouped };

/// A step over a rank's micro-batches in place by the passes themselves, run as `how` says; in a group twice, the second time over the
/// tensors of another pass apart.
template <class C>
void check_passes_in_place(C const& comm, std::vector<std::int64_t> const& share, way how) {
  using one = batches_in_place::one;
  using forward = cuda::detail::planned_forward<test::simt_kernels, float, float>;
  using backward = cuda::detail::planned_backward<test::simt_kernels, float, float>;
  INFO("way ", static_cast<int>(how), ", rank ", syncnorm::rank(comm), " with ", share.size(), " micro-batches");
  batches_in_place const of{syncnorm::rank(comm), share, test::layout::nchw};
  layer_over<C> apart{comm, of.channels}, beside{comm, of.channels};
  of.set_parameters(apart);
  auto const x = of.views<float const>(&one::x), dy = of.views<float const>(&one::dy);
  auto const y = of.views(&one::y), dx = of.views(&one::dx), over = of.views(&one::over), into = of.views(&one::into);
  auto const dresidual = of.residuals(&one::dresidual), other = of.residuals(&one::other);
  std::vector<syncnorm::tensor_view<float const>> const read(over.begin(), over.end());
  test::stream const on;
  apart.forward(x, y, of.epilogues, on);
  apart.backward(x, dy, dx, of.epilogues, dresidual, {}, on);

  syncnorm::batch_norm_options const options;
  auto const limits = cuda::current_limits();
  cuda::batch_norm_saved saved{of.channels};
  cuda::batch_norm_workspace workspace{of.channels, syncnorm::size(comm), limits,
                                       cuda::workspace_bytes(of.channels, limits)};
  std::vector<cuda::batch_norm_kept<float>> kept;
  for (std::size_t k = 0; k < share.size(); ++k) kept.emplace_back(of.channels);
  syncnorm::affine_parameters<float> const affine{apart.gamma(), apart.beta()};
  auto const all_ranks = syncnorm::statistics_scope::all_ranks;
  cuda::detail::forward_operands<float, float> const from{read, over, affine, {}, all_ranks, of.epilogues, kept};
  cuda::detail::backward_operands<float, float> const back{dy, read, into, affine, {}, of.epilogues, other, kept, over};
  cuda::batch_norm_group group{comm};
  auto const run = [&](auto planned, auto const& plan_beside) {
    cuda::batch_norm_pass pass{std::move(planned)};
    if (how == way::grouped) return group.run(cuda::passes(plan_beside(), std::move(pass)), on);
    if (how == way::at_once) return cuda::detail::run_pass(comm, pass.steps(), on);
    bool agreed = workspace.agreed();
    auto pending =
        cuda::pending_passes::begin(comm, {&pass, 1}, workspace.pool(), workspace.passes_report(), agreed, on);
    pending.finish(on);
  };
  run(std::make_unique<forward>(from, options, saved, workspace),
      [&] { return beside.plan_forward(x, dx, of.epilogues); });
  for (int i = 0; i < 2; ++i) // the second time from x, which is back
    run(std::make_unique<backward>(back, true, saved, workspace),
        [&] { return beside.plan_backward(x, dy, y, of.epilogues, dresidual); });
  if (how == way::grouped) apart.backward(x, dy, dx, of.epilogues, dresidual, {}, on); // which the group has written to
  apart.synchronize(on);
  group.synchronize(on);
  of.check(true, &one::into, 1e-5);
}

} // namespace

TEST_CASE("passes over micro-batches in place on a device, in one phase, in two, and in groups") {
  for (auto const how : {way::at_once, way::begun, way::grouped}) {
    std::vector<std::vector<std::int64_t>> const shares{{2, 0, 3}, {4, 1}, {}};
    test::over_nccl(
        3, [&](auto const& comm) { check_passes_in_place(comm, shares[static_cast<std::size_t>(comm.rank())], how); });
    check_passes_in_place(syncnorm::self_communicator{}, shares[0], how);
  }
  test::check_no_violations();
}

namespace {

/// Two micro-batches of C = 3 in place.
struct two_in_place {
  in_place_memory first, second;
  std::vector<syncnorm::tensor_view<float>> over{first.x.view, second.x.view}, dx{first.dx.view, second.dx.view};
  std::vector<syncnorm::tensor_view<float const>> dy{first.dy.view, second.dy.view};
  std::vector<syncnorm::batch_norm_epilogue<float>> with = std::vector<syncnorm::batch_norm_epilogue<float>>(2);
  test::stream const& on = first.on;

  [[nodiscard]] bool stay() { return first.x.get() == first.values && second.x.get() == second.values; }
};

} // namespace

TEST_CASE("micro-batches in place on a device all stay where there is too little room for one of them") {
  std::string const message = "more channels to keep than room";
  auto const check = [&](auto const& comm, int spoiled, std::size_t tight) {
    INFO("rank ", syncnorm::rank(comm), ", micro-batch ", tight);
    layer_over<std::remove_cvref_t<decltype(comm)>> layer{comm, 3};
    two_in_place m;
    // The other one has room for all of its channels, as it may have to keep them.
    m.with[1 - tight].activation.negative_slope = 0;
    layer.prepare(m.on);
    layer.reserve_in_place(m.over, m.with, 1, m.on);
    CHECK(layer.kept(tight).room() == 1);
    CHECK(layer.kept(1 - tight).room() == 3);
    CHECK_THROWS_AS((void)layer.kept(2), syncnorm::invalid_argument_error);
    if (syncnorm::rank(comm) == spoiled) layer_cases::put(layer.gamma(), {0, 1, 0});
    for (bool const recovers : {false, true}) { // the other one
      m.with[1 - tight].activation.negative_slope = recovers ? 0.5 : 0;
      layer.train();
      CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
              layer.forward_in_place(m.over, m.with, m.on);
              layer.synchronize(m.on);
            }) == "batch_norm forward: rank " + std::to_string(spoiled) + ": " + message);
      CHECK(m.stay());
      layer.backward_in_place(m.over, m.dy, m.dx, m.with, {}, {}, m.on);
      layer.synchronize(m.on);
      CHECK(m.stay());
      CHECK(layer_cases::get(std::span{layer.num_batches_tracked(), 1})[0] == 0);
      layer.eval();
      bool const here = syncnorm::rank(comm) == spoiled;
      CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
              layer.forward_in_place(m.over, m.with, m.on);
              layer.synchronize(m.on);
            }) == (here ? "batch_norm inference: " + message : ""));
      CHECK(m.stay() == here);
      layer.synchronize(m.on); // said once
      for (auto* const each : {&m.first, &m.second}) each->x.put(each->values, 0);
    }
    layer.train();
    layer.reserve_in_place(m.over, m.with, 0, m.on);
    layer.forward_in_place(m.over, m.with, m.on);
    layer.backward_in_place(m.over, m.dy, m.dx, m.with, {}, {}, m.on);
    layer.synchronize(m.on);
    for (auto* const each : {&m.first, &m.second}) CHECK(layer_cases::error_of(each->x.get(), each->values) < 1e-6);
  };
  for (std::size_t const tight : {0U, 1U}) {
    test::over_nccl(2, [&](auto const& comm) { check(comm, 1, tight); });
    check(syncnorm::self_communicator{}, 0, tight);
  }
  test::check_no_violations();
}

TEST_CASE("what is wrong with micro-batches in place on a device on one rank is an error on every rank, and x stays") {
  test::over_nccl(2, [](auto const& comm) {
    layer_over<test::nccl_communicator> layer{comm, 3};
    two_in_place m;
    layer.prepare(m.on);
    bool const here = comm.rank() == 1;
    auto const refused = [&](std::string const& what, auto const& pass) {
      auto const text = test::thrown<syncnorm::invalid_argument_error>([&] {
        pass();
        layer.synchronize(m.on);
      });
      CHECK_MESSAGE(text.find("rank 1: " + what) != std::string::npos, text);
    };
    using epilogues = std::vector<syncnorm::batch_norm_epilogue<float>>;
    auto const forward = [&](std::string const& what, std::vector<syncnorm::tensor_view<float>> const& over,
                             epilogues const& with) {
      refused(what, [&] { layer.forward_in_place(over, with, m.on); });
      CHECK(m.stay());
      CHECK(layer_cases::get(std::span{layer.num_batches_tracked(), 1})[0] == 0);
      CHECK(layer_cases::get(layer.running_mean()) == std::vector<float>(3, 0));
    };
    forward("there are 1 epilogues, expected 2 as micro-batches of x", m.over, epilogues(here ? 1 : 2));
    auto over = m.over;
    if (here) over[1] = over[0].sample_range(1, 1);
    forward("x[0] and x[1] are in the same memory, which a pass in place writes to", over, m.with);
    auto with = m.with;
    if (here) with[0].residual = m.over[1];
    forward("the residual[0] is in the memory of x[1], which a pass in place writes to", m.over, with);
    over = m.over;
    if (here) over[1].data = nullptr;
    forward("x[1] is null, its extents are [2, 3, 5]", over, m.with);
    // Room for the first alone, while a graph is captured.
    if (here) layer.reserve_in_place(m.over[0], {}, 0, m.on);
    if (!here) layer.reserve_in_place(m.over, m.with, 0, m.on);
    refused("the stream is being captured in a graph before there is memory for what is kept", [&] {
      test::run_on(m.on, true, [&](cudaStream_t stream) { layer.forward_in_place(m.over, m.with, stream); });
    });
    CHECK(m.stay());
    if (here) fake_cuda::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
    forward("cuda: cudaMalloc: ", m.over, m.with);
    CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
            layer.reserve_in_place(m.over, epilogues(1), 0, m.on);
          }) == "reserve_in_place: there is another number of epilogues than of micro-batches");

    layer.forward_in_place(m.over, m.with, m.on);
    m.on.wait();
    auto const y = m.first.x.get();
    auto const some = [&](auto const& all) { return std::span{all}.first(here ? 1 : 2); };
    auto const backward = [&](std::string const& what, auto const& pass) {
      refused(what, pass);
      CHECK((m.first.x.get() == y || !here)); // here, nothing was recovered
      CHECK(layer_cases::get(layer.gamma_grad()) == std::vector<float>(3, 0));
    };
    backward("there are 1 micro-batches of y, expected 2 as of the forward pass in place",
             [&] { layer.backward_in_place(some(m.over), some(m.dy), some(m.dx), {}, {}, {}, m.on); });
    backward("there are 1 epilogues, expected 2 as micro-batches of x",
             [&] { layer.backward_in_place(m.over, m.dy, m.dx, some(m.with), {}, {}, m.on); });
    over = m.over;
    if (here) over[1].spatial = 4;
    backward("y[1] is [2, 3, 4], expected [2, 3, 5] as x",
             [&] { layer.backward_in_place(over, m.dy, m.dx, m.with, {}, {}, m.on); });
    backward("there are 1 micro-batches of dy",
             [&] { layer.backward_in_place(m.over, some(m.dy), m.dx, m.with, {}, {}, m.on); });
    layer.backward_in_place(m.over, m.dy, m.dx, m.with, {}, {}, m.on);
    layer.synchronize(m.on);
    for (auto* const each : {&m.first, &m.second})
      CHECK(layer_cases::error_of(each->x.get(), each->values) < 1e-6); // back, once

    layer.eval();
    if (here)
      CHECK(test::thrown<syncnorm::invalid_argument_error>([&] {
              layer.forward_in_place(std::vector{m.over[0], m.over[0]}, {}, m.on);
            }) == "batch_norm inference: x[0] and x[1] are in the same memory, which a pass in place writes to");
  });
  test::check_no_violations();
}

TEST_CASE("micro-batches in place on a device wait for nothing and allocate nothing once there is room") {
  layer_over<syncnorm::self_communicator> layer{{}, 3};
  two_in_place m;
  m.with[1].activation.negative_slope = 0;
  auto const step = [&] {
    layer.forward_in_place(m.over, m.with, m.on);
    layer.backward_in_place(m.over, m.dy, m.dx, m.with, {}, {}, m.on);
  };
  step(); // makes room
  m.on.wait();
  fake_cuda::reset();
  step();
  for (auto const* const function :
       {"cudaMalloc", "cudaFree", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync"}) {
    CAPTURE(std::string{function});
    CHECK(fake_cuda::calls(function) == 0);
  }
  layer.synchronize(m.on);
  test::check_no_violations();
}
