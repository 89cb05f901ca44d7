// Newton-Schulz orthogonalisation: replaces a matrix by (nearly) its polar factor U V^T.
//
// Called by the optimizer on matrices it owns, and by users through `dmuon.newton_schulz`.  Knows nothing of ranks.
// Bits do not depend on what else is in the list.  On CUDA the iteration runs in fp16 with fp32 accumulation (bf16 Gram
// diverges); elsewhere in fp32.  A NaN or Inf stays in the matrix it is in.  A zero matrix gives a zero matrix.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/ns_coefficients.h"

namespace dmuon {

enum class NsBackend { kGram, kStandard };

struct NsOptions {
  NsBackend backend = NsBackend::kGram;
  std::vector<NsCoefficients> coefficients;  ///< one entry a step
  std::vector<int> restarts = {2};           ///< Gram: steps before which X is formed afresh; {2, 4} is "accurate"
};

/// Factor beyond 1 up to which "polar_express" is safe: each published step p is taken as p(x / margin), except the
/// limit polynomial, which needs none.  Unscaled, the steps blow up on singular values that rounding lifts above 1:
/// fp16 gave 4e3 for a rank-one matrix.  1.05 is what Gram Newton-Schulz (Dao-AILab 2026) uses.  In fp16 Gram with one
/// restart it keeps sigma_max within 0.06 of exact and the error below 4e-2 on every full-rank test spectrum; 1.01, the
/// margin of the Polar Express authors, does not (sigma_max 0.08 above on an all-ones matrix).  Band on [1e-3, 1] with
/// 5 steps: 0.729 to 1.124.
inline constexpr double kPolarExpressMargin = 1.05;

/// "gram" (one restart), "gram_accurate" (restarts before steps 2 and 4) or "standard".  `coefficients` is a set's
/// name: "polar_express", "you", "keller_jordan".  A set is cut or, with its last (or, for polar_express, the limit
/// (15,-10,3)/8) entry, extended to `steps`.  Throws c10::Error that lists the known names for an unknown one, and for
/// steps < 1.
[[nodiscard]] NsOptions make_ns_options(const std::string& backend, int steps, const std::string& coefficients);

/// The published table of a set, cut or extended to `steps`.
[[nodiscard]] std::vector<NsCoefficients> coefficient_set(const std::string& name, int steps);

/// Minimax-optimal odd quintics for singular values in [lower, 1], one per step (Polar Express, arXiv 2505.16932):
/// each step equioscillates on the interval the previous one leaves.  Needs 0 < lower < 1, steps >= 1.
[[nodiscard]] std::vector<NsCoefficients> solve_coefficients(double lower, int steps);

/// matrices: each [rows, cols], floating, on one device; any mix of shapes.  Returns one tensor per input with its
/// shape and dtype.  Inputs are not modified.  The result does not depend on the scale of the input (a power of two
/// changes no bit), nor on its place in the list.  Outside autograd and autocast.
/// On Hopper GPUs whole lists run as one piece of work, in parts that bound the workspace (1.5 GiB, more for
/// matrices with a short side beyond 4096); elsewhere on CUDA matrices of one shape are stacked.  Runs on the current
/// stream of each device; never synchronises. Throws c10::Error that gives the place of a matrix that is not [rows,
/// cols] or not floating.
[[nodiscard]] std::vector<at::Tensor> newton_schulz(const std::vector<at::Tensor>& matrices, const NsOptions& options);

/// Throws c10::Error if no steps are given or a restart is below 1.  Restarts beyond the last step do nothing.
void check_ns_options(const NsOptions& options);

/// True when Gram is used for this shape under NsBackend::kGram (aspect ratio >= 1.3).
[[nodiscard]] bool uses_gram(std::int64_t rows, std::int64_t cols);

}  // namespace dmuon
