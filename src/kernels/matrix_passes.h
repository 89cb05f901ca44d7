// What happens to matrices before and after Newton-Schulz, for many matrices of any shapes in a few launches and
// without a host synchronisation.  Raw pointers and a stream: no torch and no CUDA header.
//
//   normalize   buf = momentum * buf + input,  y = nesterov ? input + momentum * buf : buf  (or y = input),
//               x = y * scale / ||y||_F in fp16
//   finish      weight = decay * weight - step * x  (or output = x), and whether x is finite
//
// Sums of squares are taken in fp64, but of four elements in fp32 after scaling them by a power of two: so none
// overflows or vanishes.  The order of every sum depends on the
// number of elements alone: the same matrix gives the same bits at any place in any list, whatever its alignment.
#pragma once

#include <cstdint>
#include <span>

struct CUstream_st;
using cudaStream_t = CUstream_st*;  // as CUDA declares it

namespace dmuon::kernels {

enum class Scalar { kFloat, kHalf, kBFloat16 };

/// Device memory of one matrix, [rows, cols]; all but x are contiguous.
struct PassMatrix {
  const void* input = nullptr;  ///< of the call's scalar type; fp32 when there is a momentum
  float* momentum = nullptr;    ///< or null
  void* x = nullptr;            ///< fp16, lines `ld` elements apart; for finish() bf16 if the call's scalar type is
  float* weight = nullptr;      ///< fp32; or null, then `output` is written
  void* output = nullptr;       ///< of the call's scalar type
  std::int64_t rows = 0;        ///< > 0
  std::int64_t cols = 0;        ///< > 0
  std::int64_t ld = 0;          ///< >= cols
  float step = 0.0F;
};

/// All device memory belongs to the caller and must live until the stream has passed the launches.
struct PassArgs {
  std::span<const PassMatrix> matrices;
  Scalar scalar = Scalar::kFloat;
  float momentum = 0.0F;
  bool nesterov = false;
  double scale = 1.0;  ///< Frobenius norm of the results
  float decay = 1.0F;
  double* workspace = nullptr;    ///< normalize_workspace(...) values
  bool* finite = nullptr;         ///< one a matrix, or null
  std::int32_t* zeros = nullptr;  ///< normalize() sets `zero_count` of them to zero before it ends
  std::int64_t zero_count = 0;
};

/// fp64 values of workspace that normalize() needs.
[[nodiscard]] std::int64_t normalize_workspace(std::span<const PassMatrix> matrices);

/// A zero matrix gives zeros.  A NaN or Inf entry leaves at least one NaN in its own matrix.  Sets `finite` to true.
/// Queues on `stream` of the current device; the list is read before it returns.  Returns nullptr, or CUDA's text for a
/// failed launch.
[[nodiscard]] const char* normalize(const PassArgs& args, cudaStream_t stream);

/// After normalize() of the same list: sets `finite` to false where x is not.  As above otherwise.
[[nodiscard]] const char* finish(const PassArgs& args, cudaStream_t stream);

}  // namespace dmuon::kernels
