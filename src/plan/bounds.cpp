#include "plan/bounds.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

namespace dmuon::plan {
namespace {

std::vector<double> descending_seconds(std::span<const Unit> units) {
  std::vector<double> seconds;
  seconds.reserve(units.size());
  for (const Unit& unit : units) seconds.push_back(unit.seconds);
  std::sort(seconds.begin(), seconds.end(), std::greater<>());
  return seconds;
}

std::string two_decimals(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f", value);
  return text;
}

std::string counted(std::size_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

/// The obstacle of an LPT plan that misses the target.
std::string obstacle(const Plan& plan, std::span<const Unit> units, const PlanOptions& options) {
  const int slots = plan.mesh.slots();
  const double mean = mean_load(units, slots);
  const Unit& largest =
      *std::max_element(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.seconds < b.seconds; });
  if (slots > static_cast<double>(units.size()) * options.target_imbalance) {
    return counted(units.size(), "unit") + " for " + counted(slots, "slot") + ": at most " +
           counted(units.size(), "slot") + " can work";
  }
  if (largest.seconds > mean * options.target_imbalance) {
    return "the largest unit alone (" + unit_text(largest, plan.matrices) + ") takes " +
           two_decimals(largest.seconds / mean) + "x the mean";
  }
  const std::string text =
      options.max_bytes_per_slot ? "max_bytes_per_slot limits the choice, or " : "no better assignment was found: ";
  return text + counted(units.size(), "unit") + " for " + counted(slots, "slot") +
         " do not fit together evenly (lower bound " + two_decimals(plan.lower_bound_seconds / mean) + "x the mean)";
}

}  // namespace

double mean_load(std::span<const Unit> units, int slots) {
  double total = 0.0;
  for (const Unit& unit : units) total += unit.seconds;
  return total / slots;
}

double lower_bound(std::span<const Unit> units, int slots) {
  const std::vector<double> seconds = descending_seconds(units);
  std::vector<double> sums(seconds.size() + 1, 0.0);  // of the first i
  for (std::size_t i = 0; i < seconds.size(); ++i) sums[i + 1] = sums[i] + seconds[i];

  double bound = sums.back() / slots;
  for (std::size_t k = 0; k * slots < seconds.size(); ++k) {
    const std::size_t taken = k * slots + 1;  // k = 0: the largest unit
    bound = std::max(bound, sums[taken] - sums[taken - (k + 1)]);
  }
  return bound;
}

std::string explain_balance(const Plan& plan, std::span<const Unit> units, const PlanOptions& options) {
  if (units.empty() || plan.imbalance() <= options.target_imbalance) return "";
  if (options.strategy != OwnerStrategy::kLpt) return "this owner strategy does not balance; 'lpt' does";
  std::string text = obstacle(plan, units, options);
  if (units.size() < plan.matrices.size()) text += "; a lower small_matrix_threshold makes more units";
  return text;
}

}  // namespace dmuon::plan
