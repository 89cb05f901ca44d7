#include "runtime/shared_memory.h"

#include <map>

namespace dmuon {

SharedPlaces shared_places(const std::vector<DedicatedParamGroupPtr>& groups, std::int64_t element_bytes) {
  SharedPlaces result;
  std::map<int, std::int64_t> taken;  // by shard coordinate
  for (const auto& group : groups) {
    auto& places = result.places.emplace_back();
    for (const auto& segment : group->layout().segments) {
      auto& end = taken[segment.owner.shard];
      places.push_back(end);
      end += align_place(segment.numel * element_bytes);
      result.bytes = std::max(result.bytes, end);
    }
  }
  return result;
}

std::vector<SegmentSize> segment_sizes(const plan::GroupLayout& layout) {
  std::vector<SegmentSize> sizes;
  for (const auto& segment : layout.segments) sizes.push_back({segment.owner.shard, segment.numel});
  return sizes;
}

std::int64_t outgoing_capacity(const std::vector<DedicatedParamGroupPtr>& groups, int ranks,
                               std::int64_t element_bytes) {
  std::int64_t bytes = 0;
  for (const auto& group : groups) {
    const auto sizes = segment_sizes(group->layout());
    for (int rank = 0; rank < ranks; ++rank) bytes = std::max(bytes, outgoing_places(sizes, rank, element_bytes).bytes);
  }
  return bytes;
}

at::Tensor view_shared(const at::Tensor& memory, std::int64_t place, std::int64_t numel, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<std::int64_t>(at::elementSize(dtype));
  TORCH_CHECK(place >= 0 && place + bytes <= memory.numel(), "[dmuon.runtime] a segment of ", bytes, " bytes at place ",
              place, " does not fit into ", memory.numel(), " bytes of shared memory");
  return at::from_blob(
      static_cast<std::uint8_t*>(memory.data_ptr()) + place, {numel}, [memory](void*) {}, memory.options().dtype(dtype),
      memory.device());
}

}  // namespace dmuon
