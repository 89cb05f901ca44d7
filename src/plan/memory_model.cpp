#include "dmuon/memory_model.h"

#include <algorithm>
#include <set>
#include <vector>

namespace dmuon::plan {
namespace {

/// Elements of one group as one rank sees them.
struct GroupSizes {
  std::int64_t padded = 0;
  std::int64_t payload = 0;
  std::int64_t own_padded = 0;
  std::int64_t own_payload = 0;
  std::int64_t own_moments = 0;    // of Muon one an element, of AdamW two
  std::int64_t column_padded = 0;  // own and column peers' segments: sent from the published copy
  std::int64_t gathered = 0;       // the gather buffer
};

GroupSizes measure(const GroupLayout& group, Slot rank) {
  GroupSizes sizes{
      .padded = group.numel(), .payload = group.payload(), .gathered = gather_places(group, rank.shard).numel};
  for (const Segment& segment : group.segments) {
    if (segment.owner.shard == rank.shard) sizes.column_padded += segment.numel;
    if (segment.owner != rank) continue;
    sizes.own_padded += segment.numel;
    sizes.own_payload += segment.payload;
    sizes.own_moments += segment.payload + segment.elementwise;
  }
  return sizes;
}

/// The runtime's schedule, walked group by group.  All results are bytes.
class Schedule {
 public:
  Schedule(std::span<const GroupLayout> groups, Slot rank, const MemoryOptions& options) : options_(options) {
    for (const GroupLayout& group : groups) sizes_.push_back(measure(group, rank));
  }

  [[nodiscard]] MemoryEstimate run() const {
    MemoryEstimate estimate{.outgoing = options_.outgoing};
    for (const GroupSizes& group : sizes_) {
      estimate.masters += group.own_padded * options_.master_bytes;
      estimate.momentum += group.own_moments * options_.master_bytes;
      estimate.published += published(group);
      estimate.gradients += gradient(group);
    }
    estimate.forward_peak = estimate.resident() + forward_gathers();
    estimate.backward_peak = estimate.resident() + backward_transients();
    return estimate;
  }

 private:
  [[nodiscard]] int last() const { return static_cast<int>(sizes_.size()) - 1; }

  /// Without a published copy the owner sends its master; column peers still hold one.
  [[nodiscard]] std::int64_t published(const GroupSizes& group) const {
    const std::int64_t own = options_.published_copy ? 0 : group.own_padded;
    return (group.column_padded - own) * options_.compute_bytes;
  }

  /// The owner's reduced `.grad`.
  [[nodiscard]] std::int64_t gradient(const GroupSizes& group) const {
    return (options_.grad_aliases_reduce ? group.own_padded : group.own_payload) * options_.master_bytes;
  }

  [[nodiscard]] std::int64_t gather(int index) const { return sizes_[index].gathered * options_.compute_bytes; }

  /// Group `index`, if there is one, and those around it, which are in use as long as it is.
  [[nodiscard]] std::set<int> in_use_with(int index) const {
    std::set<int> groups;
    if (index < 0 || index > last()) return groups;
    groups.insert(index);
    for (int i = 0; i < index && !options_.last_inside.empty(); ++i) {
      if (options_.last_inside[i] >= index) groups.insert(i);
    }
    return groups;
  }

  /// Gather buffers while group `index` is the last one in use and its neighbour is prefetched.
  [[nodiscard]] std::int64_t live_gathers(int index, int neighbour) const {
    std::set<int> groups = in_use_with(index);
    if (neighbour >= 0 && neighbour <= last()) groups.insert(neighbour);
    if (!options_.reshard_after_forward) {
      groups.clear();
      for (int i = 0; i <= index; ++i) groups.insert(i);
    }
    std::int64_t sum = 0;
    for (const int i : groups) sum += gather(i);
    return sum;
  }

  [[nodiscard]] std::int64_t forward_gathers() const {
    std::int64_t peak = 0;
    for (int i = 0; i <= last(); ++i) peak = std::max(peak, live_gathers(i, i + 1));
    return peak;
  }

  /// Of those in use: groups around this one may have all of theirs, from what came after it in forward.
  [[nodiscard]] std::int64_t unsharded_gradients(int index) const {
    std::int64_t sum = 0;
    for (const int i : in_use_with(index)) sum += sizes_[i].payload * options_.compute_bytes;
    return sum;
  }

  /// While a group's stage 1 is under way.
  [[nodiscard]] std::int64_t reduce_buffers(int index) const {
    const GroupSizes& group = sizes_[index];
    if (options_.outgoing == 0) return group.padded * options_.reduce_bytes;
    return group.column_padded * (options_.reduce_bytes + options_.received_bytes);
  }

  /// What is left of a group's reduction while the next group is reduced.
  [[nodiscard]] std::int64_t in_flight(int index) const {
    return options_.replicated ? sizes_[index].column_padded * options_.reduce_bytes : gradient(sizes_[index]);
  }

  /// Groups run from last to first.  Two moments of each can be the worst: when its reduce buffers have been filled and
  /// its unsharded gradients still live, and when its reduction finishes while the next group (index - 1) is in work.
  [[nodiscard]] std::int64_t backward_transients() const {
    std::int64_t peak = 0;
    std::int64_t gradients =
        0;  // of the groups reduced before: `.grad`, or the column's sums in flight across replicas
    for (int i = last(); i >= 0; --i) {
      const std::int64_t reduce = reduce_buffers(i);
      const std::int64_t cast = options_.grad_aliases_reduce ? 0 : gradient(sizes_[i]);
      const std::int64_t filled = live_gathers(i, i - 1) + unsharded_gradients(i) + reduce;
      const std::int64_t finishing = live_gathers(i - 1, i - 2) + unsharded_gradients(i - 1) + reduce + cast;
      peak = std::max({peak, gradients + filled, gradients + finishing});
      gradients += in_flight(i);
      if (i < last()) gradients += gradient(sizes_[i + 1]) - in_flight(i + 1);
    }
    return peak;
  }

  const MemoryOptions& options_;
  std::vector<GroupSizes> sizes_;  // [groups]
};

}  // namespace

MemoryEstimate predict_memory(std::span<const GroupLayout> groups, Slot rank, const MemoryOptions& options) {
  return Schedule(groups, rank, options).run();
}

}  // namespace dmuon::plan
