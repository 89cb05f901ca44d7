#include <algorithm>
#include <type_traits>

#include "kernels/launch.cuh"
#include "kernels/matrix_passes.h"
#include "kernels/vectors.cuh"

namespace dmuon::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxBlocks = 512;    // blocks, and so partial sums, per matrix
constexpr int kMaxMatrices = 128;  // passed by value in one launch
constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kVector * 4;

struct Entry {
  PassMatrix matrix;
  int first_block;  // of the launch; its partial sums start there too
  int blocks;
};

struct Batch {
  Entry entries[kMaxMatrices];
  int count;
  float momentum;
  bool nesterov;
  double scale;
  float decay;
  double* partial;
  bool* finite;
  std::int32_t* zeros;
  std::int64_t zero_count;
};

int blocks_of(const PassMatrix& matrix) {
  const std::int64_t numel = matrix.rows * matrix.cols;
  return static_cast<int>(std::min<std::int64_t>(kMaxBlocks, (numel + kPerBlock - 1) / kPerBlock));
}

__device__ const Entry& entry_of_block(const Batch& batch) {
  int low = 0;
  for (int high = batch.count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (batch.entries[middle].first_block <= static_cast<int>(blockIdx.x) ? low : high) = middle;
  }
  return batch.entries[low];
}

// Elements [i, i + 4) of a contiguous array, zero past the end.  The values do not depend on the alignment.
template <class T>
__device__ float4 load(const T* x, std::int64_t i, std::int64_t numel) {
  if (is_aligned(x) && i + kVector <= numel) {
    const auto v = *reinterpret_cast<const Vector<T>*>(x + i);
    return make_float4(to_float(v.values[0]), to_float(v.values[1]), to_float(v.values[2]), to_float(v.values[3]));
  }
  const auto at = [=](int j) { return i + j < numel ? to_float(x[i + j]) : 0.0F; };
  return make_float4(at(0), at(1), at(2), at(3));
}

template <class T>
__device__ void save(T* x, std::int64_t i, std::int64_t numel, const float4& v) {
  const float values[kVector] = {v.x, v.y, v.z, v.w};
  if (is_aligned(x) && i + kVector <= numel) {
    Vector<T> packed;
    for (int j = 0; j < kVector; ++j) packed.values[j] = from_float<T>(values[j]);
    *reinterpret_cast<Vector<T>*>(x + i) = packed;
    return;
  }
  for (int j = 0; j < kVector && i + j < numel; ++j) x[i + j] = from_float<T>(values[j]);
}

// Four elements of x, whose lines may be longer than the matrix's.
template <class X>
struct Lines {
  X* x;
  std::int64_t numel;
  int cols;
  int ld;

  __device__ explicit Lines(const PassMatrix& matrix)
      : x(static_cast<X*>(matrix.x)),
        numel(matrix.rows * matrix.cols),
        cols(static_cast<int>(matrix.cols)),
        ld(static_cast<int>(matrix.ld)) {}

  __device__ X& at(std::int64_t i) const { return x[i / cols * ld + i % cols]; }

  __device__ float4 load(std::int64_t i) const {
    if (ld == cols) return kernels::load(x, i, numel);
    const auto value = [this, i](int j) { return i + j < numel ? to_float(at(i + j)) : 0.0F; };
    return make_float4(value(0), value(1), value(2), value(3));
  }

  __device__ void save(std::int64_t i, const X (&values)[kVector]) const {
    if (ld == cols && is_aligned(x) && i + kVector <= numel) {
      *reinterpret_cast<Vector<X>*>(x + i) = *reinterpret_cast<const Vector<X>*>(values);
      return;
    }
    for (int j = 0; j < kVector && i + j < numel; ++j) at(i + j) = values[j];
  }
};

// What Newton-Schulz leaves x in.
template <class T>
using Result = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat16, __half>;

// This block's share of a matrix, four elements at a time.
template <class Body>
__device__ void for_each(const Entry& entry, Body body) {
  const std::int64_t numel = entry.matrix.rows * entry.matrix.cols;
  const std::int64_t stride = std::int64_t{entry.blocks} * kThreads * kVector;
  const std::int64_t block = static_cast<int>(blockIdx.x) - entry.first_block;
  for (std::int64_t i = (block * kThreads + threadIdx.x) * kVector; i < numel; i += stride) body(i, numel);
}

