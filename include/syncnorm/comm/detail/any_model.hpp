#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/comm/detail/erased_work.hpp>
#include <syncnorm/comm/detail/signature.hpp>
#include <syncnorm/comm/exchange_cost.hpp>

namespace syncnorm::detail {

/// A collective with its type as a value.
struct erased_call {
  collective_kind kind;
  wire_id type;
  reduce_op op;
  int root;
  void const* in;
  std::size_t in_size;
  void* out;
  std::size_t out_size;

  template <class T>
  [[nodiscard]] std::span<T const> input() const {
    return {static_cast<T const*>(in), in_size};
  }
  template <class T>
  [[nodiscard]] std::span<T> output() const {
    return {static_cast<T*>(out), out_size};
  }
};

template <wire_type T>
[[nodiscard]] erased_call make_call(collective_kind kind, std::span<T const> in, std::span<T> out,
                                    reduce_op op = reduce_op::sum, int root = 0) {
  return {kind, wire_id_of<T>, op, root, in.data(), in.size(), out.data(), out.size()};
}

class erased_communicator {
public:
  virtual ~erased_communicator() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;
  virtual void run(erased_call const& call) const = 0;
  /// Null where the operation has completed already.
  [[nodiscard]] virtual std::unique_ptr<erased_work> start(erased_call const& call) const = 0;
  virtual void barrier() const = 0;
  [[nodiscard]] virtual bool overlaps() const noexcept = 0;
  [[nodiscard]] virtual double exchange_overhead() const = 0;
  [[nodiscard]] virtual exchange_cost cost_of_exchange() const = 0;
  [[nodiscard]] virtual bool can_split() const noexcept = 0;
  [[nodiscard]] virtual std::shared_ptr<erased_communicator const> split(int color, int key) const = 0;
  [[nodiscard]] virtual bool can_abort() const noexcept = 0;
  virtual void abort() const = 0;
};

/// A communicator whose split can be wrapped in turn.
template <class C>
concept splits_blocking = splits<C> && requires(C const& c) {
  { c.split(0, 0) } -> blocking_communicator;
};

template <blocking_communicator C>
class communicator_model final : public erased_communicator {
public:
  explicit communicator_model(C c) : comm{std::move(c)} {}

  [[nodiscard]] int rank() const override { return syncnorm::rank(comm); }
  [[nodiscard]] int size() const override { return syncnorm::size(comm); }

  void run(erased_call const& call) const override {
    visit_wire(call.type, [&]<class T>(T) { run_typed<T>(call); });
  }

  [[nodiscard]] std::unique_ptr<erased_work> start(erased_call const& call) const override {
    return visit_wire(call.type, [&]<class T>(T) { return start_typed<T>(call); });
  }

  void barrier() const override { syncnorm::barrier(comm); }
  [[nodiscard]] bool overlaps() const noexcept override { return syncnorm::overlaps(comm); }
  [[nodiscard]] double exchange_overhead() const override { return syncnorm::exchange_overhead(comm); }
  [[nodiscard]] exchange_cost cost_of_exchange() const override { return syncnorm::cost_of_exchange(comm); }

  [[nodiscard]] bool can_split() const noexcept override { return splits_blocking<C>; }
  [[nodiscard]] std::shared_ptr<erased_communicator const> split(int color, int key) const override {
    if constexpr (splits_blocking<C>) {
      auto part = syncnorm::split(comm, color, key);
      return std::make_shared<communicator_model<decltype(part)> const>(std::move(part));
    } else {
      throw communicator_error{"any_communicator", "backend cannot split"};
    }
  }

  [[nodiscard]] bool can_abort() const noexcept override { return aborts<C>; }
  void abort() const override {
    if constexpr (aborts<C>)
      comm.abort();
    else
      throw communicator_error{"any_communicator", "backend cannot abort"};
  }

  C comm;

private:
  template <class T>
  void run_typed(erased_call const& call) const {
    auto const in = call.input<T>();
    auto const out = call.output<T>();
    switch (call.kind) {
    case collective_kind::allgather:
      return syncnorm::allgather(comm, in, out);
    case collective_kind::broadcast:
      return syncnorm::broadcast(comm, out, call.root);
    case collective_kind::scatter:
      return syncnorm::scatter(comm, in, out, call.root);
    default:
      if constexpr (reducible_type<T>) {
        if (call.kind == collective_kind::reduce) return syncnorm::reduce(comm, in, out, call.root, call.op);
        return syncnorm::allreduce(comm, in, out, call.op);
      }
    }
  }

  template <class T>
  [[nodiscard]] std::unique_ptr<erased_work> start_typed(erased_call const& call) const {
    auto const in = call.input<T>();
    auto const out = call.output<T>();
    if (call.kind == collective_kind::allgather) {
      if constexpr (allgathers_async<C, T>) return erase_work(syncnorm::allgather_async(comm, in, out));
    } else if constexpr (reducible_type<T>) {
      if constexpr (allreduces_async<C, T>) return erase_work(syncnorm::allreduce_async(comm, in, out, call.op));
    }
    run_typed<T>(call);
    return nullptr;
  }
};

} // namespace syncnorm::detail
