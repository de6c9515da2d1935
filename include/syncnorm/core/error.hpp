#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <syncnorm/core/source_location.hpp>

namespace syncnorm {

// Constructors are written out where one would inherit them: nvcc 13.0 does not survive a default argument of an inherited
// one that is a call.

/// Root of every exception that syncnorm throws. `what()` is the message alone; `where()` is the throwing line.
class error : public std::runtime_error {
public:
  explicit error(std::string const& message, source_location where = source_location::current())
      : std::runtime_error{message}, where_{where} {}

  [[nodiscard]] source_location const& where() const noexcept { return where_; }

private:
  source_location where_;
};

/// An argument of this rank, or of another rank that the message names, cannot be used.
class invalid_argument_error : public error {
public:
  explicit invalid_argument_error(std::string const& message, source_location where = source_location::current())
      : error{message, where} {}
};

/// Ranks disagree on what they are computing: channels, element type, options, or the collective itself.
class mismatch_error : public error {
public:
  explicit mismatch_error(std::string const& message, source_location where = source_location::current())
      : error{message, where} {}
};

/// A collective failed, after which the communicator is unusable, and everything else is not; or a communicator cannot do what it was
/// asked for.
class communicator_error : public error {
public:
  explicit communicator_error(std::string backend, std::string const& message, int native_code = 0,
                              source_location where = source_location::current())
      : error{backend + ": " + message, where}, backend_{std::move(backend)}, native_code_{native_code} {}

  [[nodiscard]] std::string const& backend() const noexcept { return backend_; }
  /// `what()` without the name of the backend.
  [[nodiscard]] std::string message() const { return std::string{what()}.substr(backend_.size() + 2); }
  /// The backend's own error code, 0 where it has none.
  [[nodiscard]] int native_code() const noexcept { return native_code_; }

private:
  std::string backend_;
  int native_code_;
};

/// A peer did not join a collective within the communicator's timeout.
class timeout_error : public communicator_error {
public:
  explicit timeout_error(std::string backend, std::string const& message, int native_code = 0,
                         source_location where = source_location::current())
      : communicator_error{std::move(backend), message, native_code, where} {}
};

/// A call of the CUDA runtime failed.
class cuda_error : public error {
public:
  explicit cuda_error(std::string const& message, int native_code = 0,
                      source_location where = source_location::current())
      : error{"cuda: " + message, where}, native_code_{native_code} {}

  /// The cudaError_t, 0 where there is none.
  [[nodiscard]] int native_code() const noexcept { return native_code_; }

private:
  int native_code_;
};

} // namespace syncnorm
