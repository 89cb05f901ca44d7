// The owner's sum of a reduction: every rank's part in rank order, in one launch for many segments.
//
// Raw pointers and a stream: no torch and no CUDA header.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/matrix_passes.h"

namespace dmuon::kernels {

/// One segment.  All memory is on the current device.
struct SumSegment {
  void* total = nullptr;        ///< [numel] of the sum's type: this rank's part; takes the sum
  const void* parts = nullptr;  ///< the other ranks' parts, in rank order, `stride` elements apart
  std::int64_t stride = 0;      ///< >= numel
  std::int64_t numel = 0;
};

struct SumArgs {
  std::span<const SumSegment> segments;
  Scalar sum = Scalar::kFloat;   ///< of the totals
  Scalar sent = Scalar::kFloat;  ///< of the parts
  int ranks = 0;
  int rank = 0;
  float factor = 1.0F;
};

/// total = (v_0 + v_1 + ...) * factor in fp32, where v_rank is read from `total` itself, and rounded at the end.  The
/// first addend is v_0, not zero, so a sum of negative zeros stays one.  Queues on `stream`.  nullptr, or CUDA's text.
[[nodiscard]] const char* sum_parts(const SumArgs& args, cudaStream_t stream);

/// Loads the kernels of this file: see load_signals.
[[nodiscard]] const char* load_sums();

}  // namespace dmuon::kernels
