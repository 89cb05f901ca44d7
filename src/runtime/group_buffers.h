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

/// Where a group's buffers go, and for whom.
struct BufferPlacement {
  plan::Slot rank;
  c10::Device device;
  at::ScalarType compute_dtype;
  bool replicated = false;             ///< there is a replicate mesh
  at::Tensor shared{};                 ///< memory that peers read the published copies from, 1-D bytes; or undefined
  std::vector<std::int64_t> places{};  ///< [segments] where they lie in it, on their row owner
};

/// One owner's segment as this rank sees it.
struct SegmentBuffers {
  plan::Slot owner;
  bool owned = false;       ///< this rank is the owner
  bool column = false;      ///< this rank sends it: `compute` is resident
  at::Tensor master;        ///< [numel] master dtype; defined on the owner only
  at::Tensor compute;       ///< [numel] compute dtype: the published copy (column) or a slice of the gather buffer
  at::Tensor slice;         ///< of a part of this column: [payload] its rows in the gather buffer, where it is whole
  std::int64_t place = -1;  ///< of the published copy in its row owner's shared memory
};

class GroupBuffers {
 public:
  /// Allocates on `device` and moves every parameter's data into place: registered masters (whose values are kept) and
  /// unsharded leaves.  `members[i]` is the parameter of plan index i, for the indices the layout names.
  /// `placement.replicated`: the published copy is never the master itself, so that it changes only when it is sent.
  /// Buffers made again for the same group take the same places of the shared memory, values and all.
  GroupBuffers(const plan::GroupLayout& layout, const std::vector<DedicatedParamPtr>& members,
               const BufferPlacement& placement, MemoryLedger& ledger);
  ~GroupBuffers();
  GroupBuffers(const GroupBuffers&) = delete;
  GroupBuffers& operator=(const GroupBuffers&) = delete;

  [[nodiscard]] const std::vector<SegmentBuffers>& segments() const { return segments_; }
  /// What one grouped broadcast moves.
  [[nodiscard]] std::vector<OwnerSegment> broadcast_segments() const;

  /// What a publish moves: this column's segments, rooted at the owner's replicate coordinate.
  [[nodiscard]] std::vector<OwnerSegment> publish_segments() const;

  /// Casts the owned masters into the published copy.  Without replicas always done before a gather of a new forward,
  /// so that any way of changing a master (a step, `p.data.copy_`, a load) is seen; with replicas done by a publish.
  void refresh_published();
  /// Throws, naming the parameter, if an owned master has changed since the last refresh.
  void check_published() const;
  void allocate_gather();
  /// This column's parts of parameters that are cut by rows join the others' in the gather buffer.
  void join_parts() const;
  void release_gather();

 private:
  [[nodiscard]] SegmentBuffers make_segment(const plan::Segment& segment, std::int64_t offset,
                                            const std::vector<DedicatedParamPtr>& members,
                                            const BufferPlacement& placement);
  void link_unsharded(const plan::Segment& segment, const SegmentBuffers& buffers, std::int64_t offset,
                      const std::vector<DedicatedParamPtr>& members) const;
  void place_masters(const plan::Segment& segment, SegmentBuffers& buffers,
                     const std::vector<DedicatedParamPtr>& members, const BufferPlacement& placement);
  void relink_masters();

  struct OwnedView {
    DedicatedParamPtr param;
    at::Tensor master;
    std::int64_t version = 0;  ///< of the registered leaf, when it was last cast
  };
  std::vector<SegmentBuffers> segments_;
  std::vector<OwnedView> owned_;
  at::Tensor gather_;
  std::int64_t gather_bytes_ = 0;
  std::int64_t resident_bytes_ = 0;
  MemoryLedger& ledger_;
};

}  // namespace dmuon
