#pragma once

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <type_traits>

#include <syncnorm/core/detail/overlap.hpp>
#include <syncnorm/core/detail/view_checks.hpp>
#include <syncnorm/core/tensor_view.hpp>

namespace syncnorm::detail {

/// Collects the first thing that is wrong with a call. It throws nothing, because the other ranks have to be told first;
/// and it builds no text unless something is wrong. A name is anything that can be written to a stream.
class argument_check {
public:
  [[nodiscard]] std::string const& fault() const noexcept { return fault_; }
  [[nodiscard]] bool failed() const noexcept { return !fault_.empty(); }

  /// `message()` says what is wrong unless `holds`.
  template <class Message>
  void require(bool holds, Message const& message) {
    if (!holds && fault_.empty()) fault_ = message();
  }

  template <class T, class Name>
  void tensor(tensor_view<T> const& x, Name name, std::int64_t channels) {
    require(x.samples >= 0 && x.channels >= 0 && x.spatial >= 0,
            [&] { return text(name, " has a negative extent: ", extents_of(x)); });
    require(x.channels == channels, [&] { return text(name, " has ", x.channels, " channels, expected ", channels); });
    require(is_countable(x), [&] { return text(name, " has more elements than can be counted: ", extents_of(x)); });
    require_data(x, name);
  }

  /// `y` is a tensor with the extents of `x`.
  template <class T, class Name>
  void same_extents(tensor_view<T> const& y, Name name, tensor_view<std::remove_const_t<T> const> const& x) {
    require(y.samples == x.samples && y.channels == x.channels && y.spatial == x.spatial,
            [&] { return text(name, " is ", extents_of(y), ", expected ", extents_of(x), " as x"); });
    require_data(y, name);
  }

  /// The same for a tensor that is written.
  template <class T, class Name>
  void output(tensor_view<T> const& y, Name name, tensor_view<std::remove_const_t<T> const> const& x) {
    same_extents(y, name, x);
    if (failed()) return;
    require(!overlaps_itself(y),
            [&] { return text(name, " has the strides ", strides_of(y), ", by which its elements overlap"); });
  }

  /// What is written is apart in memory from another tensor. `may_be_same`: each element is written after the one of `other` was read.
  template <class T, class Name, class OtherName>
  void apart(std::type_identity_t<tensor_view<T const>> const& written, Name const& name,
             tensor_view<T const> const& other, OtherName const& other_name, bool may_be_same) {
    if (failed() || place<T>(written, other) != placement::overlapping) return;
    require(may_be_same && are_same<T>(written, other), [&] {
      return text(name, " and ", other_name, " overlap in memory", may_be_same ? ", and are not the same" : "");
    });
  }

  void eps(double value, char const* name = "eps") {
    require(std::isfinite(value) && value >= 0, [&] { return text(name, " is ", value, ", expected a number >= 0"); });
  }

  /// So many `groups` of channels can be scaled.
  void groups(std::int64_t channels, std::int64_t groups) {
    require(groups >= 1 && channels % groups == 0,
            [&] { return text(channels, " channels cannot be divided into ", groups, " groups"); });
  }

  /// The parts of a message, one after the other.
  template <class... Parts>
  [[nodiscard]] static std::string text(Parts const&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    return message.str();
  }

private:
  template <class T, class Name>
  void require_data(tensor_view<T> const& x, Name name) {
    if (failed()) return; // of what cannot be counted there is no size
    require(x.data != nullptr || x.size() == 0,
            [&] { return text(name, " is null, its extents are ", extents_of(x)); });
    require(fits_memory(x),
            [&] { return text(name, " has the strides ", strides_of(x), ", which no memory has room for"); });
  }

  std::string fault_;
};

} // namespace syncnorm::detail
