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

// Parts of one parameter are consecutive in the plan.
PartOfWhole place_part(const Plan& plan, int member) {
  int first = member;
  while (plan.matrices[first].part->first != 0) --first;
  const Matrix& matrix = plan.matrices[member];
  return {
      .parameter = first, .start = matrix.part->first * matrix.cols, .whole_numel = matrix.part->total * matrix.cols};
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
  constexpr int kPacked = -1;
  std::map<std::pair<Slot, int>, Segment> by_owner;  // by shard, then by replicate; then a part's index, or kPacked
  for (const int member : members) {
    check_member(plan, member, seen);
    const Slot owner = plan.owners[member];
    const bool part = plan.matrices[member].part.has_value();
    Segment& segment = by_owner[{owner, part ? member : kPacked}];
    segment.owner = owner;
    if (part) segment.part = place_part(plan, member);
    append(segment, {.matrix = member, .numel = plan.matrices[member].numel(), .kind = plan.matrices[member].kind});
  }
  GroupLayout layout;
  layout.segments.reserve(by_owner.size());
  for (auto& [key, segment] : by_owner) layout.segments.push_back(std::move(segment));
  return layout;
}

GatherPlaces gather_places(const GroupLayout& layout, int shard) {
  GatherPlaces places;
  std::map<int, std::int64_t> wholes;  // by parameter
  for (const Segment& segment : layout.segments) {
    std::int64_t offset = places.numel;
    if (segment.part) {
      const auto [whole, added] = wholes.try_emplace(segment.part->parameter, places.numel);
      if (added) places.numel += align_up(segment.part->whole_numel);
      offset = whole->second + segment.part->start;
    } else if (segment.owner.shard == shard) {
      offset = -1;
    } else {
      places.numel += segment.numel;
    }
    places.offsets.push_back(offset);
  }
  return places;
}

GroupLayout make_sub_layout(const GroupLayout& layout, const std::vector<bool>& keep) {
  GroupLayout result;
  for (const Segment& segment : layout.segments) {
    Segment kept;
    kept.owner = segment.owner;
    kept.part = segment.part;
    for (const PackedMatrix& packed : segment.matrices) {
      if (keep.at(static_cast<size_t>(packed.matrix))) append(kept, packed);
    }
    if (!kept.matrices.empty()) result.segments.push_back(std::move(kept));
  }
  return result;
}

}  // namespace dmuon::plan
