#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/normalize_cast.h"

namespace dmuon::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kVector = 4;         // elements a thread takes at a time
constexpr int kMaxBlocks = 512;    // blocks, and so partial sums, per matrix
constexpr int kMaxMatrices = 128;  // pointers passed by value: 1 KiB of the 4 KiB of parameters
constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector * 4;

struct Batch {
  const float* matrices[kMaxMatrices];
  std::int64_t numel;
};

std::int64_t blocks_per_matrix(std::int64_t numel) {
  return std::min<std::int64_t>(kMaxBlocks, (numel + kPerBlock - 1) / kPerBlock);
}

// Elements [i, i + 4), zero past the end.  The values do not depend on the alignment, only the loads do.
__device__ float4 load(const float* x, std::int64_t i, std::int64_t numel, bool aligned) {
  if (aligned && i + kVector <= numel) return *reinterpret_cast<const float4*>(x + i);
  const auto at = [=](int j) { return i + j < numel ? x[i + j] : 0.0F; };
  return make_float4(at(0), at(1), at(2), at(3));
}

__device__ bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Sum over the block in a fixed order; the result is valid in thread 0.
__device__ double block_sum(double value) {
  __shared__ double warp_sums[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0U, value, offset);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return 0.0;
  value = threadIdx.x < kThreads / 32 ? warp_sums[threadIdx.x] : 0.0;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0U, value, offset);
  return value;
}

// Grid [blocks, matrices]: partial[matrix, block] = sum of squares of the block's elements.
__global__ void __launch_bounds__(kThreads) sum_squares(Batch batch, double* partial) {
  const float* x = batch.matrices[blockIdx.y];
  const bool aligned = is_aligned(x, sizeof(float4));
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * kVector;
  double sum = 0.0;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < batch.numel; i += stride) {
    const float4 v = load(x, i, batch.numel, aligned);
    sum += (double{v.x} * v.x + double{v.y} * v.y) + (double{v.z} * v.z + double{v.w} * v.w);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = sum;
}

// Same grid.  Every block adds up its matrix's partial sums itself, in the same order, and writes its elements.
__global__ void __launch_bounds__(kThreads) scale_cast(Batch batch, double scale, const double* partial, __half* out) {
  static_assert(kMaxBlocks <= kThreads);
  __shared__ double shared_factor;
  const double mine = threadIdx.x < gridDim.x ? partial[std::int64_t{blockIdx.y} * gridDim.x + threadIdx.x] : 0.0;
  const double sum = block_sum(mine);
  if (threadIdx.x == 0) shared_factor = sum == 0.0 ? 1.0 : scale / sqrt(sum);
  __syncthreads();
  const double factor = shared_factor;

  const float* x = batch.matrices[blockIdx.y];
  __half* y = out + std::int64_t{blockIdx.y} * batch.numel;
  const bool aligned = is_aligned(x, sizeof(float4));
  const bool aligned_out = is_aligned(y, kVector * sizeof(__half));
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * kVector;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < batch.numel; i += stride) {
    const float4 v = load(x, i, batch.numel, aligned);
    alignas(8) const __half h[kVector] = {__double2half(v.x * factor), __double2half(v.y * factor),
                                          __double2half(v.z * factor), __double2half(v.w * factor)};
    if (aligned_out && i + kVector <= batch.numel) {
      *reinterpret_cast<uint2*>(y + i) = *reinterpret_cast<const uint2*>(h);
    } else {
      for (int j = 0; j < kVector && i + j < batch.numel; ++j) y[i + j] = h[j];
    }
  }
}

}  // namespace

std::int64_t normalize_cast_workspace(std::int64_t matrices, std::int64_t numel) {
  return std::min<std::int64_t>(matrices, kMaxMatrices) * blocks_per_matrix(numel);
}

const char* normalize_cast(const NormalizeCastArgs& args, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(blocks_per_matrix(args.numel));
  auto* out = static_cast<__half*>(args.out);
  for (std::size_t begin = 0; begin < args.matrices.size(); begin += kMaxMatrices) {
    const auto part = args.matrices.subspan(begin, std::min<std::size_t>(kMaxMatrices, args.matrices.size() - begin));
    Batch batch{.matrices = {}, .numel = args.numel};
    std::copy(part.begin(), part.end(), batch.matrices);
    const dim3 grid(blocks, static_cast<unsigned>(part.size()));
    sum_squares<<<grid, kThreads, 0, stream>>>(batch, args.workspace);
    scale_cast<<<grid, kThreads, 0, stream>>>(batch, args.scale, args.workspace,
                                              out + static_cast<std::int64_t>(begin) * args.numel);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace dmuon::kernels
