// Packed layouts: where each matrix of a group lives inside its owner's segment.
//
// Made once per group from a Plan; the runtime allocates buffers by it, the memory model sums it up.  std only.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "dmuon/plan.h"

namespace dmuon::plan {

/// Matrix starts are aligned to this many elements: 16 bytes for 2-byte dtypes, and more for wider ones, so that one
/// layout serves the compute, the reduce and the master buffers.
inline constexpr std::int64_t kAlignElements = 8;

struct PackedMatrix {
  int matrix = 0;           ///< index into Plan::matrices
  std::int64_t offset = 0;  ///< elements from the start of the segment
  std::int64_t numel = 0;
  Kind kind = Kind::kMatrix;
};

/// Where a part of a parameter that is cut by rows belongs in the whole.
struct PartOfWhole {
  int parameter = 0;             ///< index into Plan::matrices of its first part: the same for all parts of one
  std::int64_t start = 0;        ///< elements of the whole before this part
  std::int64_t whole_numel = 0;  ///< elements of the whole
};

/// A contiguous run of one owner's matrices inside a group, or one part of a parameter that is cut by rows.
struct Segment {
  Slot owner;
  std::vector<PackedMatrix> matrices;
  std::int64_t numel = 0;        ///< elements including alignment
  std::int64_t payload = 0;      ///< elements without alignment
  std::int64_t elementwise = 0;  ///< of the payload, elements of elementwise parameters
  std::optional<PartOfWhole> part{};
};

/// Segments of one group, ordered by owner (shard, then replicate: a column is contiguous), parts after the rest: the
/// same on every rank.
struct GroupLayout {
  std::vector<Segment> segments;

  [[nodiscard]] std::int64_t numel() const;
  [[nodiscard]] std::int64_t payload() const;
};

/// `members`: indices into plan.matrices, in module order; the order inside a segment follows it.
/// Throws std::invalid_argument if an index is out of range or appears twice.
[[nodiscard]] GroupLayout make_group_layout(const Plan& plan, std::span<const int> members);

/// Where a gather puts things together.
struct GatherPlaces {
  std::vector<std::int64_t> offsets;  ///< [segments] elements; -1 for what shard coordinate `shard` sends itself
  std::int64_t numel = 0;
};

/// The gather buffer of shard coordinate `shard`: the segments of all others as they are; every parameter that is cut
/// by rows in one piece, its own rows too.
[[nodiscard]] GatherPlaces gather_places(const GroupLayout& layout, int shard);

/// The same owners and order, with only the matrices for which `keep[PackedMatrix::matrix]` is true, packed anew;
/// owners left without a matrix have no segment.
[[nodiscard]] GroupLayout make_sub_layout(const GroupLayout& layout, const std::vector<bool>& keep);

}  // namespace dmuon::plan
