// Adds up micro-batches in the tree order of tree_sum: a binary counter of partial sums.
//
// Used by reproducible reductions, one accumulator a matrix, next to the matrix's `.grad`.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dmuon {

class TreeAccumulator {
 public:
  /// `addend` joins the sum whose last value was returned as `.grad`: returns the new `.grad`, of the same shape.
  /// `grad` is what `.grad` is now.  Undefined: a new sum begins.  Changed by the user since (zeroed, clipped,
  /// replaced): it stays as it is, and a new sum begins on top of it.
  [[nodiscard]] at::Tensor add_to(const at::Tensor& grad, at::Tensor addend);

  /// Takes the next addend (kept, not copied) and returns the sum so far, a new tensor unless it is the first.
  [[nodiscard]] at::Tensor add(at::Tensor addend);

 private:
  std::vector<at::Tensor> levels_;  ///< level l: the sum of a block of 2^l addends, or undefined
  at::Tensor base_;                 ///< what the user left in `.grad` before this sum; undefined for nothing
  at::Tensor last_;                 ///< as returned
  std::int64_t last_version_ = 0;
};

}  // namespace dmuon
