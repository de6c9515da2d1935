#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include <syncnorm/core/epilogue.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/host/detail/scratch.hpp>
#include <syncnorm/host/prepared_epilogue.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// The epilogues of the K micro-batches of a pass, ready.
template <class T>
class pass_epilogues {
public:
  using given = std::span<batch_norm_epilogue<T> const>;

  /// None, or one for each of `x`, which are valid unless `check` has failed.
  pass_epilogues(call_check const& check, given epilogues, std::span<tensor_view<T const> const> x)
      : more_{static_cast<std::int64_t>(epilogues.size())} {
    if (check.failed() || epilogues.empty()) return;
    first_ = {epilogues[0], x[0]};
    for (; count_ + 1 < epilogues.size(); ++count_) more_.data()[count_] = {epilogues[count_ + 1], x[count_ + 1]};
  }
  /// Gives the masks back.
  ~pass_epilogues() { std::fill_n(more_.data(), count_, host::prepared_epilogue<T>{}); }
  pass_epilogues(pass_epilogues const&) = delete;
  pass_epilogues& operator=(pass_epilogues const&) = delete;

  [[nodiscard]] host::prepared_epilogue<T> const& operator[](std::size_t k) const {
    return k == 0 || count_ == 0 ? first_ : more_.data()[k - 1];
  }

  /// Says in `check` what is wrong with them.
  static void validate(call_check& check, given epilogues, std::span<tensor_view<T const> const> x) {
    auto const batches = x.size();
    check.require(epilogues.empty() || epilogues.size() == batches, [&] {
      return check.text("there are ", epilogues.size(), " epilogues, expected ", batches, " as micro-batches of x");
    });
    for (std::size_t k = 0; k < epilogues.size() && !check.failed(); ++k)
      check.epilogue(epilogues[k], x[k], batch_name{"the residual", k, batches}, batch_name{"the mask", k, batches});
  }

private:
  host::prepared_epilogue<T> first_;
  host::detail::scratch_lease<host::prepared_epilogue<T>> more_;
  std::size_t count_ = 0; ///< of `more_`
};

} // namespace syncnorm::detail
