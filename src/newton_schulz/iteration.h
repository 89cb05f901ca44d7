// The polynomial steps on matrices that are already normalised.  Any device and dtype: the caller chose both.
//
//   standard step   R = X X^T,  Z = b R + c R^2,  X <- a X + Z X
//   Gram segment    R = X X^T once, then on n x n matrices only, Q starting at I:
//                   Z = b R + c R^2,  Q <- a Q + Q Z,  RZ = a R + R Z,  R <- a RZ + Z RZ;  at its end X <- Q X
//
// (Gram Newton-Schulz, Dao-AILab 2026.)  `a` is applied as a scalar of the product, so a*I is not rounded to the
// storage dtype.  A restart ends one segment and starts the next; a segment of one step is a standard step, so standard
// Newton-Schulz is Gram with a restart before every step.  A tall X uses X^T X and X Q; nothing is transposed in
// memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "dmuon/newton_schulz.h"

namespace dmuon {

/// x: [rows, cols] or [batch, rows, cols], singular values <= 2^prescale.  Returns X_T, same shape and dtype, singular
/// values near 1.  `restarts`: steps before which X is formed afresh, in any order; those outside [1, steps) do
/// nothing.
///
/// prescale: x is 2^prescale times the normalised matrix.  The first step takes the factor out again.  Exact; it keeps
/// the small entries of a large fp16 X and R above the subnormal range.  At most 6 in fp16 (RZ reaches 8.3 *
/// 4^prescale).
[[nodiscard]] at::Tensor iterate(at::Tensor x, std::span<const NsCoefficients> steps, std::span<const int> restarts,
                                 int prescale);

/// The restarts of a matrix of this shape: the options' where Gram is used, one before every step elsewhere.
[[nodiscard]] std::vector<int> restarts_for(const NsOptions& options, std::int64_t rows, std::int64_t cols);

/// The prescale of fp16 iterations.
inline constexpr int kHalfPrescale = 4;

}  // namespace dmuon
