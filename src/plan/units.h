// Allocation units: what the planner places.  A unit is one matrix, or the small matrices of one layer together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/plan.h"

namespace dmuon::plan {

/// Layer of a unit that shares its layer with no other unit.
inline constexpr int kNoLayer = -1;

struct Unit {
  std::vector<int> matrices;  ///< indices into the input, ascending
  int layer = kNoLayer;       ///< equal for units of one layer
  double seconds = 0.0;
  std::int64_t ticks = 0;  ///< seconds as an integer share of the total: sums are exact, so equal loads compare equal
  std::int64_t bytes = 0;
};

/// Throws std::invalid_argument for every input that compute_balanced_assignment refuses, the cap excepted.
void check_inputs(const std::vector<Matrix>& matrices, MeshShape mesh, const PlanOptions& options);

/// options.max_bytes_per_slot, or the largest number without a cap.
[[nodiscard]] std::int64_t slot_cap(const PlanOptions& options);

/// Predicted seconds of every matrix.
[[nodiscard]] std::vector<double> matrix_costs(const std::vector<Matrix>& matrices, const CostModel& cost);

/// Units in the order of their first matrix; none has a part of a parameter that is cut by rows.  A merged unit that
/// would outgrow max_bytes_per_slot is continued in a new one.  `costs`: [matrices] seconds.
[[nodiscard]] std::vector<Unit> make_units(const std::vector<Matrix>& matrices, const std::vector<double>& costs,
                                           const PlanOptions& options);

/// "'name'", with the number of other matrices in the unit if there are any.
[[nodiscard]] std::string unit_text(const Unit& unit, const std::vector<Matrix>& matrices);

}  // namespace dmuon::plan
