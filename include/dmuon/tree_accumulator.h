// Adds up micro-batches in the tree order of tree_sum: a binary counter of partial sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dmuon {

class TreeAccumulator {
 public:
  /// Takes the next addend (kept, not copied) and returns the sum so far, a new tensor unless it is the first.
  [[nodiscard]] at::Tensor add(at::Tensor addend);
  void clear() { levels_.clear(); }

 private:
  std::vector<at::Tensor> levels_;  ///< level l: the sum of a block of 2^l addends, or undefined
};

}  // namespace dmuon
