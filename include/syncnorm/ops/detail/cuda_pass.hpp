#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include <cuda_runtime_api.h>

#include <syncnorm/comm/collectives.hpp>
#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/error.hpp>
#include <syncnorm/core/tensor_view.hpp>
#include <syncnorm/cuda/operands.hpp>
#include <syncnorm/ops/batch_norm_state.hpp>
#include <syncnorm/ops/cuda_batch_norm_state.hpp>
#include <syncnorm/ops/detail/cuda_checks.hpp>
#include <syncnorm/ops/detail/cuda_packets.hpp>
#include <syncnorm/ops/detail/exchange_choice.hpp>

namespace syncnorm::cuda::detail {

using syncnorm::detail::merge_rule;
using syncnorm::detail::resolve_on_stream;

/// What no rank can let the others know of by an exchange: that there can be none on this stream.
template <communicator C>
void require_capturable(C const& comm, std::string_view pass, bool agreed, cudaStream_t stream) {
  if (!is_capturing(stream)) return;
  if constexpr (requires { comm.capturable(); })
    if (!comm.capturable())
      throw invalid_argument_error{std::string{pass} + ": the stream is being captured in a graph, and the exchange of "
                                                       "this communicator cannot be"};
  if (!agreed)
    throw invalid_argument_error{std::string{pass} + ": the stream is being captured in a graph before the ranks have "
                                                     "agreed: call prepare(stream) on every rank first"};
}

/// A pass of one layer on a device in the steps between which ranks exchange. What is wrong with it is in its header, and then its
/// steps write nothing but the report.
class device_pass {
public:
  virtual ~device_pass() = default;

  [[nodiscard]] virtual std::string_view name() const = 0;
  [[nodiscard]] batch_norm_workspace& workspace() const { return *workspace_; }
  /// First: looks what is wrong with the pass, which is `alone` where no other rank is involved.
  virtual void check(bool alone, cudaStream_t stream) = 0;
  [[nodiscard]] std::string const& fault() const { return check_.fault(); }
  /// That of the stream which `check` has looked at.
  [[nodiscard]] int stream_device() const noexcept { return check_.stream_device(); }
  [[nodiscard]] syncnorm::detail::packet_header const& header() const { return header_; }
  /// Whether the pass involves other ranks, where there are any.
  [[nodiscard]] virtual bool collective() const = 0;
  /// What it exchanges by itself.
  [[nodiscard]] virtual pass_packets const& packets() const { return workspace_->packets(); }
  /// What becomes of the ranks' values.
  [[nodiscard]] virtual merge_rule rule() const { return merge_rule::sums; }
  /// Writes this rank's packet.
  virtual void local(syncnorm::detail::packet_header const& header, packet_place const& own, cudaStream_t stream) = 0;
  /// Between the allreduces of a layer's packets.
  virtual void accept_sums(reduced_packets const& of, fault_report const& report, cudaStream_t stream) = 0;
  /// What is made of the packets of all ranks.
  virtual void apply(gathered_packets const& all, packet_place const& own, fault_report const& report,
                     cudaStream_t stream) = 0;
  /// All of it on this rank alone, of a pass without fault.
  virtual void run_alone(cudaStream_t stream) = 0;
  /// Leaves what a pass does that has failed on every rank, after an exchange by which the others hear of it.
  virtual void forgo(cudaStream_t) {}
  /// Leaves nothing for a later pass, after something was thrown.
  virtual void fail() noexcept {}
  /// The same where the others may have completed the pass, so that a later one, which fails, is collective still.
  virtual void drop() noexcept {}

protected:
  explicit device_pass(batch_norm_workspace& workspace, batch_norm_caller const& caller = {})
      : workspace_{&workspace}, check_{workspace.device()}, caller_{caller} {}

  /// What the caller knows to be wrong comes first.
  void check_caller() {
    check_.require(caller_.fault.empty(), [&] { return std::string{caller_.fault}; });
  }
  [[nodiscard]] std::int32_t callers_backward() const { return static_cast<std::int32_t>(caller_.backward); }

