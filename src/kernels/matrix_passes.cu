#include <algorithm>
#include <type_traits>

#include "kernels/launch.cuh"
#include "kernels/matrix_passes.h"
#include "kernels/matrix_share.cuh"
#include "kernels/vectors.cuh"

namespace dmuon::kernels {
namespace {

using namespace passes;  // NOLINT

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

Entry entry_for(const PassMatrix& matrix, int first_share) {
  const std::int64_t numel = matrix.rows * matrix.cols;
  const std::int64_t per_share = ceil_div(numel, kMaxShares * kLeastShare) * kLeastShare;
  return {matrix, first_share, static_cast<int>(ceil_div(numel, per_share)), per_share};
}

// What Newton-Schulz leaves x in.
template <class T>
using Result = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat16, __half>;

// momentum * m + g, and g + momentum * m: rounded after the product and after the sum, as torch does.
__device__ float4 scaled_sum(float factor, const float4& m, const float4& g) {
  const auto one = [factor](float a, float b) { return __fadd_rn(__fmul_rn(factor, a), b); };
  return make_float4(one(m.x, g.x), one(m.y, g.y), one(m.z, g.z), one(m.w, g.w));
}

__device__ double warp_sum(double value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(~0U, value, offset);
  return value;
}

// Sum over the block in a fixed order, once in a kernel; the result is valid in thread 0.
__device__ double block_sum(double value) {
  constexpr int kWarps = kThreads / 32;
  __shared__ double warp_sums[kWarps];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return 0.0;
  return warp_sum(threadIdx.x < kWarps ? warp_sums[threadIdx.x] : 0.0);
}

// 2^e for -126 <= e <= 127, and for -1022 <= e <= 1023.
__device__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }
__device__ double double_power_of_two(int e) { return __hiloint2double((e + 1023) << 20, 0); }

// The sum of four squares.  Taken in fp32, of values that are scaled by a power of two to be near 1: conversions to
// fp64 are slow, and one is enough.
__device__ double sum_of_squares(const float4& v) {
  const float largest = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  const int scale = max(127 - (__float_as_int(largest) >> 23), -126);
  const float factor = power_of_two(scale);
  const float4 y = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
  const float sum = fmaf(y.x, y.x, y.y * y.y) + fmaf(y.z, y.z, y.w * y.w);
  return double{sum} * double_power_of_two(-2 * scale);
}

// A positive factor beyond the range of fp32, as three in it: two powers of two, which round nothing, and one below 2.
struct Factor {
  float first;
  float second;
  float mantissa;

  __device__ explicit Factor(double factor) : first(1.0F), second(1.0F), mantissa(static_cast<float>(factor)) {
    if (!(factor > 0.0) || isinf(factor)) return;
    const int exponent = ilogb(factor);
    first = power_of_two(exponent / 2);
    second = power_of_two(exponent - exponent / 2);
    mantissa = static_cast<float>(scalbn(factor, -exponent));
  }

