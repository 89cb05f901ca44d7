// A decorator whose sums do not depend on the number of ranks they are split over: the root receives every rank's
// segment and adds them in a fixed binary tree.
#pragma once

#include "dmuon/communicator.h"

namespace dmuon {

/// Sum of rows [0, n) of `rows` [n, ...]: split at the largest power of two below n, so that every aligned block of a
/// power of two of rows is a subtree.  Hence summing blocks first (the shard group) and the blocks' sums next (the
/// replicate group) gives the bits of summing all rows, if blocks have a power of two of rows.
[[nodiscard]] at::Tensor tree_sum(const at::Tensor& rows);

/// The same bytes on the wire as a plain reduce to a root, but the root receives all of them itself and holds [size,
/// numel] while it adds: slower, and for debugging and bitwise comparisons.
class ReproducibleCommunicator final : public Communicator {
 public:
  explicit ReproducibleCommunicator(CommunicatorPtr inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Pending broadcast(std::span<const OwnerSegment> segments) override { return inner_->broadcast(segments); }
  Pending reduce(std::span<const OwnerSegment> segments) override;
  Pending gather(std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received) override {
    return inner_->gather(segments, received);
  }
  Pending scatter(std::span<const OwnerSegment> segments, const std::vector<std::vector<at::Tensor>>& parts) override {
    return inner_->scatter(segments, parts);
  }
  std::vector<std::string> exchange(const std::string& text) override { return inner_->exchange(text); }
  std::vector<std::string> meet(const std::string& text) override { return inner_->meet(text); }
  void check() const override { inner_->check(); }

 private:
  CommunicatorPtr inner_;
};

}  // namespace dmuon