  batch_norm_workspace* workspace_;
  device_check check_;
  batch_norm_caller caller_;
  syncnorm::detail::packet_header header_{};
};

/// A pass that may travel with those of other layers.
class groupable_pass : public device_pass {
public:
  /// Writes a packet of no elements, where the pass exchanges nothing itself.
  virtual void announce(syncnorm::detail::packet_header const& header, packet_place const& own,
                        cudaStream_t stream) = 0;
  /// Of a group's packets, before those are applied.
  virtual void agree_on_group(gathered_headers const& all, fault_report const& report, cudaStream_t stream) = 0;
  /// What a forward pass leaves for its backward pass; of others null.
  [[nodiscard]] virtual batch_norm_saved const* saves_to() const { return nullptr; }
  /// Throws where that of its forward pass is no longer what it was when the pass was made.
  virtual void require_current() const {}

protected:
  using device_pass::device_pass;
};

inline void throw_fault(device_pass const& pass) {
  if (!pass.fault().empty()) throw invalid_argument_error{std::string{pass.name()} + ": " + pass.fault()};
}

/// Sums what ranks reduce first, moments or all values, and gathers their headers beside it.
template <communicator C>
void reduce_values(C const& comm, pass_packets const& packets, bool moments, cudaStream_t stream) {
  std::span<double const> const from = moments ? packets.weighted() : packets.own_values();
  auto const to = moments ? packets.weighted() : packets.merged_values();
  syncnorm::batch(comm, [&] {
    syncnorm::allgather(comm, std::span<std::byte const>{packets.own_headers()}, packets.all_headers(), stream);
    syncnorm::allreduce(comm, from, to, reduce_op::sum, stream);
  });
}
/// Sums m2 about the mean of all ranks.
template <communicator C>
void reduce_m2(C const& comm, pass_packets const& packets, cudaStream_t stream) {
  syncnorm::batch(comm, [&] {
    for (std::size_t l = 0; l < packets.layers(); ++l) {
      auto const m2 = packets.merged_m2(l);
      syncnorm::allreduce(comm, std::span<double const>{m2}, m2, reduce_op::sum, stream);
    }
  });
}

/// The collectives of an exchange by `policy`: an allgather; or an allreduce beside an allgather of the headers, accept(), and of moments
/// another allreduce.
template <communicator C, class Accept>
void run_collectives(C const& comm, pass_packets const& packets, merge_rule rule, exchange_policy policy,
                     cudaStream_t stream, Accept const& accept) {
  if constexpr (allreduces_on_stream<C, double>)
    if (policy == exchange_policy::reduce) {
      bool const moments = rule == merge_rule::moments;
      reduce_values(comm, packets, moments, stream);
      std::exception_ptr failure;
      try {
        accept();
      } catch (...) {
        failure = std::current_exception();
      }
      // In step with the others, who find that this rank's sums are missing.
      if (moments) reduce_m2(comm, packets, stream);
      if (failure != nullptr) std::rethrow_exception(failure);
      return;
    }
  syncnorm::allgather(comm, std::span<std::byte const>{packets.own()}, packets.all(), stream);
}

/// The exchange of a pass, and of those that travel with it, as `policy` says. What is wrong goes to `report` here only where ranks
/// reduce.
template <communicator C>
void exchange(C const& comm, device_pass& pass, pass_packets const& packets, exchange_policy policy,
              fault_report const& report, cudaStream_t stream) {
  run_collectives(comm, packets, pass.rule(), policy, stream, [&] {
    bool const moments = pass.rule() == merge_rule::moments;
    for (std::size_t l = 0; l < packets.layers(); ++l) pass.accept_sums(packets.reduced(l, moments), report, stream);
  });
}

/// The collectives of `exchange` alone, of what is in the packets: communicators may connect ranks, and allocate, in the first of a kind
/// and size.
template <communicator C>
void rehearse_exchange(C const& comm, pass_packets const& packets, merge_rule rule, exchange_policy policy,
                       cudaStream_t stream) {
  run_collectives(comm, packets, rule, policy, stream, [] {});
}

/// Runs `write`, which enqueues this rank's packet of `header`. Returns what that throws, as where there is no code for the device: the
/// other ranks, which are waiting, hear of it from the header in the packet's place.
template <class Write>
[[nodiscard]] std::exception_ptr thrown_by_writing(syncnorm::detail::packet_header const& header,
                                                   packet_place const& own, cudaStream_t stream, Write const& write) {
  try {
    write();
    return nullptr;
  } catch (std::exception const& e) {
    if (is_capturing(stream)) throw; // the capture has failed
    auto failure = std::current_exception();
    auto faulty = header;
    syncnorm::detail::set_text(faulty.fault, e.what());
    faulty.count = 0;
    syncnorm::detail::require_cuda(cudaMemcpyAsync(own.data, &faulty, sizeof faulty, cudaMemcpyHostToDevice, stream),
                                   "cudaMemcpyAsync");
    return failure;
  }
}

/// `run_pass`, but for what becomes of a pass that throws; `exchanged`: whether the others may have completed it. Returns what is to be
/// thrown of a pass of which all ranks hear.
template <communicator C>
[[nodiscard]] std::exception_ptr run_steps(C const& comm, device_pass& pass, bool& exchanged, cudaStream_t stream) {
  auto& workspace = pass.workspace();
  bool const alone = syncnorm::size(comm) == 1 || !pass.collective();
  if (!alone) require_capturable(comm, pass.name(), workspace.agreed(), stream);
  pass.check(alone, stream);
  std::exception_ptr failure;
  if (alone) {
    throw_fault(pass);
    pass.run_alone(stream);
  } else {
    device_scope const there{workspace.device()}; // the others are waiting, even if another is current
    auto const& packets = pass.packets();
    auto const policy = resolve_on_stream(syncnorm::detail::policy_asked(pass.header()), comm, pass.rule(),
                                          workspace.channels(), packets.values());
    bool const reduces = policy == exchange_policy::reduce;
    auto header = pass.header();
    header.policy = static_cast<std::int16_t>(policy);
    workspace.on_own_device(stream, pass.stream_device(), [&](cudaStream_t on) {
      if (!workspace.agreed()) workspace.agree(comm, header, on);
      auto const own = packets.place(0, reduces, pass.rule() == merge_rule::moments);
      failure = thrown_by_writing(header, own, on, [&] { pass.local(header, own, on); });
      exchanged = true;
      if (failure != nullptr) {
        rehearse_exchange(comm, packets, pass.rule(), policy, on);
        workspace.passes_report().tell(pass.rule() == merge_rule::moments);
        return pass.forgo(on);
      }
      exchange(comm, pass, packets, policy, workspace.report(), on);
      pass.apply(reduces ? packets.merged(0) : packets.gathered(0), own, workspace.report(), on);
    });
  }
  return failure;
}

/// Runs a pass over `comm`, in one allgather, or by sums.
template <communicator C>
void run_pass(C const& comm, device_pass& pass, cudaStream_t stream) {
  std::exception_ptr failure;
  bool exchanged = false;
  try {
    failure = run_steps(comm, pass, exchanged, stream);
  } catch (...) {
    exchanged ? pass.drop() : pass.fail();
    throw;
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  pass.workspace().raise(); // what earlier passes have left, which not every rank knows of yet
}

template <class P>
[[nodiscard]] channel_values values_of(std::span<P const> values) {
  return values.empty() ? channel_values{} : channel_values{values.data()};
}
template <class P>
[[nodiscard]] channel_outputs outputs_of(std::span<P> values) {
  return values.empty() ? channel_outputs{} : channel_outputs{values.data()};
}
template <class P>
[[nodiscard]] affine_values values_of(affine_parameters<P> const& affine) {
  return {values_of(affine.gamma), values_of(affine.beta)};
}

/// f(k, place) for each of K micro-batches, whose packets are added up: the last one's is `own`.
template <class F>
void add_packets(pass_packets const& packets, std::size_t batches, packet_place const& own, F const& f) {
  for (std::size_t k = 0; k < batches; ++k) {
    packet_place at = k + 1 == batches ? own : packet_place{packets.scratch(k % 2)};
    if (k > 0) at.before = packets.scratch((k - 1) % 2);
    f(k, at);
  }
}

/// That of micro-batch k, where there is one for each, else a default one.
template <class Each>
[[nodiscard]] Each of_batch(std::span<Each const> each, std::size_t k) {
  return each.empty() ? Each{} : each[k];
}

} // namespace syncnorm::cuda::detail
