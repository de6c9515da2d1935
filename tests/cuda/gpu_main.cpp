#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include <cuda_runtime_api.h>

#include <doctest/doctest.h>

namespace {

/// Asks in a process of its own, as one that has initialized CUDA cannot fork those that use it.
bool has_gpu() {
  auto const child = fork();
  if (child == 0) {
    int devices = 0;
    auto const code = cudaGetDeviceCount(&devices);
    bool const found = code == cudaSuccess && devices > 0;
    if (!found) std::printf("no GPU: %s\n", code == cudaSuccess ? "there is none" : cudaGetErrorString(code));
    std::fflush(stdout);
    _exit(found ? 0 : 1);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

} // namespace

// The main program of tests that need a GPU: without one the exit status is 77, or 1 where SYNCNORM_REQUIRE_GPU is 1.
int main(int argc, char** argv) {
  if (!has_gpu()) {
    char const* const required = std::getenv("SYNCNORM_REQUIRE_GPU");
    return required != nullptr && *required == '1' ? 1 : 77;
  }
  return doctest::Context{argc, argv}.run();
}
