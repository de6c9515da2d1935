#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

#include <syncnorm/comm/communicator.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/power_norm_options.hpp>
#include <syncnorm/ops/detail/batch_norm_checks.hpp>
#include <syncnorm/ops/detail/packet.hpp>

namespace syncnorm::detail {

/// What every rank says about itself at the head of an exchange of power norm; see packet_header.
struct power_norm_header {
  std::array<char, 24> pass{};    ///< the operation and its direction
  std::array<char, 16> element{}; ///< element_traits<T>::name
  std::int64_t channels = 0;
  std::int64_t step = 0;  ///< the number of the forward pass
  std::int64_t count = 0; ///< positions on this rank that the sums are over; ranks may differ
  double eps = 0, alpha_forward = 0, alpha_backward = 0, group_eps = 0;
  std::int64_t warmup_iters = 0, groups = 0;
  std::array<char, 168> fault{}; ///< what is wrong on this rank; empty where nothing is
  std::int64_t corrected = 0;
  std::int64_t affine = 0;
  std::int64_t records = 0; ///< whether the forward pass can be differentiated
};
// A rank in a batch norm and one in a power norm, whose messages may be of one size, take each other's headers for their own.
static_assert(offsetof(power_norm_header, fault) == offsetof(packet_header, fault));
static_assert(sizeof(power_norm_header) == 304 && std::is_trivially_copyable_v<power_norm_header>);

/// The header of a pass of element type `T`; the caller adds the step, the count, and what its pass alone has.
template <class T>
[[nodiscard]] power_norm_header make_power_norm_header(std::string_view pass, std::int64_t channels,
                                                       power_norm_options const& options, call_check const& check) {
  power_norm_header own;
  set_text(own.pass, pass);
  set_text(own.element, element_name<T>());
  set_text(own.fault, check.fault());
  own.channels = channels;
  own.eps = options.eps;
  own.alpha_forward = options.alpha_forward;
  own.alpha_backward = options.alpha_backward;
  own.group_eps = options.group_eps;
  own.warmup_iters = options.warmup_iters;
  own.groups = options.groups;
  own.corrected = options.recursion == power_norm_recursion::corrected ? 1 : 0;
  return own;
}

/// Runs `local`, which computes what this rank sends, unless the header tells of a fault already. What that throws becomes the
/// header's fault, if there are other ranks to be told.
template <communicator C, class Local>
void run_or_report(C const& comm, power_norm_header& own, Local const& local) {
  if (own.fault[0] != '\0') return;
  syncnorm::size(comm) == 1 ? local() : report_what_throws(own, local);
}

/// Throws, the same on every rank, where a rank reported a fault or where two ranks disagree.
inline void require_agreement(std::span<power_norm_header const> ranks) {
  auto const pass = [](power_norm_header const& of) { return get_text(of.pass); };
  throw_reported(ranks, pass);
  auto const require_same = agreement_of(ranks, pass);
  require_same(&power_norm_header::pass, "the operation");
  require_same(&power_norm_header::element, "the element type");
  require_same(&power_norm_header::channels, "the number of channels");
  require_same(&power_norm_header::step, "the step");
  require_same(&power_norm_header::eps, "eps");
  require_same(&power_norm_header::alpha_forward, "alpha_forward");
  require_same(&power_norm_header::alpha_backward, "alpha_backward");
  require_same(&power_norm_header::warmup_iters, "warmup_iters");
  require_same(&power_norm_header::groups, "the groups of channels");
  require_same(&power_norm_header::group_eps, "group_eps");
  require_same(&power_norm_header::corrected, "the corrected recursion");
  require_same(&power_norm_header::affine, "affine parameters");
  require_same(&power_norm_header::records, "whether a backward pass can follow");
}

} // namespace syncnorm::detail
