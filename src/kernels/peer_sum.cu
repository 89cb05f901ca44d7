#include <algorithm>

#include "kernels/peer_sum.h"
#include "kernels/vectors.cuh"

namespace dmuon::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxSegments = 64;  // passed by value in one launch
constexpr int kMaxBlocks = 1024;  // of one segment
constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector;

struct Batch {
  SumSegment segments[kMaxSegments];
  int ranks;
  int rank;
  float factor;
};

// Elements [i, i + count) of x, count at most four.
template <class T>
__device__ void load(const T* x, std::int64_t i, int count, float (&values)[kVector]) {
  if (count == kVector && is_aligned(x + i)) {
    const Vector<T> packed = load_vector(x + i);
    for (int j = 0; j < kVector; ++j) values[j] = to_float(packed.values[j]);
    return;
  }
  for (int j = 0; j < count; ++j) values[j] = to_float(x[i + j]);
}

template <class T>
__device__ void save(T* x, std::int64_t i, int count, const float (&values)[kVector]) {
  if (count == kVector && is_aligned(x + i)) {
    Vector<T> packed;
    for (int j = 0; j < kVector; ++j) packed.values[j] = from_float<T>(values[j]);
    store_vector(x + i, packed);
    return;
  }
  for (int j = 0; j < count; ++j) x[i + j] = from_float<T>(values[j]);
}

template <class Sum, class Sent>
__global__ void sum_kernel(const __grid_constant__ Batch batch) {
  const SumSegment& segment = batch.segments[blockIdx.y];
  auto* total = static_cast<Sum*>(segment.total);
  const auto* parts = static_cast<const Sent*>(segment.parts);
  const std::int64_t step = std::int64_t{gridDim.x} * kPerBlock;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < segment.numel; i += step) {
    const int count = segment.numel - i < kVector ? static_cast<int>(segment.numel - i) : kVector;
    float sum[kVector] = {};
    for (int rank = 0; rank < batch.ranks; ++rank) {
      float values[kVector] = {};
      if (rank == batch.rank) {
        load(total, i, count, values);
      } else {
        load(parts + (rank < batch.rank ? rank : rank - 1) * segment.stride, i, count, values);
      }
      for (int j = 0; j < kVector; ++j) sum[j] = rank == 0 ? values[j] : sum[j] + values[j];
    }
    for (float& value : sum) value *= batch.factor;
    save(total, i, count, sum);
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
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(kMaxBlocks, (longest + kPerBlock - 1) / kPerBlock));
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
