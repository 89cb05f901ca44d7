// How the passes over matrices go through memory: a thread block takes a share of one matrix, vector after vector.
#pragma once

#include <cstdint>

#include "kernels/matrix_passes.h"
#include "kernels/vectors.cuh"

namespace dmuon::kernels::passes {

constexpr int kThreads = 256;
constexpr int kResident = 4;       // thread blocks of a multiprocessor
constexpr int kAhead = 4;          // vectors that a thread has on their way
constexpr int kMaxMatrices = 128;  // passed by value in one launch

// A thread block takes a share of a matrix, neighbouring elements with a sum of their own.  How many shares there are
// follows from the number of elements alone.
constexpr int kMaxShares = 512;
constexpr std::int64_t kReadTogether = std::int64_t{kThreads} * kVector * kAhead;
constexpr std::int64_t kLeastShare = 4 * kReadTogether;

struct Entry {
  PassMatrix matrix;
  int first_share;  // of the batch; its partial sums start there too
  int shares;
  std::int64_t per_share;  // elements
};

struct Batch {
  Entry entries[kMaxMatrices];
  int count;
  int shares;
  float momentum;
  bool nesterov;
  double scale;
  float decay;
  double* partial;
  bool* finite;
  std::int32_t* zeros;
  std::int64_t zero_count;
};

// A share: elements [first, last) of a matrix.
struct Share {
  const Batch& batch;
  int number;  // of the batch
  int index = 0;
  std::int64_t first;
  std::int64_t last;

  __device__ explicit Share(const Batch& all) : batch(all), number(static_cast<int>(blockIdx.x)) {
    for (int high = batch.count; high - index > 1;) {
      const int middle = (index + high) / 2;
      (batch.entries[middle].first_share <= number ? index : high) = middle;
    }
    first = (number - entry().first_share) * entry().per_share;
    last = min(first + entry().per_share, matrix().rows * matrix().cols);
  }

  __device__ const Entry& entry() const { return batch.entries[index]; }
  __device__ const PassMatrix& matrix() const { return entry().matrix; }
  __device__ bool is_first() const { return number == entry().first_share; }
};

// A share is "whole" when all of its arrays can be read and written in aligned vectors, kAhead a thread.  That takes
// code of its own; the values are the same.
template <class... T>
__device__ bool is_whole(const Share& share, const T*... arrays) {
  return (share.last - share.first) % kReadTogether == 0 && (is_aligned(arrays) && ...);
}

// Four elements of x, whose lines may be longer than the matrix's unless it is whole.
template <bool kWhole, class X>
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

  __device__ Vector<X> load(std::int64_t i) const {
    Vector<X> packed;
    if constexpr (kWhole) {
      packed = kernels::load<true>(x, i, numel);
    } else {
      for (int j = 0; j < kVector; ++j) packed.values[j] = i + j < numel ? at(i + j) : from_float<X>(0.0F);
    }
    return packed;
  }

  __device__ void save(std::int64_t i, const float4& v) const {
    if constexpr (kWhole) {
      kernels::save<true>(x, i, numel, v);
    } else {
      const Vector<X> packed = from_floats<X>(v);
      for (int j = 0; j < kVector && i + j < numel; ++j) at(i + j) = packed.values[j];
    }
  }
};

// A share, four elements at a time: use(i, read(i)).  Of a whole one several reads come before the first use, so that
// their latencies overlap.
template <bool kWhole, class Read, class Use>
__device__ void for_each(const Share& share, Read read, Use use) {
  constexpr int kReads = kWhole ? kAhead : 1;
  constexpr int kStride = kThreads * kVector;
  for (std::int64_t i = share.first + threadIdx.x * kVector; i < share.last; i += kReads * kStride) {
    decltype(read(i)) values[kReads];
#pragma unroll
    for (int k = 0; k < kReads; ++k) values[k] = read(i + k * kStride);
#pragma unroll
    for (int k = 0; k < kReads; ++k) use(i + k * kStride, values[k]);
  }
}

}  // namespace dmuon::kernels::passes
