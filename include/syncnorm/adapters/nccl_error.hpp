#pragma once

#include <string>

#include <nccl.h>

#include <syncnorm/core/error.hpp>

namespace syncnorm {

/// A failure that NCCL reports; native_code() is the ncclResult_t.
class nccl_error : public communicator_error {
public:
  explicit nccl_error(std::string const& message, ncclResult_t code = ncclSuccess, ncclComm_t comm = nullptr,
                      source_location where = source_location::current())
      : communicator_error{"nccl", code == ncclSuccess ? message : message + ": " + text(code, comm),
                           static_cast<int>(code), where} {}

private:
  static std::string text(ncclResult_t code, ncclComm_t comm) {
    std::string all = ncclGetErrorString(code);
    if (char const* const detail = comm == nullptr ? nullptr : ncclGetLastError(comm);
        detail != nullptr && *detail != '\0')
      all += std::string{" ("} + detail + ')';
    return all;
  }
};

} // namespace syncnorm
