#pragma once

#include <string>

#include <syncnorm/adapters/detail/mpi_include.hpp>
#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// A failure that MPI reports; native_code() is MPI's error code.
class mpi_error : public communicator_error {
public:
  explicit mpi_error(std::string const& message, int code = MPI_SUCCESS,
                     source_location where = source_location::current())
      : communicator_error{"mpi", code == MPI_SUCCESS ? message : message + ": " + text(code), code, where} {}

private:
  static std::string text(int code) {
    char buffer[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    if (MPI_Error_string(code, buffer, &length) != MPI_SUCCESS) return "error " + std::to_string(code);
    return {buffer, static_cast<std::size_t>(length)};
  }
};

} // namespace syncnorm
