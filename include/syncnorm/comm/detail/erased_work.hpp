#pragma once

#include <memory>
#include <utility>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/detail/kept_memory.hpp>

namespace syncnorm::detail {

/// An operation in flight, of any type.
class erased_work {
public:
  virtual ~erased_work() = default;
  virtual bool test() = 0;
  virtual void wait() = 0;
};

template <async_work W>
class work_model final : public erased_work, public in_kept_memory {
public:
  explicit work_model(W work) : work_{std::move(work)} {}
  bool test() override { return work_.test(); }
  void wait() override { work_.wait(); }

private:
  W work_;
};

template <async_work W>
[[nodiscard]] std::unique_ptr<erased_work> erase_work(W work) {
  return std::make_unique<work_model<W>>(std::move(work));
}

} // namespace syncnorm::detail
