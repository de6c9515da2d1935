#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include <ATen/ATen.h>

#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/huge_pages.hpp>
#include <syncnorm/torch/element.hpp>
#include <syncnorm/torch/executor.hpp>

namespace syncnorm::torch::detail {

/// The spatial dimensions of x, outermost in memory first. The statistics do not mind their order, as long as all
/// tensors of a pass are walked in the same one.
[[nodiscard]] inline std::vector<std::int64_t> spatial_order(at::Tensor const& x) {
  std::vector<std::int64_t> order;
  for (std::int64_t d = 2; d < x.dim(); ++d) order.push_back(d);
  std::ranges::stable_sort(order, std::ranges::greater{}, [&](std::int64_t d) { return x.stride(d); });
  return order;
}

/// What is at `data`, laid out as x `[N, C, …]`, as `[N, C, S]`, the spatial dimensions merged in the given order; empty where no
/// stride expresses that.
template <class T>
[[nodiscard]] std::optional<tensor_view<T>> view_at(T* data, at::Tensor const& x,
                                                    std::vector<std::int64_t> const& order) {
  tensor_view<T> view{data, x.size(0), x.size(1), 1, x.stride(0), x.stride(1), 1};
  bool mergeable = true;
  std::for_each(order.rbegin(), order.rend(), [&](std::int64_t d) {
    if (x.size(d) == 1) return;
    if (view.spatial == 1)
      view.stride_s = x.stride(d);
    else
      mergeable = mergeable && x.stride(d) == view.stride_s * view.spatial;
    view.spatial *= x.size(d);
  });
  if (!mergeable && x.numel() != 0) return std::nullopt;
  return view;
}

/// x itself.
template <class T>
[[nodiscard]] std::optional<tensor_view<T>> view_of(at::Tensor const& x, std::vector<std::int64_t> const& order) {
  return view_at<T>(elements_of<std::remove_const_t<T>>(x), x, order);
}

/// `tensor` with its values in memory, as they are: where they are marked as negated or as zeros, a copy.
[[nodiscard]] inline at::Tensor in_memory(at::Tensor const& tensor) {
  return tensor._is_zerotensor() ? at::zeros(tensor.sizes(), tensor.options()) : tensor.resolve_neg();
}

/// `tensor`, which was just allocated and is to be written: in huge pages, where it is of more than glibc's greatest threshold, and its
/// memory therefore new to the process.
inline at::Tensor const& in_huge_pages(at::Tensor const& tensor) {
  constexpr std::size_t always_new = std::size_t{32} << 20;
  if (tensor.device().is_cpu() && tensor.nbytes() > always_new)
    host::use_huge_pages(at_executor{}, tensor.data_ptr(), tensor.nbytes());
  return tensor;
}

/// The tensors of a pass: what is read, and what is written, of the same extents and memory format.
template <class T>
struct operands {
  at::Tensor x, y;
  tensor_view<T const> x_view{};
  tensor_view<T> y_view{};
  std::vector<std::int64_t> order{};
};

/// `input` as a pass reads it, and a tensor that it can write to. Copies `input` where no view expresses it.
template <class T>
[[nodiscard]] operands<T> make_operands(at::Tensor const& input) {
  auto const attempt = [](at::Tensor const& x) -> std::optional<operands<T>> {
    operands<T> made{x, at::empty_like(x), {}, {}, spatial_order(x)};
    auto const x_view = view_of<T const>(made.x, made.order);
    auto const y_view = view_of<T>(made.y, made.order);
    if (!x_view || !y_view) return std::nullopt;
    made.x_view = *x_view;
    made.y_view = *y_view;
    return made;
  };
  auto const x = in_memory(input.detach());
  if (auto made = attempt(x)) return *made;
  return *attempt(x.contiguous(x.suggest_memory_format()));
}

/// `input` as a pass in place reads and writes it. Throws where no view expresses it.
template <class T>
[[nodiscard]] operands<T> make_operands_in_place(at::Tensor const& input) {
  operands<T> made{input.detach(), input, {}, {}, spatial_order(input)};
  bool const marked = input.is_neg() || input._is_zerotensor();
  auto const view = marked ? std::nullopt : view_of<T>(input, made.order);
  if (!view)
    throw invalid_argument_error{"the strides of the input allow no pass in place; it takes a contiguous copy"};
  made.x_view = made.y_view = *view;
  return made;
}

/// `other`, of the extents of `like.y`, as a pass reads it beside `like`. Copies it where the two are laid out
/// differently, since no kernel is fast over both.
template <class T>
[[nodiscard]] tensor_view<T const> make_companion(at::Tensor& other, operands<T> const& like) {
  other = in_memory(other);
  auto const view = view_of<T const>(other, like.order);
  auto const& y = like.y_view;
  if (view && ((view->stride_s == 1 && y.stride_s == 1) || (view->stride_c == 1 && y.stride_c == 1))) return *view;
  other = in_huge_pages(at::empty_like(like.y)).copy_(other);
  return *view_of<T const>(other, like.order);
}

} // namespace syncnorm::torch::detail
