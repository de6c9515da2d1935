#include <cstdio>
#include <cstdlib>

#include <cuda_runtime_api.h>

#include <doctest/doctest.h>

// The main program of tests that need a GPU: without one the exit status is 77, or 1 where SYNCNORM_REQUIRE_GPU is 1.
int main(int argc, char** argv) {
  int devices = 0;
  auto const code = cudaGetDeviceCount(&devices);
  if (code != cudaSuccess || devices == 0) {
    char const* const required = std::getenv("SYNCNORM_REQUIRE_GPU");
    std::printf("no GPU: %s\n", code == cudaSuccess ? "there is none" : cudaGetErrorString(code));
    return required != nullptr && *required == '1' ? 1 : 77;
  }
  return doctest::Context{argc, argv}.run();
}
