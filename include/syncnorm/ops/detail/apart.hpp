#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string_view>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

// What a pass writes is apart in memory from what it reads of other elements, which it may be yet to read.
namespace syncnorm::detail {

/// The operands of one kind of all micro-batches; beyond the last of them, and of default views, there is nothing.
template <class T>
class named_views {
public:
  named_views(std::string_view of, std::span<tensor_view<T const> const> views) : name{of}, read_{views} {}
  named_views(std::string_view of, std::span<tensor_view<T> const> views) : name{of}, written_{views} {}
  explicit named_views(std::span<batch_norm_epilogue<T> const> epilogues)
      : name{"the residual"}, epilogues_{epilogues} {}

  [[nodiscard]] tensor_view<T const> operator[](std::size_t k) const {
    if (k < read_.size()) return read_[k];
    if (k < written_.size()) return written_[k];
    return k < epilogues_.size() ? tensor_view<T const>{epilogues_[k].residual} : tensor_view<T const>{};
  }

  std::string_view name;

private:
  std::span<tensor_view<T const> const> read_{};
  std::span<tensor_view<T> const> written_{};
  std::span<batch_norm_epilogue<T> const> epilogues_{};
};

/// K micro-batches of an output, which are apart from each other and from what is read. `may_be_same`: output k may be exactly input k.
template <class T>
void check_output_apart(call_check& check, std::size_t batches, named_views<T> const& written,
                        std::initializer_list<named_views<T>> read, bool may_be_same) {
  for (std::size_t k = 0; k < batches; ++k) {
    if (!written[k].is_given()) continue;
    batch_name const of{written.name, k, batches};
    for (std::size_t j = 0; j < k; ++j)
      check.apart<T>(written[k], of, written[j], batch_name{written.name, j, batches}, false);
    for (std::size_t j = 0; j < batches; ++j)
      for (auto const& each : read)
        check.apart<T>(written[k], of, each[j], batch_name{each.name, j, batches}, may_be_same && j == k);
  }
}

/// The same of two outputs, which are apart from each other, too.
template <class T>
void check_outputs_apart(call_check& check, std::size_t batches, named_views<T> const& first,
                         named_views<T> const& second, std::initializer_list<named_views<T>> read, bool may_be_same) {
  check_output_apart<T>(check, batches, first, read, may_be_same);
  check_output_apart<T>(check, batches, second, read, may_be_same);
  for (std::size_t k = 0; k < batches; ++k)
    for (std::size_t j = 0; j < batches; ++j)
      check.apart<T>(first[k], batch_name{first.name, k, batches}, second[j], batch_name{second.name, j, batches},
                     false);
}

} // namespace syncnorm::detail
