#include "dmuon/recording_communicator.h"

namespace dmuon {

Pending RecordingCommunicator::broadcast(std::span<const OwnerSegment> segments) {
  ++stats_.broadcast_calls;
  stats_.broadcast_bytes += foreign_bytes(segments);
  return inner_->broadcast(segments);
}

Pending RecordingCommunicator::reduce(std::span<const OwnerSegment> segments) {
  ++stats_.reduce_calls;
  stats_.reduce_bytes += foreign_bytes(segments);
  return inner_->reduce(segments);
}

Pending RecordingCommunicator::reduce_shared(std::span<const OwnerSegment> segments, const SharedSum& how) {
  ++stats_.reduce_calls;
  stats_.reduce_bytes += foreign_bytes(segments);
  return inner_->reduce_shared(segments, how);
}

Pending RecordingCommunicator::gather(std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received) {
  ++stats_.reduce_calls;
  stats_.reduce_bytes += foreign_bytes(segments);
  return inner_->gather(segments, received);
}

Pending RecordingCommunicator::scatter(std::span<const OwnerSegment> segments,
                                       const std::vector<std::vector<at::Tensor>>& parts) {
  ++stats_.broadcast_calls;
  stats_.broadcast_bytes += foreign_bytes(segments);
  return inner_->scatter(segments, parts);
}

std::int64_t RecordingCommunicator::foreign_bytes(std::span<const OwnerSegment> segments) const {
  std::int64_t bytes = 0;
  for (const auto& segment : segments) {
    if (segment.root != rank()) bytes += static_cast<std::int64_t>(segment.buffer.nbytes());
  }
  return bytes;
}

}  // namespace dmuon
