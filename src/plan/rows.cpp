#include <algorithm>
#include <stdexcept>

#include "dmuon/plan.h"

namespace dmuon::plan {
namespace {

Matrix part_of(const Matrix& whole, RowRange rows, Slot owner) {
  Matrix part = whole;
  part.name.append("[").append(std::to_string(rows.begin)).append(":").append(std::to_string(rows.end)).append("]");
  part.rows = rows.count();
  part.part = Part{.first = rows.begin, .total = whole.rows, .owner = owner};
  return part;
}

}  // namespace

RowRange row_range(std::int64_t rows, int parts, int part) {
  if (rows < 0 || parts < 1 || part < 0 || part >= parts) {
    throw std::invalid_argument("[dmuon.plan] no part " + std::to_string(part) + " of " + std::to_string(rows) +
                                " rows over " + std::to_string(parts) + " ranks");
  }
  const std::int64_t size = (rows + parts - 1) / parts;
  return {std::min(rows, size * part), std::min(rows, size * (part + 1))};
}

std::vector<Matrix> cut_by_rows(const Matrix& whole, MeshShape mesh, std::int64_t least_elements) {
  const bool large = whole.numel() >= least_elements && whole.rows >= mesh.slots();
  if (whole.kind == Kind::kMatrix || !large || mesh.slots() == 1) return {whole};
  std::vector<Matrix> parts;
  for (int replicate = 0; replicate < mesh.replicate; ++replicate) {
    const RowRange outer = row_range(whole.rows, mesh.replicate, replicate);
    for (int shard = 0; shard < mesh.shard; ++shard) {
      const RowRange inner = row_range(outer.count(), mesh.shard, shard);
      const RowRange rows{outer.begin + inner.begin, outer.begin + inner.end};
      if (rows.count() > 0) parts.push_back(part_of(whole, rows, {.shard = shard, .replicate = replicate}));
    }
  }
  return parts;
}

}  // namespace dmuon::plan
