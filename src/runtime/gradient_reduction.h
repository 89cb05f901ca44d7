// One group's reduction in flight: packs the ranks' gradients per owner, sums them to the owners, and turns the owner's
// segment into `.grad`.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dmuon/communicator.h"
#include "dmuon/dedicated_param_group.h"
#include "runtime/memory_ledger.h"

namespace dmuon {

struct ReduceOptions {
  at::ScalarType dtype = at::kFloat;  ///< on the wire
  double divide_factor = 1.0;         ///< the sum over ranks is divided by this, once, on the owner
};

/// A matrix that this rank did not use contributes negative zeros, IEEE's exact identity of addition: the owner's sum
/// is all negative zeros if and only if no rank contributed anything else.  So "used by nobody" travels without a byte
/// of its own.
class GradientReduction {
 public:
  /// Packs, clears the unsharded gradients, and issues one grouped reduce on `stream`.
  /// Throws (naming the parameter) for a gradient that is not strided.
  GradientReduction(DedicatedParamGroup& group, plan::Slot rank, Communicator& communicator, const Stream& stream,
                    const ReduceOptions& options, MemoryLedger& ledger);
  ~GradientReduction();
  GradientReduction(GradientReduction&&) = delete;

  /// Whether `finish` would return without the host waiting for peers.
  [[nodiscard]] bool ready() const { return pending_.ready(); }

  /// Waits (the current stream does), frees what belongs to other owners, and adds to or sets `.grad` of the owned
  /// parameters; then runs their post-accumulate-grad hooks.  A matrix no rank used keeps its `.grad` as it was.
  /// Synchronises with the device only for a matrix that other ranks may have used and the owner did not.
  void finish();

 private:
  struct Share {
    DedicatedParamPtr param;
    at::Tensor sum;     ///< view into `own_`, reduce dtype
    bool used = false;  ///< by this rank
  };
  using Copies = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;  ///< targets, sources
  void allocate(const plan::GroupLayout& layout, plan::Slot rank, const at::TensorOptions& buffer);
  void place(const DedicatedParamGroup& group, const std::vector<at::Tensor>& gradients, plan::Slot rank,
             Copies& copies);
  void deliver(const Share& share) const;

  std::vector<at::Tensor> own_;
  at::Tensor others_;
  std::vector<OwnerSegment> segments_;
  std::vector<Share> shares_;
  Pending pending_;
  bool peers_;
  double divide_factor_;
  std::int64_t buffer_bytes_ = 0;
  MemoryLedger& ledger_;
};

/// Takes the gradients autograd left on the unsharded leaves, [params of the group], undefined where there is none.
[[nodiscard]] std::vector<at::Tensor> take_gradients(DedicatedParamGroup& group);

/// no_sync: moves the unsharded gradients into the group's accumulators, in `dtype`.
void accumulate_gradients(DedicatedParamGroup& group, at::ScalarType dtype);

}  // namespace dmuon
