#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "support.hpp"

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/micro_batches.hpp>

using namespace test;
using syncnorm::masked_outputs;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using syncnorm::torch::norm_epilogue;

namespace {

/// The rows of rank `rank`: 3, then 2.
Tensor rows_of(Tensor const& whole, int rank) { return rank == 0 ? whole.slice(0, 0, 3) : whole.slice(0, 3, 5); }

/// Half of the last bit of a 16-bit type, relative to the number; each result is rounded once.
double rounding_of(torch::Dtype type) { return type == torch::kHalf ? 0x1p-11 : type == torch::kBFloat16 ? 0x1p-8 : 0; }

/// Batch norm of a whole batch with all that `forward_with` does, in the operations of libtorch.
Tensor reference(Tensor const& x, Tensor const& weight, Tensor const& bias, norm_epilogue const& with) {
  auto const counts =
      (with.mask.defined() ? with.mask : torch::ones({5, 2, 2}, torch::kBool)).to(torch::kDouble).unsqueeze(1);
  auto const count = counts.sum();
  auto const per_channel = [](Tensor const& of) { return of.sum({0, 2, 3}, true); };
  auto const mean = per_channel(x * counts) / count;
  auto const var = per_channel((x - mean).square() * counts) / count;
  auto y = (x - mean) / (var + 1e-2).sqrt() * weight.view({1, -1, 1, 1}) + bias.view({1, -1, 1, 1});
  if (with.residual.defined()) y = y + with.residual;
  y = torch::where(y > 0, y, y * with.activation.negative_slope);
  return with.masked == masked_outputs::zero ? y * counts : y;
}

} // namespace

TEST_CASE_TEMPLATE("libtorch's 16-bit types are elements, as syncnorm's of the same bits", T, at::Half, at::BFloat16) {
  constexpr bool half = std::is_same_v<T, at::Half>;
  using own = std::conditional_t<half, syncnorm::float16, syncnorm::bfloat16>;
  torch::manual_seed(23);
  auto const x = random({3, 2, 37}).to(half ? torch::kHalf : torch::kBFloat16);
  auto const results = [&]<class E>(E const* elements) {
    auto const view = syncnorm::nchw(elements, 3, 2, 37);
    std::vector<double> mean(2), m2(2), inv_std{0.5, 3};
    syncnorm::host::serial_executor const serial;
    syncnorm::host::local_moments(serial, view, mean, m2);
    auto y = torch::empty_like(x);
    syncnorm::host::normalize<E>(serial, view, syncnorm::nchw(static_cast<E*>(y.data_ptr()), 3, 2, 37), mean, inv_std,
                                 {});
    return std::tuple{mean, m2, y};
  };
  auto const [mean, m2, y] = results(x.template data_ptr<T>());
  auto const [own_mean, own_m2, own_y] = results(reinterpret_cast<own const*>(x.template data_ptr<T>()));
  CHECK(error_of(torch::tensor(mean, torch::kDouble), x.to(torch::kDouble).transpose(0, 1).flatten(1).mean(1), 1) <=
        1e-6);
  CHECK(mean == own_mean);
  CHECK(m2 == own_m2);
  CHECK(torch::equal(y, own_y));
}

