// Kernels that start while the one before them in their stream ends ("programmatic dependent launch", Hopper and newer;
// CUDA C++ Programming Guide).  What is queued otherwise waits as always.
//
// Every such kernel calls wait_for_kernel_before() before it touches device memory, so that whatever it reads or
// overwrites is done with, and lets the next one come at once.
#pragma once

#include <cuda_runtime.h>

namespace dmuon::kernels {

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();  // the next kernel's blocks may take their places, and wait there
  cudaGridDependencySynchronize();
#endif
}

struct LaunchShape {
  unsigned blocks = 0;
  unsigned threads = 0;
  std::size_t shared_bytes = 0;
};

/// As kernel<<<...>>>(args); errors are left for cudaGetLastError().
template <class Args>
void launch_early(void (*kernel)(Args), const LaunchShape& shape, cudaStream_t stream, const Args& args) {
  int device = 0;
  int major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace dmuon::kernels
