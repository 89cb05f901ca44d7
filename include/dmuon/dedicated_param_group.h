// The matrices whose communication one hook module triggers: their state, their buffers, their one gather and one
// reduction per pass.
//
// Driven by Runtime, which decides when; the group only knows how.  One thread at a time.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/communicator.h"
#include "dmuon/dedicated_param.h"
#include "dmuon/layout.h"
#include "dmuon/stream.h"
#include "dmuon/tree_accumulator.h"

namespace dmuon {

class GroupBuffers;
struct BufferPlacement;
class MemoryLedger;

enum class GroupState { kSharded, kUnsharding, kUnsharded };
[[nodiscard]] const char* to_string(GroupState state);

/// What a gather sends: the masters' present values; the published copy, after checking that it is up to date (with
/// replicas); or the published copy as the forward of this backward sent it.
enum class Source { kMasters, kPublished, kSameAsForward };

/// One forward through the group whose graph may still be alive: held by the graph's nodes and hooks, and by nobody
/// else, so that its death is the graph's.
struct GroupUse : torch::CustomClassHolder {
  explicit GroupUse(int index) : group(index) {}

  /// Backward may still produce gradients through this use in `pass`.
  [[nodiscard]] bool open(std::int64_t pass) const { return !closed && finished_pass != pass; }

  int group;
  std::int64_t finished_pass = -1;  ///< last pass in which its post-backward ran; -1 when no input needs a gradient
  bool closed = false;              ///< that pass did not retain the graph: no other can follow
};

class DedicatedParamGroup : public torch::CustomClassHolder {
 public:
  /// `members`: [plan matrices], null where another group has it.
  DedicatedParamGroup(std::string name, int index, plan::GroupLayout layout, std::vector<DedicatedParamPtr> members);
  ~DedicatedParamGroup() override;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] int index() const { return index_; }
  [[nodiscard]] const plan::GroupLayout& layout() const { return layout_; }
  [[nodiscard]] const std::vector<DedicatedParamPtr>& params() const { return params_; }
  /// Where `params` has the matrix of a plan index.
  [[nodiscard]] size_t position_of(int matrix) const { return positions_[static_cast<size_t>(matrix)]; }
  [[nodiscard]] GroupState state() const { return state_; }
  /// The layout of what is reduced: the matrices that were trainable when `follow_trainable` was last called.
  [[nodiscard]] const plan::GroupLayout& reduce_layout() const { return reduce_layout_; }
  /// Takes over which matrices are trainable now; whether that differs from the last time.
  bool follow_trainable();
  /// One character a matrix, '1' if it is trainable; of the last `follow_trainable`.
  [[nodiscard]] std::string trainable_mask() const;

  /// Allocates (or re-allocates on another device) and links all parameters; values of the masters are kept.
  void materialize(const BufferPlacement& placement, MemoryLedger& ledger);
  [[nodiscard]] bool materialized() const { return buffers_ != nullptr; }

  /// After a step: casts the owned masters and broadcasts them across the replicate group on `stream`.  The wait is
  /// the group's next gather, whatever asks for it, or `wait_publish`.  A publish that nobody consumed is waited for
  /// first.
  void begin_publish(Communicator& replicate, const Stream& stream);
  void wait_publish() { publish_.wait(); }
  [[nodiscard]] bool publishing() const { return publish_.outstanding(); }

  /// Sharded -> Unsharding: allocates and broadcasts on `stream`, which waits for an outstanding publish.
  /// On an unsharded group the same values are sent again into the same buffers.
  void begin_gather(Communicator& communicator, const Stream& stream, Source source);
  /// Unsharding -> Unsharded: the current stream waits.
  void wait_gather();
  /// -> Sharded: frees the gather buffer (after an outstanding gather has been waited for).
  void release();

  // Bookkeeping of the runtime.
  bool reshard_after_forward = true;
  int compute_depth = 0;           ///< forwards of the module in progress
  bool kept_for_backward = false;  ///< Z2: every rank keeps it unsharded until its backward
  bool repeats = false;            ///< its module has run twice in a forward: kept from then on until a forward ends
  bool touched = false;            ///< its module ran since the last backward ended
  int untracked_forwards = 0;      ///< forwards without grad inside a pass with grad: recomputation may follow
  std::vector<c10::weak_intrusive_ptr<GroupUse>> uses;
  std::vector<c10::intrusive_ptr<GroupUse>> entered;  ///< forwards in progress, innermost last
  std::vector<at::Tensor> partial;  ///< [column segments] sums of stage 1 that wait for stage 2; empty when none do
  std::map<std::string, TreeAccumulator> trees;  ///< by parameter; reproducible mode only
  bool kept_back =
      false;  ///< no_sync was on since the last reduction: every rank may keep gradients back, or none does
  std::vector<at::Tensor> accumulated;  ///< [params] gradients kept back by no_sync, in reduce dtype; may be undefined

 private:
  std::string name_;
  int index_;
  plan::GroupLayout layout_;
  plan::GroupLayout reduce_layout_;
  std::vector<bool> trainable_;  ///< [plan matrices]
  std::vector<DedicatedParamPtr> members_;
  std::vector<DedicatedParamPtr> params_;
  std::vector<size_t> positions_;  ///< [plan matrices] into params_
  GroupState state_ = GroupState::kSharded;
  std::unique_ptr<GroupBuffers> buffers_;
  Pending gather_;
  Pending publish_;
};

using DedicatedParamGroupPtr = c10::intrusive_ptr<DedicatedParamGroup>;

}  // namespace dmuon
