#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <span>
#include <tuple>

#include <syncnorm/core/detail/kept_memory.hpp>
#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/mask_view.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/partition.hpp>

// To a pass, samples and positions are the same: it may take one for the other in all its operands, or all samples for one.
namespace syncnorm::detail {

/// Whether one channel passes for contiguous channels whose positions are apart, which would be taken one by one.
template <class T>
[[nodiscard]] bool is_lone_channel(tensor_view<T> const& x) {
  return x.channels == 1 && x.stride_c == 1 && !host::detail::has_rows(x);
}

/// Whether channels are not contiguous, and samples taken for positions come in the order of memory, as in a matrix by columns, or make
/// rows at all.
template <class T>
[[nodiscard]] bool samples_inside(tensor_view<T> const& x) {
  if (x.samples <= 1 || x.stride_c == 1) return false;
  if (x.spatial > 1) return std::abs(x.stride_n) < std::abs(x.stride_s);
  return true;
}

/// Whether samples come one after the other as if they were one; of what is not there, too.
template <class T>
[[nodiscard]] bool samples_join(tensor_view<T> const& x) {
  return host::detail::samples_follow(x);
}
[[nodiscard]] inline bool samples_join(mask_view const& mask) {
  return mask.samples <= 1 || mask.stride_n == mask.spatial * mask.stride_s;
}
template <class T>
[[nodiscard]] bool samples_join(batch_norm_epilogue<T> const& epilogue) {
  return samples_join(epilogue.residual) && samples_join(epilogue.mask);
}

/// `of` of one channel, with a stride that has no meaning.
template <class T>
[[nodiscard]] tensor_view<T> alone(tensor_view<T> of) {
  of.stride_c = 0;
  return of;
}
template <class T>
[[nodiscard]] batch_norm_epilogue<T> alone(batch_norm_epilogue<T> of) {
  of.residual.stride_c = 0;
  return of;
}

template <class T>
[[nodiscard]] tensor_view<T> turned(tensor_view<T> const& view) {
  return host::detail::transposed(view);
}
template <class T>
[[nodiscard]] batch_norm_epilogue<T> turned(batch_norm_epilogue<T> epilogue) {
  epilogue.residual = turned(epilogue.residual);
  epilogue.mask = host::detail::transposed(epilogue.mask);
  return epilogue;
}

template <class T>
[[nodiscard]] tensor_view<T> joined(tensor_view<T> const& view) {
  return view.is_given() ? host::detail::as_one_sample(view) : view;
}
template <class T>
[[nodiscard]] batch_norm_epilogue<T> joined(batch_norm_epilogue<T> epilogue) {
  epilogue.residual = joined(epilogue.residual);
  auto& mask = epilogue.mask;
  if (mask) mask = {mask.data, 1, mask.samples * mask.spatial, mask.stride_n, mask.stride_s};
  return epilogue;
}

/// The operands of the K micro-batches of a pass, each of some `Kinds`, with samples taken for positions, or as one, where that makes
/// longer rows.
template <class... Kinds>
class turned_batches {
public:
  /// Makes `operands`, each none or K, refer to copies if that is so of some of the K `x`, which may be among them.
  template <class T>
  void turn(std::span<tensor_view<T const> const> x, std::span<Kinds const>&... operands) {
    auto const may_join = [](tensor_view<T const> const& each) {
      return each.samples > 1 && each.spatial > 1 && each.channels > 1 && each.stride_c != 1 && samples_join(each);
    };
    auto const changes = [&](tensor_view<T const> const& each) {
      return is_lone_channel(each) || samples_inside(each) || may_join(each);
    };
    if (!std::ranges::any_of(x, changes)) return;
    auto const for_all = [&](auto const& f) { std::apply([&](auto&... copies) { (f(copies), ...); }, copies_); };
    std::apply([&](auto&... copies) { (copies.assign(operands.begin(), operands.end()), ...); }, copies_);
    for (std::size_t k = 0; k < x.size(); ++k) {
      auto of_x = x[k];
      auto const change = [&](auto const& to) {
        of_x = to(of_x);
        for_all([&](auto& copies) {
          if (!copies.empty()) copies[k] = to(copies[k]);
        });
      };
      if (is_lone_channel(of_x)) change([](auto const& of) { return alone(of); });
      if (samples_inside(of_x)) change([](auto const& of) { return turned(of); });
      bool join = may_join(of_x);
      for_all([&](auto const& copies) { join = join && (copies.empty() || samples_join(copies[k])); });
      if (join) change([](auto const& of) { return joined(of); });
    }
    std::apply([&](auto const&... copies) { ((operands = copies), ...); }, copies_);
  }

private:
  std::tuple<kept_vector<Kinds>...> copies_;
};

} // namespace syncnorm::detail
