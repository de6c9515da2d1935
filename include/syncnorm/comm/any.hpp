#pragma once

#include <concepts>
#include <memory>
#include <span>
#include <utility>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/any_model.hpp>
#include <syncnorm/comm/exchange_cost.hpp>
#include <syncnorm/comm/self.hpp>

namespace syncnorm {

/// An operation in flight over an `any_communicator`.
class any_work {
public:
  any_work(any_work&&) = default;
  any_work& operator=(any_work&&) = default;

  /// Whether the operation has completed. Throws what failed.
  bool test() { return work_ == nullptr || work_->test(); }
  /// Blocks until the operation has completed. Throws what failed.
  void wait() {
    if (work_ != nullptr) work_->wait();
  }

private:
  friend class any_communicator;
  explicit any_work(std::unique_ptr<detail::erased_work> work) : work_{std::move(work)} {}

  std::unique_ptr<detail::erased_work> work_; // null: completed at once
};

/// Any blocking communicator behind one type, for code that is compiled apart from it. Copies are the same
/// rank. Operations that the wrapped communicator has not itself are made of those that it has: asynchronous
/// ones then complete before they return.
class any_communicator {
public:
  /// The communicator of one rank.
  any_communicator() : any_communicator{self_communicator{}} {}

  template <class C>
  requires(!std::same_as<C, any_communicator>) && blocking_communicator<C> any_communicator(C comm)
      : model_{std::make_shared<detail::communicator_model<C> const>(std::move(comm))} {}

  [[nodiscard]] int rank() const { return model_->rank(); }
  [[nodiscard]] int size() const { return model_->size(); }

  template <wire_type T>
  void allgather(std::span<T const> in, std::span<T> out) const {
    model_->run(detail::make_call(detail::collective_kind::allgather, in, out));
  }
  template <reducible_type T>
  void allreduce(std::span<T const> in, std::span<T> out, reduce_op op) const {
    model_->run(detail::make_call(detail::collective_kind::allreduce, in, out, op));
  }
  template <wire_type T>
  [[nodiscard]] any_work allgather_async(std::span<T const> in, std::span<T> out) const {
    return any_work{model_->start(detail::make_call(detail::collective_kind::allgather, in, out))};
  }
  template <reducible_type T>
  [[nodiscard]] any_work allreduce_async(std::span<T const> in, std::span<T> out, reduce_op op) const {
    return any_work{model_->start(detail::make_call(detail::collective_kind::allreduce, in, out, op))};
  }
  template <wire_type T>
  void broadcast(std::span<T> data, int root) const {
    model_->run(
        detail::make_call(detail::collective_kind::broadcast, std::span<T const>{}, data, reduce_op::sum, root));
  }
  template <wire_type T>
  void scatter(std::span<T const> in, std::span<T> out, int root) const {
    model_->run(detail::make_call(detail::collective_kind::scatter, in, out, reduce_op::sum, root));
  }
  template <reducible_type T>
  void reduce(std::span<T const> in, std::span<T> out, int root, reduce_op op) const {
    model_->run(detail::make_call(detail::collective_kind::reduce, in, out, op, root));
  }
  void barrier() const { model_->barrier(); }
  /// Whether `allgather_async` returns before the operation has completed.
  [[nodiscard]] bool overlaps() const noexcept { return model_->overlaps(); }
  [[nodiscard]] double exchange_overhead() const { return model_->exchange_overhead(); }
  [[nodiscard]] exchange_cost cost_of_exchange() const { return model_->cost_of_exchange(); }

  /// Whether `split` works: whether the wrapped communicator has it, and gives a blocking communicator.
  [[nodiscard]] bool can_split() const noexcept { return model_->can_split(); }
  /// As syncnorm::split. Throws communicator_error on every rank where the wrapped communicator cannot.
  [[nodiscard]] any_communicator split(int color, int key) const { return any_communicator{model_->split(color, key)}; }

  [[nodiscard]] bool can_abort() const noexcept { return model_->can_abort(); }
  /// As the wrapped communicator's; see `aborts`. Throws communicator_error where it has none.
  void abort() const { model_->abort(); }

  /// The wrapped communicator if it is a `C`, else null.
  template <class C>
  [[nodiscard]] C const* target() const noexcept {
    auto const* const model = dynamic_cast<detail::communicator_model<C> const*>(model_.get());
    return model == nullptr ? nullptr : &model->comm;
  }

private:
  explicit any_communicator(std::shared_ptr<detail::erased_communicator const> model) : model_{std::move(model)} {}

  std::shared_ptr<detail::erased_communicator const> model_;
};

} // namespace syncnorm
