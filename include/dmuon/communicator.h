// Moving segments between the ranks of one group (a mesh's shard or replicate axis).
//
// Called by the runtime only.  Every rank of the group must issue the same calls in the same order; the runtime's
// canonical order sees to that.  Roots are group-relative ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dmuon/pending.h"

namespace dmuon {

/// `buffer`: contiguous 1-D, same numel and dtype on every rank; borrowed until the returned Pending has been waited
/// for.
/// `place`: of a broadcast: where the root's buffer lies, in bytes from the start of its shared memory (`share`); the
/// same on every rank, also where the buffer is elsewhere.  -1: not in shared memory.
struct OwnerSegment {
  int root = 0;
  at::Tensor buffer;
  std::int64_t place = -1;
};

/// What memory is shared for.
enum class Sharing { kBroadcast, kReduce };

/// Places are multiples of this many bytes: what a copy engine likes.
inline constexpr std::int64_t kPlaceAlignment = 256;
[[nodiscard]] constexpr std::int64_t align_place(std::int64_t bytes) {
  return (bytes + kPlaceAlignment - 1) / kPlaceAlignment * kPlaceAlignment;
}

struct SegmentSize {
  int root = 0;
  std::int64_t numel = 0;
};

/// Where rank `sender` puts what it sends in `reduce_shared`: bytes from the start of its shared memory, one place a
/// segment, -1 for the segments it is the root of; and the bytes they take together.
struct OutgoingPlaces {
  std::vector<std::int64_t> places;
  std::int64_t bytes = 0;
};
[[nodiscard]] OutgoingPlaces outgoing_places(std::span<const SegmentSize> segments, int sender,
                                             std::int64_t element_bytes);

/// Of `Communicator::reduce_shared`; the same on all ranks.
struct SharedSum {
  at::ScalarType sent = at::kFloat;
  double divisor = 1.0;

  bool operator==(const SharedSum&) const = default;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int size() const = 0;

  /// Copies each segment from its root to all ranks, as one grouped call on the current stream.
  [[nodiscard]] virtual Pending broadcast(std::span<const OwnerSegment> segments) = 0;

  /// Sums each segment into its root's buffer, as one grouped call on the current stream.  On the other ranks the
  /// buffer's content is lost.
  [[nodiscard]] virtual Pending reduce(std::span<const OwnerSegment> segments) = 0;

  /// Set-up; collective; blocks the host.  Memory of `bytes` zero bytes on this rank's device that all ranks can read,
  /// 1-D of bytes, for as long as this tensor or the communicator lives; undefined, on every rank alike, from a
  /// communicator that has no use for it, and when it has been asked for the same purpose before.
  [[nodiscard]] virtual at::Tensor share(Sharing purpose, std::int64_t bytes);
  /// Whether `reduce_shared` can send in one dtype and sum in another.
  [[nodiscard]] virtual bool sums_shared(at::ScalarType sent, at::ScalarType sum) const;
  /// `reduce` out of shared memory.  This rank's part of a segment of another root lies in its shared memory at
  /// `outgoing_places`, in dtype `how.sent`, and the segment's buffer is a view of it; on the root the buffer has the
  /// dtype of the sum, holds the root's own part, and takes (v_0 + v_1 + ...) / `how.divisor`, added in rank order in
  /// fp32 or wider.  The shared memory may be written again when the Pending has been waited for.
  [[nodiscard]] virtual Pending reduce_shared(std::span<const OwnerSegment> segments, const SharedSum& how);
  /// Throws if an earlier call has failed, naming the peer.  Cheap; for places where nothing else would tell.
  virtual void check() const {}

  /// Copies every rank's segment to its root, as one grouped call on the current stream.  `received[i]`: [size, numel]
  /// on the root of segments[i], undefined elsewhere; borrowed like the segments.
  [[nodiscard]] virtual Pending gather(std::span<const OwnerSegment> segments,
                                       const std::vector<at::Tensor>& received) = 0;

  /// Copies parts[i][r] from the root of segments[i] to the segment of rank r, as one grouped call on the current
  /// stream.  `parts[i]`: on that root one contiguous 1-D tensor a rank, each with the segment's numel and dtype (they
  /// may be the same tensor); empty elsewhere.  Borrowed like the segments.
  [[nodiscard]] virtual Pending scatter(std::span<const OwnerSegment> segments,
                                        const std::vector<std::vector<at::Tensor>>& parts) = 0;

  /// Every rank's text, by rank.  Blocks the host; for set-up only.
  [[nodiscard]] virtual std::vector<std::string> exchange(const std::string& text) = 0;

  /// Like `exchange`, but apart from the order of the other calls: some ranks may never come, and then the others get
  /// an error after the group's time limit.  Blocks the host; for rare moments.
  [[nodiscard]] virtual std::vector<std::string> meet(const std::string& text) = 0;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace dmuon
