#include <algorithm>

#include "kernels/peer_sum.h"
#include "kernels/vectors.cuh"

namespace dmuon::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;            // vectors of a rank that a thread has on their way
constexpr int kMaxSegments = 64;     // passed by value in one launch
constexpr int kMaxBlocks = 1 << 16;  // of one segment
constexpr int kStride = kThreads * kVector;
constexpr std::int64_t kChunk = std::int64_t{kStride} * kAhead;  // what a thread block takes at a time

struct Batch {
  SumSegment segments[kMaxSegments];
  int ranks;
  int rank;
  float factor;
};

// sum += x from element i on, kAhead vectors kStride apart; all are read before the first is added.
template <bool kWhole, class T>
__device__ void add(float (&sum)[kAhead][kVector], const T* x, std::int64_t i, std::int64_t numel, bool first) {
  Vector<T> values[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) values[k] = load<kWhole>(x, i + k * kStride, numel);
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    for (int j = 0; j < kVector; ++j) {
      const float value = to_float(values[k].values[j]);
      sum[k][j] = first ? value : sum[k][j] + value;
    }
  }
}

// This thread's elements of the chunk: from i on.  A whole chunk lies in the segment, in aligned vectors.
template <bool kWhole, class Sum, class Sent>
__device__ void sum_chunk(const Batch& batch, const SumSegment& segment, std::int64_t i) {
  auto* total = static_cast<Sum*>(segment.total);
  const auto* parts = static_cast<const Sent*>(segment.parts);
  float sum[kAhead][kVector];
  for (int rank = 0; rank < batch.ranks; ++rank) {
    if (rank == batch.rank) {
      add<kWhole>(sum, total, i, segment.numel, rank == 0);
    } else {
      add<kWhole>(sum, parts + (rank < batch.rank ? rank : rank - 1) * segment.stride, i, segment.numel, rank == 0);
    }
  }
#pragma unroll
  for (int k = 0; k < kAhead; ++k) {
    for (float& value : sum[k]) value *= batch.factor;
    save<kWhole>(total, i + k * kStride, segment.numel, make_float4(sum[k][0], sum[k][1], sum[k][2], sum[k][3]));
  }
}

template <class Sum, class Sent>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ Batch batch) {
  const SumSegment& segment = batch.segments[blockIdx.y];
  const bool aligned = is_aligned(static_cast<Sum*>(segment.total)) &&
                       is_aligned(static_cast<const Sent*>(segment.parts)) && segment.stride % kVector == 0;
  for (std::int64_t begin = blockIdx.x * kChunk; begin < segment.numel; begin += gridDim.x * kChunk) {
    const std::int64_t i = begin + threadIdx.x * kVector;
    if (aligned && begin + kChunk <= segment.numel) {
      sum_chunk<true, Sum, Sent>(batch, segment, i);
    } else {
      sum_chunk<false, Sum, Sent>(batch, segment, i);
    }
  }
}

using Kernel = void (*)(Batch);

template <class Sum>
Kernel kernel_for(Scalar sent) {
  switch (sent) {
    case Scalar::kFloat:
      return sum_kernel<Sum, float>;
    case Scalar::kHalf:
      return sum_kernel<Sum, __half>;
    default:
      return sum_kernel<Sum, __nv_bfloat16>;
  }
}

Kernel kernel_for(Scalar sum, Scalar sent) {
  switch (sum) {
    case Scalar::kFloat:
      return kernel_for<float>(sent);
    case Scalar::kHalf:
      return kernel_for<__half>(sent);
    default:
      return kernel_for<__nv_bfloat16>(sent);
  }
}

cudaError_t launch(const SumArgs& args, std::span<const SumSegment> segments, cudaStream_t stream) {
  Batch batch{};
  batch.ranks = args.ranks;
  batch.rank = args.rank;
  batch.factor = args.factor;
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    batch.segments[i] = segments[i];
    longest = std::max(longest, segments[i].numel);
  }
  if (longest == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(kMaxBlocks, (longest + kChunk - 1) / kChunk));
  kernel_for(args.sum, args.sent)<<<dim3(blocks, static_cast<unsigned>(segments.size())), kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

const char* text_of(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

}  // namespace

const char* sum_parts(const SumArgs& args, cudaStream_t stream) {
  auto left = args.segments;
  while (!left.empty()) {
    const auto count = std::min<std::size_t>(left.size(), kMaxSegments);
    const cudaError_t error = launch(args, left.first(count), stream);
    if (error != cudaSuccess) return text_of(error);
    left = left.subspan(count);
  }
  return nullptr;
}

const char* load_sums() {
  cudaFuncAttributes attributes;
  for (const auto sum : {Scalar::kFloat, Scalar::kHalf, Scalar::kBFloat16}) {
    for (const auto sent : {Scalar::kFloat, Scalar::kHalf, Scalar::kBFloat16}) {
      const auto kernel = reinterpret_cast<const void*>(kernel_for(sum, sent));
      const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
      if (error != cudaSuccess) return text_of(error);
    }
  }
  return nullptr;
}

}  // namespace dmuon::kernels
