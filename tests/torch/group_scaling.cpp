#include <cstdint>
#include <vector>

#include "power_norm_support.hpp"

#include <syncnorm/torch/group_scaling.hpp>

using namespace test;
using syncnorm::invalid_argument_error;
using syncnorm::torch::GroupScaling1D;
using syncnorm::torch::GroupScaling1DOptions;

namespace {

/// GroupScaling1D by libtorch's own operators, of `[..., C]`.
Tensor scaled(Tensor const& x, std::int64_t groups, double eps) {
  auto shape = x.sizes().vec();
  shape.back() = groups;
  shape.push_back(x.size(-1) / groups);
  auto const grouped = x.view(shape);
  return (grouped / (grouped.pow(2).mean(-1, true) + eps).sqrt()).view(x.sizes());
}

} // namespace

TEST_CASE("GroupScaling1D and its gradient are those of libtorch's operators") {
  torch::manual_seed(1);
  for (auto const type : {torch::kFloat, torch::kDouble})
    for (std::int64_t const groups : {1, 2, 6})
      for (auto const& shape : {std::vector<std::int64_t>{5, 3, 6}, {7, 6}, {0, 3, 6}}) {
        auto const x = torch::randn(shape, type).requires_grad_(), same = x.detach().clone().requires_grad_();
        auto const dy = torch::randn(shape, type);
        GroupScaling1D scaling{GroupScaling1DOptions{groups}.eps(1e-2)};
        auto const y = scaling->forward(x), expected = scaled(same, groups, 1e-2);
        y.backward(dy);
        expected.backward(dy);
        CHECK(error_of(y, expected) <= tolerance_of(type));
        CHECK(error_of(x.grad(), same.grad(), 1) <= tolerance_of(type));
      }
  auto const image = random({2, 6, 4, 3});
  auto const last = scaled(image.permute({0, 2, 3, 1}).contiguous(), 3, 1e-5).permute({0, 3, 1, 2});
  CHECK(error_of(
            GroupScaling1D { 3 } -> forward(image), last) <= 1e-12);
  CHECK(contains(message_of<invalid_argument_error>([] {
                   GroupScaling1D { 4 } -> forward(random({3, 2, 6}));
                 }),
                 "6 channels cannot be divided into 4 groups"));
  CHECK(contains(message_of<invalid_argument_error>([] {
                   GroupScaling1D { 2 } -> forward(torch::ones({3, 2}, at::kInt));
                 }),
                 "Int"));
  auto const x = random({3, 2}).requires_grad_();
  auto const sparse = torch::ones({3, 2}, torch::kDouble).to_sparse();
  CHECK(contains(message_of<invalid_argument_error>([&] {
                   GroupScaling1D { 1 } -> forward(x).backward(sparse);
                 }),
                 "group_scaling backward: the gradient of an output is Sparse, expected Strided"));
  auto const dx =
      torch::autograd::grad({GroupScaling1D{1} -> forward(x).pow(2).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
  CHECK(contains(message_of<syncnorm::error>([&] { dx.sum().backward(); }), "GroupScaling1D"));
}