TEST_CASE("16-bit inputs, and modules of their type or of float, over two ranks") {
  torch::manual_seed(21);
  for (auto const type : {torch::kHalf, torch::kBFloat16})
    for (bool const mixed : {true, false})
      for (auto const format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
        auto const x = random({5, 3, 4, 4}).to(type), dy = random({5, 3, 4, 4}).to(type);
        auto const parameters = mixed ? torch::kFloat : type;
        auto const options = BatchNormOptions{3}.eps(1e-2).momentum(0.5);
        auto twin = make_norm(options); // in double, of the same elements
        auto const whole = x.to(torch::kDouble).requires_grad_();
        auto const expected = twin->forward(whole);
        expected.backward(dy.to(torch::kDouble));
        Tensor weight_grads[2];
        run_ranks(2, [&](thread_communicator const& comm) {
          INFO("type ", static_cast<int>(type), ", mixed ", mixed, ", rank ", comm.rank());
          auto norm = make_norm(options, comm);
          norm->to(parameters);
          auto const own = rows_of(x, comm.rank()).contiguous(format).detach().requires_grad_();
          auto const y = norm->forward(own);
          y.backward(rows_of(dy, comm.rank()).contiguous(format));
          CHECK((y.scalar_type() == type));
          CHECK((own.grad().scalar_type() == type));
          CHECK((norm->weight.grad().scalar_type() == parameters));
          CHECK((norm->running_var.scalar_type() == parameters));
          // Parameters were rounded to their type, too, where that is of 16 bits; so was what they multiply and add.
          double const allowed = 1e-5 + rounding_of(type) + 2 * rounding_of(parameters);
          CHECK(error_of(y, rows_of(expected, comm.rank()), scale_of(expected)) <= allowed);
          CHECK(error_of(own.grad(), rows_of(whole.grad(), comm.rank()), scale_of(whole.grad())) <= allowed);
          CHECK(error_of(norm->running_mean, twin->running_mean, 1) <= allowed);
          CHECK(error_of(norm->running_var, twin->running_var, 1) <= allowed);
          weight_grads[comm.rank()] = norm->weight.grad().to(torch::kDouble);
        });
        CHECK(error_of(weight_grads[0] + weight_grads[1], twin->weight.grad(), 40) <=
              1e-5 + 2 * rounding_of(parameters));
      }
}

TEST_CASE("a rank with an empty batch of halves joins") {
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm, torch::kFloat);
    auto const x = torch::ones({comm.rank() == 0 ? 0 : 4, 3, 2}, torch::kFloat).to(torch::kHalf);
    auto const y = norm->forward(x);
    CHECK(y.sizes() == x.sizes());
    y.sum().backward();
    CHECK(norm->weight.grad().defined());
  });
}

TEST_CASE("an input and parameters of types that do not go together are refused on every rank") {
  run_ranks(2, [&](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm, torch::kDouble);
    auto const type = comm.rank() == 1 ? torch::kHalf : torch::kDouble;
    auto const message = message_of<syncnorm::invalid_argument_error>([&] {
      norm->forward(random({2, 3, 2}).to(type));
    });
    CHECK_MESSAGE(contains(message, "rank 1: the input is of Half, but weight of Double"), message);
  });
}

TEST_CASE("activation, residual and mask and their gradients are those of libtorch's operations") {
  torch::manual_seed(22);
  auto const mask = torch::rand({5, 2, 2}) < 0.6;
  struct choice {
    double slope;
    bool residual, mask;
    masked_outputs masked;
  };
  for (auto const& chosen : {choice{0, true, false, masked_outputs::normalized},
                             {0.25, false, true, masked_outputs::zero},
                             {1, true, true, masked_outputs::normalized},
                             {0, true, true, masked_outputs::zero}})
    for (auto const format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      auto const x = random({5, 3, 2, 2}), dy = random({5, 3, 2, 2}), residual = random({5, 3, 2, 2});
      auto const options = BatchNormOptions{3}.eps(1e-2);
      auto twin = make_norm(options);
      auto const whole = x.clone().requires_grad_(), whole_residual = residual.clone().requires_grad_();
      norm_epilogue of_whole{.activation = {chosen.slope}, .masked = chosen.masked};
      if (chosen.residual) of_whole.residual = whole_residual;
      if (chosen.mask) of_whole.mask = mask;
      auto const expected = reference(whole, twin->weight, twin->bias, of_whole);
      expected.backward(dy);
      Tensor weight_grads[2], bias_grads[2];
      run_ranks(2, [&](thread_communicator const& comm) {
        INFO("slope ", chosen.slope, ", rank ", comm.rank());
        auto norm = make_norm(options, comm);
        auto const own = rows_of(x, comm.rank()).contiguous(format).detach().clone().requires_grad_();
        auto const own_residual = rows_of(residual, comm.rank()).clone().requires_grad_();
        norm_epilogue with{.activation = {chosen.slope}, .masked = chosen.masked};
        if (chosen.residual) with.residual = own_residual;
        if (chosen.mask) with.mask = rows_of(mask, comm.rank());
        auto const y = norm->forward_with(own, with);
        y.backward(rows_of(dy, comm.rank()));
        CHECK(error_of(y, rows_of(expected, comm.rank()), 1) <= 1e-12);
        CHECK(error_of(own.grad(), rows_of(whole.grad(), comm.rank()), 1) <= 1e-12);
        if (chosen.residual)
          CHECK(error_of(own_residual.grad(), rows_of(whole_residual.grad(), comm.rank()), 1) <= 1e-12);
        weight_grads[comm.rank()] = norm->weight.grad();
        bias_grads[comm.rank()] = norm->bias.grad();
      });
      CHECK(error_of(weight_grads[0] + weight_grads[1], twin->weight.grad(), 1) <= 1e-12);
      CHECK(error_of(bias_grads[0] + bias_grads[1], twin->bias.grad(), 1) <= 1e-12);
    }
}

