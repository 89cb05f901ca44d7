#include "dmuon/layout.h"

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace dmuon::plan {
namespace {

std::int64_t align_up(std::int64_t elements) {
  return (elements + kAlignElements - 1) / kAlignElements * kAlignElements;
}

void check_member(const Plan& plan, int member, std::vector<bool>& seen) {
  const int count = static_cast<int>(plan.matrices.size());
  if (member < 0 || member >= count) {
    throw std::invalid_argument("[dmuon.plan] group member " + std::to_string(member) +
                                " is out of range; the plan has " + std::to_string(count) +
                                " matrices. Pass indices into Plan::matrices.");
  }
  if (seen[member]) {
    throw std::invalid_argument("[dmuon.plan] matrix '" + plan.matrices[member].name +
                                "' appears twice in a group. Pass every member once.");
  }
  seen[member] = true;
}

void append(Segment& segment, PackedMatrix packed) {
  packed.offset = segment.numel;
  segment.matrices.push_back(packed);
  segment.numel += align_up(packed.numel);
  segment.payload += packed.numel;
  if (packed.kind == Kind::kElementwise) segment.elementwise += packed.numel;
}

}  // namespace

std::int64_t GroupLayout::numel() const {
  std::int64_t sum = 0;
  for (const Segment& segment : segments) sum += segment.numel;
  return sum;
}

std::int64_t GroupLayout::payload() const {
  std::int64_t sum = 0;
  for (const Segment& segment : segments) sum += segment.payload;
  return sum;
}

GroupLayout make_group_layout(const Plan& plan, std::span<const int> members) {
  std::vector<bool> seen(plan.matrices.size(), false);
  std::map<Slot, Segment> by_owner;  // ordered by shard, then by replicate
  for (const int member : members) {
    check_member(plan, member, seen);
    const Slot owner = plan.owners[member];
    Segment& segment = by_owner[owner];
    segment.owner = owner;
    append(segment, {.matrix = member, .numel = plan.matrices[member].numel(), .kind = plan.matrices[member].kind});
  }
  GroupLayout layout;
  layout.segments.reserve(by_owner.size());
  for (auto& [slot, segment] : by_owner) layout.segments.push_back(std::move(segment));
  return layout;
}

GroupLayout make_sub_layout(const GroupLayout& layout, const std::vector<bool>& keep) {
  GroupLayout result;
  for (const Segment& segment : layout.segments) {
    Segment kept;
    kept.owner = segment.owner;
    for (const PackedMatrix& packed : segment.matrices) {
      if (keep.at(static_cast<size_t>(packed.matrix))) append(kept, packed);
    }
    if (!kept.matrices.empty()) result.segments.push_back(std::move(kept));
  }
  return result;
}

}  // namespace dmuon::plan
