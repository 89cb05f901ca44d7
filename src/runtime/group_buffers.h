// The memory of one group on one rank: packed masters, the published copy, and the gather buffer of everybody else's
// segments.  Owned by DedicatedParamGroup; knows nothing of states or communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dmuon/communicator.h"
#include "dmuon/dedicated_param.h"
#include "dmuon/layout.h"
#include "runtime/memory_ledger.h"

namespace dmuon {

/// One owner's segment as this rank sees it.
struct SegmentBuffers {
  int root = 0;         ///< the owner's shard coordinate: who sends it in the shard group
  bool owned = false;   ///< this rank is the owner
  bool column = false;  ///< this rank sends it: `compute` is resident
  at::Tensor master;    ///< [numel] master dtype; defined on the owner only
  at::Tensor compute;   ///< [numel] compute dtype: the published copy (column) or a slice of the gather buffer
};

class GroupBuffers {
 public:
  /// Allocates on `device` and moves every parameter's data into place: registered masters (whose values are kept) and
  /// unsharded leaves.  `members[i]` is the parameter of plan index i, for the indices the layout names.
  GroupBuffers(const plan::GroupLayout& layout, const std::vector<DedicatedParamPtr>& members, plan::Slot rank,
               c10::Device device, at::ScalarType compute_dtype, MemoryLedger& ledger);
  ~GroupBuffers();
  GroupBuffers(const GroupBuffers&) = delete;
  GroupBuffers& operator=(const GroupBuffers&) = delete;

  [[nodiscard]] const std::vector<SegmentBuffers>& segments() const { return segments_; }
  /// What one grouped broadcast moves.
  [[nodiscard]] std::vector<OwnerSegment> broadcast_segments() const;

  /// Casts the owned masters into the published copy.  Always done before a gather of a new forward, so that any way
  /// of changing a master (a step, `p.data.copy_`, a load) is seen.  No-op when master and compute dtype are equal.
  void refresh_published();
  void allocate_gather();
  void release_gather();

 private:
  void place_masters(const plan::Segment& segment, SegmentBuffers& buffers,
                     const std::vector<DedicatedParamPtr>& members);
  void relink_masters();

  struct OwnedView {
    DedicatedParamPtr param;
    at::Tensor master;
  };
  std::vector<SegmentBuffers> segments_;
  std::vector<OwnedView> owned_;
  at::Tensor gather_;
  std::int64_t gather_bytes_ = 0;
  std::int64_t resident_bytes_ = 0;
  MemoryLedger& ledger_;
};

}  // namespace dmuon
