#pragma once

#include <cstdint>
#include <span>

#include <syncnorm/host/batches_in_blocks.hpp>
#include <syncnorm/host/executor.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/batch_norm_common.hpp>
#include <syncnorm/ops/detail/complex_operands.hpp>
#include <syncnorm/ops/detail/exchange.hpp>
#include <syncnorm/ops/detail/pass_steps.hpp>

namespace syncnorm::detail {

/// The steps of a pass over complex channels, by ranges of them.
class complex_steps : public pass_steps {
public:
  [[nodiscard]] call_check& check() noexcept { return check_; }
  [[nodiscard]] std::int64_t channels() const override { return 2 * channels_; }

  void local(channel_span part, std::span<double> first, std::span<double> second) override {
    if (check_.failed()) return;
    for_each_range(exec_, complex_channels_of(part), follow_ || by_numbers_,
                   [&](host::executor_ref exec, channel_span range) {
                     auto const within = components_of(channel_span{range.first - part.first / 2, range.length});
                     local_by(exec, range, part_of(first, within), part_of(second, within));
                   });
  }

  void apply(channel_span part) override {
    for_each_range(exec_, complex_channels_of(part), follow_ || by_numbers_,
                   [&](host::executor_ref exec, channel_span range) { apply_by(exec, range); });
  }

protected:
  complex_steps(host::executor_ref exec, std::int64_t channels) : exec_{exec}, channels_{channels} {}

  /// `local` and `apply` of all channels, in blocks, of a pass of this rank alone over `x` that reads `inputs` tensors like it.
  template <complex_component T>
  void run_in_blocks(complex_batches<T> x, std::int64_t inputs) {
    host::for_each_block(exec_, channels_, x, inputs,
                         [&](host::executor_ref of_block, std::int64_t first, std::int64_t length) {
                           for_each_range(of_block, {first, length}, follow_ || by_numbers_,
                                          [&](host::executor_ref exec, channel_span range) {
                                            auto const [a, b] = totals(components_of(range));
                                            local_by(exec, range, a, b);
                                            apply_by(exec, range);
                                          });
                         });
  }

  host::executor_ref exec_;
  std::int64_t channels_; ///< complex ones
  call_check check_;
  bool follow_ = false;     ///< the components of a position, in all tensors
  bool by_numbers_ = false; ///< `goes_by_numbers`; else as real channels

private:
  virtual void local_by(host::executor_ref exec, channel_span range, std::span<double> first,
                        std::span<double> second) const = 0;
  virtual void apply_by(host::executor_ref exec, channel_span range) = 0;
};

} // namespace syncnorm::detail
