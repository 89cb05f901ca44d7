#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "plan/units.h"

namespace dmuon::plan {
namespace {

constexpr std::int64_t kMaxInt64 = std::numeric_limits<std::int64_t>::max();

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument("[dmuon.plan] " + message); }

void require_positive(double value, const char* name) {
  if (std::isfinite(value) && value > 0) return;
  fail(std::string(name) + " is " + std::to_string(value) + "; expected a positive number. Correct the option.");
}

void require_not_negative(double value, const char* name) {
  if (std::isfinite(value) && value >= 0) return;
  fail(std::string(name) + " is " + std::to_string(value) + "; expected zero or more. Correct the option.");
}

void check_mesh(MeshShape mesh) {
  if (mesh.shard < 1 || mesh.replicate < 1) {
    fail("the mesh is shard = " + std::to_string(mesh.shard) + ", replicate = " + std::to_string(mesh.replicate) +
         "; both must be at least 1. Use replicate = 1 without a replicate mesh.");
  }
  if (mesh.shard > std::numeric_limits<int>::max() / mesh.replicate) {
    fail("the mesh is shard = " + std::to_string(mesh.shard) + ", replicate = " + std::to_string(mesh.replicate) +
         "; that is more slots than an int counts. Pass the sizes of the mesh axes.");
  }
}

void check_options(const PlanOptions& options) {
  const CostModel& cost = options.cost;
  require_positive(cost.flops_per_second, "cost.flops_per_second");
  require_positive(cost.bytes_per_second, "cost.bytes_per_second");
  require_positive(cost.ns_steps, "cost.ns_steps");
  require_not_negative(cost.seconds_per_matrix, "cost.seconds_per_matrix");
  require_not_negative(cost.elementwise_bytes, "cost.elementwise_bytes");
  require_positive(cost.adamw_bytes, "cost.adamw_bytes");
  require_not_negative(static_cast<double>(options.small_matrix_threshold), "small_matrix_threshold");
  require_positive(static_cast<double>(options.state_bytes_per_element), "state_bytes_per_element");
  require_positive(static_cast<double>(options.elementwise_state_bytes), "elementwise_state_bytes");
  if (options.max_bytes_per_slot)
    require_positive(static_cast<double>(*options.max_bytes_per_slot), "max_bytes_per_slot");
  if (!(options.target_imbalance >= 1.0)) {
    fail("target_imbalance is " + std::to_string(options.target_imbalance) +
         "; max/mean is never below 1. Pass 1.0 or more.");
  }
}

void check_shape(const Matrix& matrix) {
  const auto text = [&] {
    return "matrix '" + matrix.name + "' is [" + std::to_string(matrix.rows) + ", " + std::to_string(matrix.cols) +
           "]; ";
  };
  if (matrix.rows < 1 || matrix.cols < 1) fail(text() + "rows and cols must be at least 1. Leave it to FSDP2.");
  if (matrix.rows > kMaxInt64 / matrix.cols) fail(text() + "its size overflows 64 bits. Check the shape.");
}

void check_owner(const Matrix& matrix, MeshShape mesh) {
  const Slot owner = matrix.part->owner;
  if (owner.shard < 0 || owner.shard >= mesh.shard || owner.replicate < 0 || owner.replicate >= mesh.replicate) {
    fail("'" + matrix.name + "' belongs to shard " + std::to_string(owner.shard) + ", replicate " +
         std::to_string(owner.replicate) + ", which the mesh lacks. Cut by rows for this mesh.");
  }
}

/// The parts of a parameter follow each other from its first row to its last.
void check_parts(const std::vector<Matrix>& matrices, MeshShape mesh) {
  std::int64_t next = 0;  // the row that is missing of the parameter that has begun; 0: none has
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const Matrix& matrix = matrices[i];
    if ((matrix.part ? matrix.part->first : 0) != next) {
      fail("at '" + matrix.name + "' a part that begins at row " + std::to_string(next) +
           " is missing. Pass all parts of a parameter one after the other, as cut_by_rows gives them.");
    }
    if (!matrix.part) continue;
    check_owner(matrix, mesh);
    next = matrix.part->first + matrix.rows;
    if (next == matrix.part->total) next = 0;
  }
  if (next != 0) fail("after '" + matrices.back().name + "' the rest of its parameter is missing. Pass all parts.");
}

/// By sorted hashes: a name is compared only with a name of the same hash.
void check_unique_names(const std::vector<Matrix>& matrices) {
  std::vector<std::pair<std::size_t, std::string_view>> names;
  names.reserve(matrices.size());
  for (const Matrix& matrix : matrices) names.emplace_back(std::hash<std::string_view>()(matrix.name), matrix.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice == names.end()) return;
  fail("matrix '" + std::string(twice->second) +
       "' appears twice. Names must be unique: pass a shared parameter once.");
}

}  // namespace

void check_inputs(const std::vector<Matrix>& matrices, MeshShape mesh, const PlanOptions& options) {
  check_mesh(mesh);
  check_options(options);
  if (matrices.empty()) fail("there are no matrices to assign. Check that the predicate selects any parameter.");

  std::int64_t elements_left = kMaxInt64 / std::max(options.state_bytes_per_element, options.elementwise_state_bytes);
  for (const Matrix& matrix : matrices) {
    check_shape(matrix);
    if (matrix.numel() > elements_left) {
      fail("at matrix '" + matrix.name + "' the total size overflows 64 bits. Check the shapes.");
    }
    elements_left -= matrix.numel();
  }
  check_unique_names(matrices);
  check_parts(matrices, mesh);
}

}  // namespace dmuon::plan