TEST_CASE("what is wrong with a residual or a mask on one rank is thrown on both") {
  struct fault {
    norm_epilogue epilogue;
    char const* text;
  };
  norm_epilogue shorter, other_type, other_shape, no_mask;
  shorter.residual = torch::zeros({2, 3, 4}, torch::kDouble);
  other_type.residual = torch::zeros({2, 3, 5}, torch::kFloat);
  other_shape.mask = torch::ones({2, 3, 5}, torch::kBool);
  no_mask.mask = torch::ones({2, 5}, torch::kDouble);
  for (auto const& [epilogue, text] :
       std::vector<fault>{{shorter, "rank 1: the residual is [2, 3, 4], expected [2, 3, 5]"},
                          {other_type, "rank 1: the residual is of Float, expected Double"},
                          {other_shape, "rank 1: the mask is [2, 3, 5], expected [2, 5]"},
                          {no_mask, "rank 1: the mask is of Double, expected Bool or Byte"}}) {
    auto const& with = epilogue;
    std::string const expected = text;
    run_ranks(2, [&with, &expected](thread_communicator const& comm) {
      auto norm = make_norm(BatchNormOptions{3}, comm);
      auto const message = message_of<syncnorm::invalid_argument_error>([&] {
        norm->forward_with(random({2, 3, 5}), comm.rank() == 1 ? with : norm_epilogue{});
      });
      CHECK_MESSAGE(contains(message, expected), message);
    });
  }
}

