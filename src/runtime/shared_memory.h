// Memory that the shard group's ranks read directly: where everything lies, from the layouts alone, so that every rank
// knows every place without asking.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "dmuon/dedicated_param_group.h"

namespace dmuon {

/// Places of the published copies in their row owner's shared memory.
struct SharedPlaces {
  std::vector<std::vector<std::int64_t>> places;  ///< [groups][segments of the layout] bytes
  std::int64_t bytes = 0;                         ///< of the fullest rank: all share as much
};

/// `element_bytes`: of the compute dtype.
[[nodiscard]] SharedPlaces shared_places(const std::vector<DedicatedParamGroupPtr>& groups, std::int64_t element_bytes);

[[nodiscard]] std::vector<SegmentSize> segment_sizes(const plan::GroupLayout& layout);

/// Bytes that hold what any of `ranks` sends in the reduction of any group; one reduction is under way at a time.
[[nodiscard]] std::int64_t outgoing_capacity(const std::vector<DedicatedParamGroupPtr>& groups, int ranks,
                                             std::int64_t element_bytes);

/// [numel] of `dtype` at `place` of `memory`: a storage of its own, as far as saving and counting see, that keeps
/// `memory` alive.
[[nodiscard]] at::Tensor view_shared(const at::Tensor& memory, std::int64_t place, std::int64_t numel,
                                     at::ScalarType dtype);

}  // namespace dmuon
