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

at::Tensor TreeAccumulator::add_to(const at::Tensor& grad, at::Tensor addend) {
  const bool untouched =
      grad.defined() && grad.is_same(last_) && static_cast<std::int64_t>(grad._version()) == last_version_;
  if (!untouched) {
    levels_.clear();
    base_ = grad;
  }
  last_ = add(std::move(addend));
  if (base_.defined()) last_ = base_.add(last_);
  last_version_ = static_cast<std::int64_t>(last_._version());
  return last_;
}

}  // namespace dmuon
