// How good a plan can be, and why it is not better.
#pragma once

#include <span>
#include <string>

#include "plan/units.h"

namespace dmuon::plan {

/// Seconds per slot on average.
[[nodiscard]] double mean_load(std::span<const Unit> units, int slots);

/// Seconds that the most loaded slot needs under every assignment of these units: the largest of the mean load, the
/// largest unit, and the pigeonhole bounds (of the k * slots + 1 largest units some slot gets k + 1).
[[nodiscard]] double lower_bound(std::span<const Unit> units, int slots);

/// One sentence on what keeps max/mean above options.target_imbalance; "" when it is not above.
[[nodiscard]] std::string explain_balance(const Plan& plan, std::span<const Unit> units, const PlanOptions& options);

}  // namespace dmuon::plan
