// One thread block: 4 warps that move data and 2 warpgroups that multiply.
//
//   scheduler  takes tickets, copies the product and the item to a slot of a ring, waits for what the item reads
//   loader     fills a ring of stages with boxes of A and B, and then of C
//   multiplier (two, 64 rows each)  sums over the depth in registers, adds beta * C, rounds, and stages boxes to store;
//              at the end of a large tile the two take turns
//   storer     (one for each multiplier)  writes the staged boxes and signals the finished blocks
//
// So the next item's loads and the last one's stores run beside the matrix instructions.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "kernels/launch.cuh"
#include "kernels/tile_fetch.cuh"
#include "kernels/tile_multiply.cuh"
#include "kernels/tile_product.h"
#include "kernels/tile_store.cuh"

namespace dmuon::kernels {
namespace {

using namespace tiles;  // NOLINT

__global__ void __launch_bounds__(kThreads, 1) tile_products(const __grid_constant__ TileProductArgs args) {
  extern __shared__ std::uint8_t raw[];
  const std::uint32_t misaligned = shared_address(raw) % kAlignment;
  auto& shared = *reinterpret_cast<Shared*>(raw + (misaligned == 0 ? 0 : kAlignment - misaligned));
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  wait_for_kernel_before();

  const int group = static_cast<int>(threadIdx.x / 128);
  if (group == 0) {
    lower_registers<56>();
    const int warp = static_cast<int>(threadIdx.x / 32);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (warp == 0) {
      schedule(shared, args);
    } else if (warp == 1 && first_lane) {
      load(shared, args);
    } else if (warp >= 2 && first_lane) {
      store(shared, args, warp - 2);
    }
  } else {
    raise_registers<224>();
    multiply_items(shared, group - 1);
  }
}

}  // namespace

bool tile_products_supported() {
  int device = 0;
  int major = 0;
  int minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
}

const char* encode_tensor_map(const TensorMapSpec& spec, TensorMap& out) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(result == cudaDriverEntryPointSuccess ? found : nullptr);
  }();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const std::array<cuuint64_t, 2> extents = {static_cast<cuuint64_t>(spec.cols), static_cast<cuuint64_t>(spec.rows)};
  const std::array<cuuint64_t, 1> stride = {static_cast<cuuint64_t>(spec.ld) * sizeof(__half)};
  const std::array<cuuint32_t, 2> steps = {1, 1};
  const std::array<cuuint32_t, 2> box = {kBox, kBox};
  const CUresult result =
      encode(reinterpret_cast<CUtensorMap*>(&out), CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(spec.address),
             extents.data(), stride.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the matrix";
}

const char* run_tile_products(const TileProductArgs& args, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared)) + kAlignment;
  static_assert(kBytes <= kMaxSharedBytes);
  int device = 0;
  int multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaError_t error = cudaFuncSetAttribute(tile_products, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const auto blocks = static_cast<unsigned>(std::min(multiprocessors, args.item_count));
  launch_early(tile_products, {blocks, kThreads, kBytes}, stream, args);
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace dmuon::kernels