  __device__ float times(float x) const { return x * first * second * mantissa; }
};

template <class T>
struct InputAndMomentum {
  Vector<T> input;
  Vector<float> momentum;
};

template <bool kWhole, class T>
__device__ InputAndMomentum<T> read_input(const PassMatrix& matrix, std::int64_t i) {
  const std::int64_t numel = matrix.rows * matrix.cols;
  InputAndMomentum<T> found;
  found.input = load<kWhole>(static_cast<const T*>(matrix.input), i, numel);
  if (matrix.momentum != nullptr) found.momentum = load<kWhole>(matrix.momentum, i, numel);
  return found;
}

// The momentum of a share, and this thread's part of its sum of squares.
template <bool kWhole, class T>
__device__ double accumulate_share(const Share& share) {
  const Batch& batch = share.batch;
  const PassMatrix& matrix = share.matrix();
  double sum = 0.0;
  const auto read = [&](std::int64_t i) { return read_input<kWhole, T>(matrix, i); };
  for_each<kWhole>(share, read, [&](std::int64_t i, const InputAndMomentum<T>& old) {
    float4 y = to_floats(old.input);
    if (matrix.momentum != nullptr) {
      const float4 m = scaled_sum(batch.momentum, to_floats(old.momentum), y);
      save<kWhole>(matrix.momentum, i, matrix.rows * matrix.cols, m);
      y = batch.nesterov ? scaled_sum(batch.momentum, m, y) : m;
    }
    sum += sum_of_squares(y);
  });
  return sum;
}

// Updates the momentum and leaves one partial sum of squares for each share.
template <class T>
__global__ void __launch_bounds__(kThreads, kResident) accumulate(const __grid_constant__ Batch batch) {
  wait_for_kernel_before();
  const Share share(batch);
  const bool whole = is_whole(share, static_cast<const T*>(share.matrix().input), share.matrix().momentum);
  const double sum = block_sum(whole ? accumulate_share<true, T>(share) : accumulate_share<false, T>(share));
  if (threadIdx.x == 0) batch.partial[share.number] = sum;
  if (threadIdx.x == 0 && batch.finite != nullptr && share.is_first()) batch.finite[share.index] = true;
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < batch.zero_count; i += threads) {
    batch.zeros[i] = 0;
  }
}

// scale / norm of a matrix.  Every block adds up the partial sums itself, in the same order.
__device__ Factor factor_of(const Share& share) {
  __shared__ double factor;
  const double* partial = share.batch.partial + share.entry().first_share;
  double part = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < share.entry().shares; i += kThreads) part += partial[i];
  const double sum = block_sum(part);
  if (threadIdx.x == 0) factor = sum == 0.0 ? 1.0 : share.batch.scale / sqrt(sum);
  __syncthreads();
  return Factor(factor);
}

