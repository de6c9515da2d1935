#pragma once

#include <string>

#include <cuda_runtime_api.h>

#include <syncnorm/core/error.hpp>

namespace syncnorm::detail {

/// Takes what is dealt with here, or is no error, from where cudaGetLastError would show it to whoever asks next.
inline void forget_last_error() { (void)cudaGetLastError(); }

/// Allows this thread calls that captures in graphs, of whatever streams, may else refuse, and would be ended by.
class relaxed_capture {
public:
  relaxed_capture() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  relaxed_capture(relaxed_capture const&) = delete;
  relaxed_capture& operator=(relaxed_capture const&) = delete;
  ~relaxed_capture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Throws cuda_error where `code` is a failure of `call`.
inline void require_cuda(cudaError_t code, char const* call, source_location where = source_location::current()) {
  if (code == cudaSuccess) return;
  forget_last_error();
  throw cuda_error{std::string{call} + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ")",
                   static_cast<int>(code), where};
}

} // namespace syncnorm::detail
