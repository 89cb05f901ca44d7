#include "dmuon/communicator.h"

namespace dmuon {

OutgoingPlaces outgoing_places(std::span<const SegmentSize> segments, int sender, std::int64_t element_bytes) {
  OutgoingPlaces result;
  for (const auto& segment : segments) {
    const bool sent = segment.root != sender;
    result.places.push_back(sent ? result.bytes : -1);
    if (sent) result.bytes += align_place(segment.numel * element_bytes);
  }
  return result;
}

at::Tensor Communicator::share(Sharing /*purpose*/, std::int64_t /*bytes*/) { return {}; }

bool Communicator::sums_shared(at::ScalarType /*sent*/, at::ScalarType /*sum*/) const { return false; }

Pending Communicator::reduce_shared(std::span<const OwnerSegment> /*segments*/, const SharedSum& /*how*/) {
  TORCH_CHECK(false, "[dmuon.comm] this communicator shares no memory: call reduce");
}

}  // namespace dmuon
