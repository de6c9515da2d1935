#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "support.hpp"

#include <syncnorm/comm/thread_group.hpp>
#include <syncnorm/torch/micro_batches.hpp>

using namespace test;
using syncnorm::masked_outputs;
using syncnorm::run_ranks;
using syncnorm::thread_communicator;
using syncnorm::torch::norm_epilogue;

namespace {

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
  y = torch::where(y > 0, y, (with.activation.exponential ? y.expm1() : y) * with.activation.negative_slope);
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
    syncnorm::activation activation;
    bool residual, mask;
    masked_outputs masked;
  };
  for (auto const& chosen : {choice{{0}, true, false, masked_outputs::normalized},
                             {{0.25}, false, true, masked_outputs::zero},
                             {{1}, true, true, masked_outputs::normalized},
                             {{0}, true, true, masked_outputs::zero},
                             {syncnorm::activation::elu(), true, true, masked_outputs::zero},
                             {syncnorm::activation::elu(0.5), false, false, masked_outputs::normalized}})
    for (auto const format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      auto const x = random({5, 3, 2, 2}), dy = random({5, 3, 2, 2}), residual = random({5, 3, 2, 2});
      auto const options = BatchNormOptions{3}.eps(1e-2);
      auto twin = make_norm(options);
      auto const whole = x.clone().requires_grad_(), whole_residual = residual.clone().requires_grad_();
      norm_epilogue of_whole{.activation = chosen.activation, .masked = chosen.masked};
      if (chosen.residual) of_whole.residual = whole_residual;
      if (chosen.mask) of_whole.mask = mask;
      auto const expected = reference(whole, twin->weight, twin->bias, of_whole);
      expected.backward(dy);
      Tensor weight_grads[2], bias_grads[2];
      run_ranks(2, [&](thread_communicator const& comm) {
        INFO("slope ", chosen.activation.negative_slope, ", rank ", comm.rank());
        auto norm = make_norm(options, comm);
        auto const own = rows_of(x, comm.rank()).contiguous(format).detach().clone().requires_grad_();
        auto const own_residual = rows_of(residual, comm.rank()).clone().requires_grad_();
        norm_epilogue with{.activation = chosen.activation, .masked = chosen.masked};
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

TEST_CASE("a residual without an activation is let go, and may be written to before the backward pass") {
  auto const x = random({3, 4, 5, 2}).set_requires_grad(true), dy = random({3, 4, 5, 2});
  for (bool const penalized : {false, true}) {
    auto residual = random({3, 4, 5, 2}).set_requires_grad(true).mul(1);
    auto norm = make_norm(BatchNormOptions{4});
    auto const y = norm->forward_with(x, {.residual = residual});
    CHECK(residual.use_count() == 1);
    {
      torch::NoGradGuard const no_recording;
      residual.add_(1);
    }
    auto const seed = dy.clone().set_requires_grad(penalized);
    auto const gradients = torch::autograd::grad({y}, {x, residual}, {seed}, /*retain_graph=*/c10::nullopt, penalized);
    CHECK(error_of(gradients[1], dy) == 0);
    if (!penalized) continue;
    auto const second = torch::autograd::grad({gradients[0].square().sum() + gradients[1].square().sum()}, {seed});
    auto plain = make_norm(BatchNormOptions{4});
    auto const of_x = torch::autograd::grad({plain->forward(x)}, {x}, {seed}, c10::nullopt, true);
    auto const expected = torch::autograd::grad({of_x[0].square().sum()}, {seed})[0] + 2 * dy;
    CHECK(error_of(second[0], expected, scale_of(expected)) <= 1e-12);
  }
}

TEST_CASE("double backward through ELU is an error that says so") {
  auto const x = random({3, 4, 5}).set_requires_grad(true);
  auto norm = make_norm(BatchNormOptions{4});
  auto const y = norm->forward_with(x, {syncnorm::activation::elu()});
  auto const dx = torch::autograd::grad({y.square().sum()}, {x}, {}, c10::nullopt, /*create_graph=*/true)[0];
  auto const message = message_of<syncnorm::invalid_argument_error>([&] { torch::autograd::grad({dx.sum()}, {x}); });
  CHECK_MESSAGE(contains(message, "the activation is exponential, which double backward does not take"), message);
}

TEST_CASE("what is wrong with a residual or a mask on one rank is thrown on both") {
  struct fault {
    norm_epilogue epilogue;
    char const* text;
  };
  norm_epilogue shorter, other_type, other_shape, no_mask, nested, nested_mask;
  shorter.residual = torch::zeros({2, 3, 4}, torch::kDouble);
  other_type.residual = torch::zeros({2, 3, 5}, torch::kFloat);
  other_shape.mask = torch::ones({2, 3, 5}, torch::kBool);
  no_mask.mask = torch::ones({2, 5}, torch::kDouble);
  nested.residual = at::_nested_tensor_from_mask(torch::ones({2, 3, 5}), torch::ones({2, 3}, torch::kBool));
  nested_mask.mask = nested.residual;
  for (auto const& [epilogue, text] :
       std::vector<fault>{{shorter, "rank 1: the residual is [2, 3, 4], expected [2, 3, 5]"},
                          {other_type, "rank 1: the residual is of Float, expected Double"},
                          {other_shape, "rank 1: the mask is [2, 3, 5], expected [2, 5]"},
                          {no_mask, "rank 1: the mask is of Double, expected Bool or Byte"},
                          {nested, "NestedTensor"},
                          {nested_mask, "NestedTensor"}}) {
    auto const& with = epilogue;
    std::string const expected = text;
    run_ranks(2, [&with, &expected](thread_communicator const& comm) {
      auto norm = make_norm(BatchNormOptions{3}, comm);
      auto const message = message_of<syncnorm::invalid_argument_error>([&] {
        norm->forward_with(random({2, 3, 5}), comm.rank() == 1 ? with : norm_epilogue{});
      });
      CHECK_MESSAGE((contains(message, "rank 1: ") && contains(message, expected)), message);
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
      CHECK(error_of(got[0], own(expected[0]), scale_of(expected[0])) <= 1e-12);
      if (chosen.residual) CHECK(error_of(got[2], own(expected[2]), scale_of(expected[2])) <= 1e-12);
      weight_grads[comm.rank()] = got[1];
    });
    CHECK(error_of(weight_grads[0] + weight_grads[1], expected[1], 1) <= 1e-12);
  }
}
