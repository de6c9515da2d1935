#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include <syncnorm/core/batch_norm_options.hpp>
#include <syncnorm/core/detail/packet_header.hpp>
#include <syncnorm/core/element.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

/// Channels of which the first exchange of a workspace has room for two values each, beside a header.
inline constexpr std::int64_t head_channels = 128;

/// Of a text that is too long, its end is left out, with an ellipsis instead.
template <std::size_t N>
void set_text(std::array<char, N>& field, std::string_view text) {
  constexpr std::string_view ellipsis = "...";
  constexpr std::size_t room = N - 1;
  field.fill('\0');
  std::ranges::copy(text.substr(0, room), field.begin());
  if (text.size() > room) std::ranges::copy(ellipsis, field.begin() + (room - ellipsis.size()));
}

/// What a header says of the type of elements.
template <element T>
[[nodiscard]] constexpr std::string_view element_name() {
  constexpr std::string_view name = element_traits<T>::name;
  static_assert(name.size() < sizeof(packet_header::element), "element_traits: a name has at most 15 characters");
  return name;
}

template <std::size_t N>
[[nodiscard]] std::string get_text(std::array<char, N> const& field) {
  return std::string{field.data(), ::strnlen(field.data(), N)};
}

/// The fault that `find` returns, or what it throws.
template <class F>
[[nodiscard]] std::string fault_or_thrown(F const& find) {
  std::string text;
  try {
    return find();
  } catch (std::exception const& e) {
    text = e.what();
  } catch (...) {
  }
  return text.empty() ? "an exception without a message" : text;
}

/// What `act` throws; empty where it throws nothing.
template <class F>
[[nodiscard]] std::string thrown_by(F const& act) {
  return fault_or_thrown([&] {
    act();
    return std::string{};
  });
}

/// Runs `local`, which computes what a rank sends. What that throws becomes the header's fault, since the other ranks are waiting
/// already.
template <class Header, class Local>
void report_what_throws(Header& header, Local const& local) {
  auto const fault = thrown_by(local);
  if (fault.empty()) return;
  set_text(header.fault, fault);
  header.count = 0;
}

/// Calls f, which exchanges. Where ranks turn out to be in different collectives, says in addition what that may come from.
template <class F>
decltype(auto) explaining_mismatches(F const& f) {
  try {
    return f();
  } catch (mismatch_error const& e) {
    std::string const text = e.what();
    if (text.find("ranks disagree on collective") == std::string::npos) throw;
    throw mismatch_error{text +
                         " (of a normalization's statistics: ranks are in different passes, or differ in the number of "
                         "channels, the element type or the exchange policy, or a layer is new on some of them)"};
  }
}

[[nodiscard]] inline std::string to_text(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.17g", value);
  return text.data();
}
template <std::integral Integer>
[[nodiscard]] std::string to_text(Integer value) {
  return std::to_string(value);
}
[[nodiscard]] inline std::string to_text(pass_form value) { return to_text(static_cast<int>(value)); }
template <std::size_t N>
[[nodiscard]] std::string to_text(std::array<char, N> const& value) {
  return get_text(value);
}

/// Calls f(field, name) for each field in which ranks have to agree.
template <class F>
void for_each_agreed_field(F const& f) {
  f(&packet_header::pass, "the operation");
  f(&packet_header::element, "the element type");
  f(&packet_header::form,
    "whether a pass is in one phase (0), in two (1), in a group (2), or in a group but of this rank alone (3)");
  f(&packet_header::layers, "the number of layers");
  f(&packet_header::channels, "the number of channels");
  f(&packet_header::shape, "the channels of their layers (a digest)");
  f(&packet_header::eps, "eps");
  f(&packet_header::momentum, "momentum (-1 - n: the cumulative average of n batches)");
  f(&packet_header::running_variance, "the running variance (0: unbiased, 1: biased, 2: standard deviation)");
  f(&packet_header::normalize_by, "the variance that normalizes (0: biased, 1: unbiased)");
  f(&packet_header::tracks_running_statistics, "tracking running statistics");
  f(&packet_header::affine, "affine parameters");
  f(&packet_header::wish, "the exchange policy asked for (0: automatic, 1: gather, 2: reduce)");
  f(&packet_header::policy, "the exchange policy (1: gather, 2: reduce)");
}

/// Throws where a rank needs a backward pass that another one cannot join. `pass(header)` names the pass of a rank.
template <class Pass>
void require_backward_agreement(std::span<packet_header const> ranks, Pass const& pass) {
  auto const first = [&](backward_pass what) {
    return std::ranges::find(ranks, static_cast<std::int32_t>(what), &packet_header::backward) - ranks.begin();
  };
  auto const needs = first(backward_pass::needed), lacks = first(backward_pass::impossible);
  if (needs == std::ssize(ranks) || lacks == std::ssize(ranks)) return;
  throw mismatch_error{pass(ranks.front()) + ": ranks disagree on whether a backward pass follows: rank " +
                       std::to_string(needs) + " needs one, rank " + std::to_string(lacks) + " records no gradients"};
}

/// Throws where a rank reported a fault, in the pass of the first that did; `pass(header)` names it.
template <class Header, class Pass>
void throw_reported(std::span<Header const> ranks, Pass const& pass) {
  std::string faults;
  for (std::size_t r = 0; r < ranks.size(); ++r)
    if (ranks[r].fault[0] != '\0')
      faults += (faults.empty() ? pass(ranks[r]) + ": " : "; ") + ("rank " + std::to_string(r)) + ": " +
                get_text(ranks[r].fault);
  if (!faults.empty()) throw invalid_argument_error{faults};
}

/// What throws where two ranks disagree on a field, given the field and its name.
template <class Header, class Pass>
[[nodiscard]] auto agreement_of(std::span<Header const> ranks, Pass const& pass) {
  return [=](auto Header::*field, char const* name) {
    for (std::size_t r = 1; r < ranks.size(); ++r)
      if (ranks[r].*field != ranks[0].*field)
        throw mismatch_error{pass(ranks[0]) + ": ranks disagree on " + name + ": rank 0 has " +
                             to_text(ranks[0].*field) + ", rank " + std::to_string(r) + " has " +
                             to_text(ranks[r].*field)};
  };
}

/// Throws, the same on every rank, where a rank reported a fault or where two ranks disagree. `layer` names the layer
/// among several.
inline void require_agreement(std::span<packet_header const> ranks, std::string const& layer = {}) {
  auto const pass = [&](packet_header const& of) { return get_text(of.pass) + layer; };
  throw_reported(ranks, pass);
  for_each_agreed_field(agreement_of(ranks, pass));
  require_backward_agreement(ranks, pass);
}

/// What the ranks together say of a pass of one layer.
struct exchange_summary {
  std::int64_t count = 0;       ///< elements of a channel over all ranks
  bool backward_needed = false; ///< by some rank
};

[[nodiscard]] inline exchange_summary summarize(std::span<packet_header const> ranks) {
  exchange_summary all;
  for (auto const& rank : ranks) {
    all.count += rank.count;
    all.backward_needed |= rank.backward == static_cast<std::int32_t>(backward_pass::needed);
  }
  return all;
}

} // namespace syncnorm::detail
