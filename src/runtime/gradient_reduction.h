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
  double divide_factor = 1.0;         ///< the sum over all ranks is divided by this, once, on the owner
  double pre_divide_factor = 1.0;     ///< of which this much before the sum: a power of two, against overflow in fp16
  bool reproducible = false;          ///< micro-batches are added in the group's tree accumulators
  bool across_replicas = true;        ///< false: stage 2 waits for a later backward; the sums are kept in the group
};

/// Where the two stages run.  `replicate` is null without a replicate mesh.
struct ReducePath {
  CommunicatorPtr shard;
  Stream shard_stream;
  CommunicatorPtr replicate;
  Stream replicate_stream;
  at::Tensor outgoing{};             ///< memory that the owners read what this rank sends from; undefined: none
  at::ScalarType sent = at::kFloat;  ///< with it: the dtype on the wire, which the gradients come in
};

/// With outgoing memory a rank sends its gradients as they are (bf16, say) and the owner adds them up in the reduce
/// dtype; gradients that no_sync kept back are already sums in the reduce dtype, and so is all that is sent with them.
///
/// Stage 1 sums inside the shard group to the row owners, stage 2 sums the column across the replicate group to the
/// owner.  On CUDA both are enqueued at once, on streams of their own; on CPU stage 2 goes out in `finish_shard`.
///
/// A matrix that this rank did not use contributes negative zeros, IEEE's exact identity of addition: the owner's sum
/// is all negative zeros if and only if no rank contributed anything else.  So "used by nobody" travels without a byte
/// of its own.
class GradientReduction {
 public:
  /// Packs, clears the unsharded gradients, and issues stage 1 as one grouped call.
  /// Throws (naming the parameter) for a gradient that is not strided.
  GradientReduction(DedicatedParamGroup& group, plan::Slot rank, const ReducePath& path, const ReduceOptions& options,
                    MemoryLedger& ledger);
  ~GradientReduction();
  GradientReduction(GradientReduction&&) = delete;

  [[nodiscard]] const DedicatedParamGroup& group() const { return group_; }

  /// Whether stage 1 is done: `finish_shard` would stop neither the host nor the current stream.
  [[nodiscard]] bool shard_ready() const { return shard_.ready(); }
  /// Likewise for `finish`, after `finish_shard`.
  [[nodiscard]] bool ready() const { return replicate_.ready(); }

  /// Stage 1 is done for the current stream: frees what belongs to other columns.
  void finish_shard();

  /// Both stages are done: adds to or sets `.grad` of the owned parameters, then runs their post-accumulate-grad hooks.
  /// Matrices this rank did not use are left for `settle`.
  void finish();
  [[nodiscard]] bool settled() const { return shares_.empty(); }

  /// For those: delivers the sums of matrices that other ranks used; the rest keep their `.grad` as it was.  The host
  /// waits for the device, so every collective of the pass must have been issued: a peer may need one of ours before it
  /// can send what we wait for.
  void settle();

 private:
  struct Share {
    DedicatedParamPtr param;
    at::Tensor sum;     ///< view into `column_`, reduce dtype
    bool used = false;  ///< by this rank
  };
  using Copies = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;  ///< targets, sources
  void allocate(const plan::GroupLayout& layout, plan::Slot rank, const at::TensorOptions& buffer);
  [[nodiscard]] std::vector<at::Tensor> foreign_buffers(const plan::GroupLayout& layout, plan::Slot rank,
                                                        const at::TensorOptions& buffer);
  void place(const std::vector<at::Tensor>& gradients, plan::Slot rank);
  void note_rowless(const std::vector<at::Tensor>& gradients, plan::Slot rank);
  void pack(const Copies& copies) const;
  [[nodiscard]] std::int64_t received_bytes() const;
  void wait_for_outgoing(c10::Device device) const;
  [[nodiscard]] double divide_early();
  void begin_replicate();
  void deliver(const Share& share) const;
  [[nodiscard]] bool peers() const { return path_.shard->size() > 1 || path_.replicate; }

  DedicatedParamGroup& group_;
  const ReducePath& path_;
  ReduceOptions options_;
  MemoryLedger& ledger_;
  double divisor_;                      ///< of what the communicators leave
  std::vector<OwnerSegment> segments_;  ///< stage 1, rooted at shard coordinates
  std::vector<OwnerSegment> column_;    ///< stage 2, rooted at replicate coordinates; buffers of their own
  at::Tensor others_;                   ///< one buffer for all other columns, unless they are in outgoing memory
  at::ScalarType sent_;                 ///< of what leaves this rank in stage 1
  std::vector<at::Tensor> merged_;      ///< earlier partial sums, alive until stage 2 is done with them
  std::vector<Share> shares_;
  std::vector<DedicatedParamPtr> rowless_;  ///< first parts of parameters of which this rank owns no row, but used some
  Pending shard_;
  Pending replicate_;
  bool replicating_ = false;
  std::int64_t others_bytes_ = 0;
  std::int64_t column_bytes_ = 0;
};

/// Takes the gradients autograd left on the unsharded leaves, [params of the group], undefined where there is none.
[[nodiscard]] std::vector<at::Tensor> take_gradients(DedicatedParamGroup& group);

/// no_sync: moves the unsharded gradients into the group's accumulators, in `dtype`.
void accumulate_gradients(DedicatedParamGroup& group, at::ScalarType dtype);

}  // namespace dmuon