TEST_CASE("a gradient penalty through activation, residual and mask is that of libtorch's operations") {
  torch::manual_seed(23);
  auto const mask = torch::rand({5, 2, 2}) < 0.6;
  struct choice {
    double slope;
    bool residual, mask;
    masked_outputs masked;
  };
  // Of Σ|∂L/∂x|² + Σ|∂L/∂residual|² + Σ ∂L/∂weight + L, where L = Σ f·y³: what x, residual and weight get.
  auto const penalize = [](Tensor const& y, Tensor const& factors, std::vector<Tensor> const& of) {
    auto const loss = (y.pow(3) * factors).sum();
    auto const slopes = torch::autograd::grad({loss}, of, {}, true, /*create_graph=*/true);
    auto penalty = loss + slopes[0].pow(2).sum() + slopes[1].sum();
    if (slopes.size() == 3) penalty = penalty + slopes[2].pow(2).sum();
    return torch::autograd::grad({penalty}, of);
  };
  for (auto const& chosen : {choice{0, true, false, masked_outputs::normalized},
                             {0.25, false, true, masked_outputs::zero},
                             {0.5, true, true, masked_outputs::normalized}}) {
    auto const x = random({5, 3, 2, 2}), residual = random({5, 3, 2, 2}), factors = random({5, 3, 2, 2});
    auto const options = BatchNormOptions{3}.eps(1e-2);
    auto const run = [&](auto const& forward, SyncBatchNorm& norm, auto const& cut) {
      std::vector<Tensor> of{cut(x).detach().clone().requires_grad_(), norm->weight};
      norm_epilogue with{.activation = {chosen.slope}, .masked = chosen.masked};
      if (chosen.residual) of.push_back(with.residual = cut(residual).detach().clone().requires_grad_());
      if (chosen.mask) with.mask = cut(mask);
      return penalize(forward(norm, of[0], with), cut(factors), of);
    };
    auto twin = make_norm(options);
    auto const expected = run([](SyncBatchNorm& norm, Tensor const& of,
                                 norm_epilogue const& with) { return reference(of, norm->weight, norm->bias, with); },
                              twin, [](Tensor const& whole) { return whole; });
    Tensor weight_grads[2];
    run_ranks(2, [&](thread_communicator const& comm) {
      INFO("slope ", chosen.slope, ", rank ", comm.rank());
      auto norm = make_norm(options, comm);
      auto const own = [&](Tensor const& whole) { return rows_of(whole, comm.rank()); };
      auto const got = run([](SyncBatchNorm& of, Tensor const& input,
                              norm_epilogue const& with) { return of->forward_with(input, with); },
                           norm, own);
      CHECK(error_of(got[0], own(expected[0]), scale_of(expected[0])) <= 1e-11);
      if (chosen.residual) CHECK(error_of(got[2], own(expected[2]), scale_of(expected[2])) <= 1e-11);
      weight_grads[comm.rank()] = got[1];
    });
    CHECK(error_of(weight_grads[0] + weight_grads[1], expected[1], 1) <= 1e-11);
  }
}

namespace {

/// Counts the bytes of tensors that are alive.
struct live_bytes : c10::MemoryReportingInfoBase {
  std::int64_t bytes = 0;
  void reportMemoryUsage(void*, int64_t size, int64_t, int64_t, c10::Device) override { bytes += size; }
  [[nodiscard]] bool memoryProfilingEnabled() const override { return true; }
};

} // namespace

TEST_CASE("in place, gradients are those of a module apart, and a tensor less is kept") {
  torch::manual_seed(24);
  for (auto const type : {torch::kDouble, torch::kFloat})
    for (auto const format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      auto const x = random({5, 4, 8, 8}).to(type), dy = random({5, 4, 8, 8}).to(type);
      auto const residual = random({5, 4, 8, 8}).to(type);
      auto const mask = torch::rand({5, 8, 8}) < 0.7;
      run_ranks(2, [&](thread_communicator const& comm) {
        auto const own = [&](Tensor const& of) { return rows_of(of, comm.rank()).contiguous(format).detach().clone(); };
        for (bool const unrecoverable : {false, true})
          for (bool const evaluates : {false, true}) {
            std::vector<Tensor> results[2];
            std::int64_t kept[2];
            for (int const in_place : {0, 1}) {
              auto norm = make_norm(BatchNormOptions{4}.eps(1e-2), comm, type);
              norm->weight.detach()[1] = unrecoverable ? 0 : 0.75;
              norm->set_in_place(in_place == 1);
              norm->train(!evaluates);
              auto const leaf = own(x).requires_grad_(), added = own(residual).requires_grad_();
              norm_epilogue const with{.activation = syncnorm::activation::leaky_relu(0.25),
                                       .residual = added,
                                       .mask = rows_of(mask, comm.rank())};
              auto const counter = std::make_shared<live_bytes>();
              {
                c10::DebugInfoGuard const counts{c10::DebugInfoKind::PROFILER_STATE, counter};
                auto const input = leaf * 2; // which does not need its result
                auto const* const memory = input.data_ptr();
                auto const y = norm->forward_with(input, with);
                CHECK((y.data_ptr() == memory) == (in_place == 1));
                CHECK(y.is_same(input) == (in_place == 1));
                kept[in_place] = counter->bytes;
                (y * 0.5).backward(own(dy), /*retain_graph=*/true);
                leaf.mutable_grad() = added.mutable_grad() = norm->weight.mutable_grad() = Tensor{};
                (y * 0.5).backward(own(dy));
                results[in_place] = {y.detach().clone(), leaf.grad(), added.grad(), norm->weight.grad(),
                                     norm->bias.grad()};
              }
            }
            INFO("unrecoverable ", unrecoverable, ", evaluates ", evaluates, ", rank ", comm.rank());
            // Of recovered values: the last bit of y, times what `recoverable_ratio` allows; 3 here.
            auto const tolerance = type == torch::kDouble ? 1e-12 : 1e-5;
            for (std::size_t i = 0; i < results[0].size(); ++i)
              CHECK(error_of(results[1][i], results[0][i], 1) <= tolerance);
            // Elements of a channel that is kept are in no tensor, and too many to count as none.
            auto const tensor = rows_of(x, comm.rank()).numel() * x.element_size();
            CHECK(kept[0] - kept[1] >= tensor - 256);
          }
      });
    }
}

