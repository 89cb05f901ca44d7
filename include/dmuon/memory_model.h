// How many bytes dmuon itself holds on one rank: predicted from the plan alone, before anything is allocated.
//
// Counts masters, momentum (of elementwise parameters both of AdamW's moments), published copies, gather buffers,
// gradients of a group while they are being reduced, and reduced gradients.  Activations, FSDP2's parameters and
// Newton-Schulz workspace are not dmuon's and not counted.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dmuon/layout.h"

namespace dmuon::plan {

struct MemoryOptions {
  std::int64_t master_bytes = 4;    ///< bytes per element of the master (and its `.grad`)
  std::int64_t compute_bytes = 2;   ///< bytes per element of the broadcast copy and of unreduced gradients
  std::int64_t reduce_bytes = 4;    ///< bytes per element on the wire in backward
  bool published_copy = true;       ///< false when the compute dtype is the master dtype: the master is what is sent
  bool grad_aliases_reduce = true;  ///< false when the reduce dtype is not the master dtype: `.grad` is a cast copy
  bool reshard_after_forward = true;
  std::int64_t outgoing = 0;        ///< bytes that peers read gradients from; 0: what is sent needs reduce buffers
  std::int64_t received_bytes = 0;  ///< with them: what the column receives of its peers' gradients, bytes per element
  std::vector<int> last_inside{};   ///< [groups] the last one whose module lies inside this one's; empty: none does
  bool replicated = false;  ///< there is a replicate mesh: stage 2 of one group is in flight while the next is reduced
};

struct MemoryEstimate {
  std::int64_t masters = 0;
  std::int64_t momentum = 0;  ///< and AdamW's moments
  std::int64_t published = 0;
  std::int64_t outgoing = 0;       ///< memory that peers read gradients from
  std::int64_t gradients = 0;      ///< reduced gradients the rank holds when backward has ended
  std::int64_t forward_peak = 0;   ///< all bytes live at the worst moment of forward
  std::int64_t backward_peak = 0;  ///< likewise of backward

  [[nodiscard]] std::int64_t resident() const { return masters + momentum + published + outgoing; }
  [[nodiscard]] std::int64_t peak() const { return forward_peak > backward_peak ? forward_peak : backward_peak; }
};

/// `groups` in canonical (module) order: those inside a module follow it.  `rank` is the slot of the rank asked about.
/// The schedule counted is the one the runtime runs: prefetch depth one, one reduction outstanding.
[[nodiscard]] MemoryEstimate predict_memory(std::span<const GroupLayout> groups, Slot rank,
                                            const MemoryOptions& options);

}  // namespace dmuon::plan
