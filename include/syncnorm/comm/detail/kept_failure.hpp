#pragma once

#include <exception>

namespace syncnorm::detail {

/// What an operation has failed by, which its handle tells whenever it is asked.
class kept_failure {
public:
  /// f(), keeping what it throws.
  template <class F>
  void keep(F const& f) {
    try {
      f();
    } catch (...) {
      thrown_ = std::current_exception();
      throw;
    }
  }
  /// Throws it, if any.
  void tell() const {
    if (thrown_) std::rethrow_exception(thrown_);
  }

private:
  std::exception_ptr thrown_;
};

} // namespace syncnorm::detail
