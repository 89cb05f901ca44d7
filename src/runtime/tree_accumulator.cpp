#include "dmuon/tree_accumulator.h"

#include <utility>

namespace dmuon {

at::Tensor TreeAccumulator::add(at::Tensor addend) {
  size_t level = 0;
  for (; level < levels_.size() && levels_[level].defined(); ++level) {
    addend = std::exchange(levels_[level], at::Tensor()).add(addend);
  }
  if (level == levels_.size()) levels_.emplace_back();
  levels_[level] = std::move(addend);
  at::Tensor sum = levels_[level];
  for (++level; level < levels_.size(); ++level) {
    if (levels_[level].defined()) sum = levels_[level].add(sum);
  }
  return sum;
}

}  // namespace dmuon
