// Moving segments between the ranks of one group (a mesh's shard or replicate axis).
//
// Called by the runtime only.  Every rank of the group must issue the same calls in the same order; the runtime's
// canonical order sees to that.  Roots are group-relative ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dmuon/pending.h"

namespace dmuon {

/// `buffer`: contiguous 1-D, same numel and dtype on every rank; borrowed until the returned Pending has been waited
/// for.
struct OwnerSegment {
  int root = 0;
  at::Tensor buffer;
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
