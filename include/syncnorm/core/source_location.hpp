#pragma once

namespace syncnorm {

/// A line of source, as `std::source_location`, which clang 14 with libstdc++ lacks.
class source_location {
public:
  [[nodiscard]] static constexpr source_location current(char const* file = __builtin_FILE(),
                                                         char const* function = __builtin_FUNCTION(),
                                                         unsigned line = __builtin_LINE()) noexcept {
    source_location here;
    here.file_ = file;
    here.function_ = function;
    here.line_ = line;
    return here;
  }

  [[nodiscard]] constexpr char const* file_name() const noexcept { return file_; }
  [[nodiscard]] constexpr char const* function_name() const noexcept { return function_; }
  [[nodiscard]] constexpr unsigned line() const noexcept { return line_; }

private:
  char const* file_ = "";
  char const* function_ = "";
  unsigned line_ = 0;
};

} // namespace syncnorm