TEST_CASE("in place: what autograd forbids is an error on every rank, and changes nothing") {
  run_ranks(2, [](thread_communicator const& comm) {
    auto norm = make_norm(BatchNormOptions{3}, comm);
    norm->set_in_place();
    auto const before = state_of(*norm);
    auto const thrown = [&](Tensor const& input, norm_epilogue const& with = {}) {
      return message_of<syncnorm::invalid_argument_error>([&] { norm->forward_with(input, with); });
    };
    auto const values = random({4, 3, 2});
    auto const leaf = values.clone().requires_grad_();
    auto text = thrown(comm.rank() == 1 ? leaf : leaf * 1);
    CHECK_MESSAGE((contains(text, "rank 1: a leaf Variable that requires grad") && torch::equal(leaf, values)), text);
    text = thrown(comm.rank() == 1 ? (leaf * 1).unbind(0)[0].unsqueeze(0) : leaf * 1);
    CHECK_MESSAGE(contains(text, "is the output of a function that returns multiple views"), text);
    auto const both = leaf * 1;
    text = thrown(both, {.residual = comm.rank() == 0 ? both : leaf});
    CHECK_MESSAGE(contains(text, "rank 0: the residual is in the memory of the input"), text);
    text = thrown(comm.rank() == 0 ? values.unsqueeze(3).expand({4, 3, 2, 2}) : values.unsqueeze(3) * 1);
    CHECK_MESSAGE(contains(text, "rank 0: the strides of the input allow no pass in place"), text);
    text =
        message_of<syncnorm::invalid_argument_error>([&] { (void)syncnorm::torch::forward_batches(norm, {leaf * 1}); });
    CHECK_MESSAGE(contains(text, "micro-batches are not normalized in place"), text);
    CHECK(same_state(before, state_of(*norm)));

    // An operation before that needs its result; this is libtorch's own error, on each rank.
    auto const exponential = leaf.exp();
    auto const y = norm->forward(exponential);
    text = message_of<c10::Error>([&] { y.sum().backward(); });
    CHECK_MESSAGE(contains(text, "modified by an inplace operation"), text);
    // One after it that writes to y, on one rank.
    auto const written = norm->forward(leaf * 1);
    if (comm.rank() == 1) written.mul_(2);
    text = message_of<syncnorm::invalid_argument_error>([&] { written.sum().backward(); });
    CHECK_MESSAGE((contains(text, "rank 1") && contains(text, "modified by an inplace operation")), text);

    auto const dx = torch::autograd::grad({norm->forward(leaf * 1).square().sum()}, {leaf}, {}, true, true)[0];
    text = message_of<syncnorm::error>([&] { dx.sum().backward(); });
    CHECK_MESSAGE(contains(text, "a pass in place (double backward) cannot be differentiated"), text);
    // Without gradients, over whatever it is given.
    torch::NoGradGuard const no_recording;
    auto const input = leaf.detach().clone();
    CHECK(norm->forward(input).is_same(input));
  });
}