template <bool kWhole, class T>
__device__ void scale_share(const Share& share, const Factor& factor) {
  const Batch& batch = share.batch;
  const PassMatrix& matrix = share.matrix();
  const Lines<kWhole, __half> x(matrix);
  const auto read = [&](std::int64_t i) { return read_input<kWhole, T>(matrix, i); };
  for_each<kWhole>(share, read, [&](std::int64_t i, const InputAndMomentum<T>& old) {
    float4 y = to_floats(old.input);
    if (matrix.momentum != nullptr) {
      const float4 m = to_floats(old.momentum);
      y = batch.nesterov ? scaled_sum(batch.momentum, m, y) : m;
    }
    x.save(i, make_float4(factor.times(y.x), factor.times(y.y), factor.times(y.z), factor.times(y.w)));
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident) scale_cast(const __grid_constant__ Batch batch) {
  wait_for_kernel_before();
  const Share share(batch);
  const PassMatrix& matrix = share.matrix();
  const bool whole = matrix.ld == matrix.cols && is_whole(share, static_cast<const T*>(matrix.input), matrix.momentum,
                                                          static_cast<__half*>(matrix.x));
  const Factor factor = factor_of(share);
  whole ? scale_share<true, T>(share, factor) : scale_share<false, T>(share, factor);
}

template <class X>
struct DirectionAndWeight {
  Vector<X> direction;
  Vector<float> weight;
};

// Whether what this thread has of x is finite.
template <bool kWhole, class T>
__device__ bool update_share(const Share& share) {
  const PassMatrix& matrix = share.matrix();
  const std::int64_t numel = matrix.rows * matrix.cols;
  const float decay = share.batch.decay;
  const Lines<kWhole, Result<T>> x(matrix);
  bool finite = true;
  const auto read = [&](std::int64_t i) {
    DirectionAndWeight<Result<T>> old;
    old.direction = x.load(i);
    if (matrix.weight != nullptr) old.weight = load<kWhole>(matrix.weight, i, numel);
    return old;
  };
  for_each<kWhole>(share, read, [&](std::int64_t i, const DirectionAndWeight<Result<T>>& old) {
    const float4 u = to_floats(old.direction);
    finite = finite && isfinite(u.x) && isfinite(u.y) && isfinite(u.z) && isfinite(u.w);
    if (matrix.weight == nullptr) return save<kWhole>(static_cast<T*>(matrix.output), i, numel, u);
    const float4 w = to_floats(old.weight);
    const auto one = [&](float before, float direction) { return before * decay - matrix.step * direction; };
    save<kWhole>(matrix.weight, i, numel, make_float4(one(w.x, u.x), one(w.y, u.y), one(w.z, u.z), one(w.w, u.w)));
  });
  return finite;
}

template <class T>
__global__ void __launch_bounds__(kThreads, kResident) update(const __grid_constant__ Batch batch) {
  wait_for_kernel_before();
  const Share share(batch);
  const PassMatrix& matrix = share.matrix();
  const bool whole = matrix.ld == matrix.cols && is_whole(share, static_cast<Result<T>*>(matrix.x), matrix.weight,
                                                          static_cast<const T*>(matrix.output));
  const bool finite = whole ? update_share<true, T>(share) : update_share<false, T>(share);
  if (!finite && batch.finite != nullptr) batch.finite[share.index] = false;
}

// Calls launch(batch, blocks) for up to kMaxMatrices at a time.
template <class Launch>
const char* for_each_batch(const PassArgs& args, Launch launch) {
  std::int64_t partials = 0;
  for (std::size_t begin = 0; begin < args.matrices.size(); begin += kMaxMatrices) {
    const auto part = args.matrices.subspan(begin, std::min<std::size_t>(kMaxMatrices, args.matrices.size() - begin));
    Batch batch{.entries = {},
                .count = static_cast<int>(part.size()),
                .shares = 0,
                .momentum = args.momentum,
                .nesterov = args.nesterov,
                .scale = args.scale,
                .decay = args.decay,
                .partial = args.workspace + partials,
                .finite = args.finite == nullptr ? nullptr : args.finite + begin,
                .zeros = args.zeros,
                .zero_count = begin == 0 ? args.zero_count : 0};
    for (std::size_t i = 0; i < part.size(); ++i) {
      batch.entries[i] = entry_for(part[i], batch.shares);
      batch.shares += batch.entries[i].shares;
    }
    launch(batch, static_cast<unsigned>(batch.shares));
    partials += batch.shares;
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class T>
const char* normalize_of(const PassArgs& args, cudaStream_t stream) {
  return for_each_batch(args, [stream](const Batch& batch, unsigned blocks) {
    launch_early(accumulate<T>, {blocks, kThreads}, stream, batch);
    launch_early(scale_cast<T>, {blocks, kThreads}, stream, batch);
  });
}

template <class T>
const char* finish_of(const PassArgs& args, cudaStream_t stream) {
  return for_each_batch(args, [stream](const Batch& batch, unsigned blocks) {
    launch_early(update<T>, {blocks, kThreads}, stream, batch);
  });
}

}  // namespace

std::int64_t normalize_workspace(std::span<const PassMatrix> matrices) {
  std::int64_t total = 0;
  for (const PassMatrix& matrix : matrices) total += entry_for(matrix, 0).shares;
  return total;
}

const char* normalize(const PassArgs& args, cudaStream_t stream) {
  switch (args.scalar) {
    case Scalar::kHalf:
      return normalize_of<__half>(args, stream);
    case Scalar::kBFloat16:
      return normalize_of<__nv_bfloat16>(args, stream);
    default:
      return normalize_of<float>(args, stream);
  }
}

const char* finish(const PassArgs& args, cudaStream_t stream) {
  switch (args.scalar) {
    case Scalar::kHalf:
      return finish_of<__half>(args, stream);
    case Scalar::kBFloat16:
      return finish_of<__nv_bfloat16>(args, stream);
    default:
      return finish_of<float>(args, stream);
  }
}

}  // namespace dmuon::kernels