// momentum * m + g, and g + momentum * m: rounded after the product and after the sum, as torch does.
__device__ float4 scaled_sum(float factor, const float4& m, const float4& g) {
  const auto one = [factor](float a, float b) { return __fadd_rn(__fmul_rn(factor, a), b); };
  return make_float4(one(m.x, g.x), one(m.y, g.y), one(m.z, g.z), one(m.w, g.w));
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

// Updates the momentum and leaves one partial sum of squares for each block.
template <class T>
__global__ void __launch_bounds__(kThreads) accumulate(const __grid_constant__ Batch batch) {
  wait_for_kernel_before();
  const Entry& entry = entry_of_block(batch);
  const PassMatrix& matrix = entry.matrix;
  double sum = 0.0;
  for_each(entry, [&](std::int64_t i, std::int64_t numel) {
    float4 y = load(static_cast<const T*>(matrix.input), i, numel);
    if (matrix.momentum != nullptr) {
      const float4 m = scaled_sum(batch.momentum, load(matrix.momentum, i, numel), y);
      save(matrix.momentum, i, numel, m);
      y = batch.nesterov ? scaled_sum(batch.momentum, m, y) : m;
    }
    sum += (double{y.x} * y.x + double{y.y} * y.y) + (double{y.z} * y.z + double{y.w} * y.w);
  });
  sum = block_sum(sum);
  if (threadIdx.x == 0) batch.partial[blockIdx.x] = sum;
  if (threadIdx.x == 0 && batch.finite != nullptr && static_cast<int>(blockIdx.x) == entry.first_block) {
    batch.finite[&entry - batch.entries] = true;
  }
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < batch.zero_count; i += threads) {
    batch.zeros[i] = 0;
  }
}

// Every block adds up its matrix's partial sums itself, in the same order, and writes its elements.
template <class T>
__global__ void __launch_bounds__(kThreads) scale_cast(const __grid_constant__ Batch batch) {
  wait_for_kernel_before();
  static_assert(kMaxBlocks <= kThreads);
  __shared__ double shared_factor;
  const Entry& entry = entry_of_block(batch);
  const PassMatrix& matrix = entry.matrix;
  const bool mine = static_cast<int>(threadIdx.x) < entry.blocks;
  const double sum = block_sum(mine ? batch.partial[entry.first_block + threadIdx.x] : 0.0);
  if (threadIdx.x == 0) shared_factor = sum == 0.0 ? 1.0 : batch.scale / sqrt(sum);
  __syncthreads();
  const double factor = shared_factor;
  const Lines<__half> x(matrix);
  for_each(entry, [&](std::int64_t i, std::int64_t numel) {
    float4 y = load(static_cast<const T*>(matrix.input), i, numel);
    if (matrix.momentum != nullptr) {
      const float4 m = load(matrix.momentum, i, numel);
      y = batch.nesterov ? scaled_sum(batch.momentum, m, y) : m;
    }
    alignas(8) const __half h[kVector] = {__double2half(y.x * factor), __double2half(y.y * factor),
                                          __double2half(y.z * factor), __double2half(y.w * factor)};
    x.save(i, h);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) update(const __grid_constant__ Batch batch) {
  wait_for_kernel_before();
  const Entry& entry = entry_of_block(batch);
  const PassMatrix& matrix = entry.matrix;
  const Lines<Result<T>> x(matrix);
  bool finite = true;
  for_each(entry, [&](std::int64_t i, std::int64_t numel) {
    const float4 u = x.load(i);
    finite = finite && isfinite(u.x) && isfinite(u.y) && isfinite(u.z) && isfinite(u.w);
    if (matrix.weight == nullptr) return save(static_cast<T*>(matrix.output), i, numel, u);
    const float4 w = load(matrix.weight, i, numel);
    const auto one = [&](float old, float direction) { return old * batch.decay - matrix.step * direction; };
    save(matrix.weight, i, numel, make_float4(one(w.x, u.x), one(w.y, u.y), one(w.z, u.z), one(w.w, u.w)));
  });
  if (!finite && batch.finite != nullptr) batch.finite[&entry - batch.entries] = false;
}

// Calls launch(batch, blocks) for up to kMaxMatrices at a time.
template <class Launch>
const char* for_each_batch(const PassArgs& args, Launch launch) {
  std::int64_t partials = 0;
  for (std::size_t begin = 0; begin < args.matrices.size(); begin += kMaxMatrices) {
    const auto part = args.matrices.subspan(begin, std::min<std::size_t>(kMaxMatrices, args.matrices.size() - begin));
    Batch batch{.entries = {},
                .count = static_cast<int>(part.size()),
                .momentum = args.momentum,
                .nesterov = args.nesterov,
                .scale = args.scale,
                .decay = args.decay,
                .partial = args.workspace + partials,
                .finite = args.finite == nullptr ? nullptr : args.finite + begin,
                .zeros = args.zeros,
                .zero_count = begin == 0 ? args.zero_count : 0};
    int blocks = 0;
    for (std::size_t i = 0; i < part.size(); ++i) {
      batch.entries[i] = {part[i], blocks, blocks_of(part[i])};
      blocks += batch.entries[i].blocks;
    }
    launch(batch, static_cast<unsigned>(blocks));
    partials += blocks;
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
  for (const PassMatrix& matrix : matrices) total += blocks_of(matrix);
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
