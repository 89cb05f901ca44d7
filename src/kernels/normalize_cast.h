// Normalises fp32 matrices to Frobenius norm `scale` and writes them as fp16, in two launches and without a host
// synchronisation.  Raw pointers and a stream: no torch and no CUDA header, so that any compiler can include it.
//
// Sums of squares are taken in fp64, where no fp32 square overflows or vanishes, so the largest entry is not needed.
// The order of every sum depends on `numel` alone: the same matrix gives the same bits at any place in any batch,
// whatever its alignment.
#pragma once

#include <cstdint>
#include <span>

struct CUstream_st;
using cudaStream_t = CUstream_st*;  // as CUDA declares it

namespace dmuon::kernels {

/// All device memory belongs to the caller and must live until the stream has passed the launches.
struct NormalizeCastArgs {
  std::span<const float* const> matrices;  ///< host array of device pointers, each to `numel` contiguous fp32 values
  std::int64_t numel = 0;                  ///< elements of one matrix, > 0
  double scale = 1.0;                      ///< Frobenius norm of the results
  void* out = nullptr;                     ///< fp16 [matrices, numel], 8-byte aligned
  double* workspace = nullptr;             ///< normalize_cast_workspace(...) values
};

/// fp64 values of workspace that normalize_cast needs.
[[nodiscard]] std::int64_t normalize_cast_workspace(std::int64_t matrices, std::int64_t numel);

/// out[i] = matrices[i] * (scale / ||matrices[i]||), rounded once.  A zero matrix gives zeros.  A NaN or Inf entry
/// leaves at least one NaN in its own matrix.  Queues on `stream` of the current device; the pointer array is read
/// before it returns.  Returns nullptr, or CUDA's text for a failed launch.
[[nodiscard]] const char* normalize_cast(const NormalizeCastArgs& args, cudaStream_t stream);

}  // namespace dmuon::kernels
