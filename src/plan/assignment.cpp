#include <algorithm>
#include <stdexcept>
#include <utility>

#include "plan/bounds.h"
#include "plan/placement.h"
#include "plan/units.h"

namespace dmuon::plan {
namespace {

/// A plan this near to the lower bound is at it.
constexpr double kRounding = 1 + 1e-9;

void set_owners(Plan& plan, const std::vector<Unit>& units, const Placement& placement) {
  plan.owners.resize(plan.matrices.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    const Slot slot{.shard = placement[i] % plan.mesh.shard, .replicate = placement[i] / plan.mesh.shard};
    for (const int matrix : units[i].matrices) plan.owners[matrix] = slot;
  }
}

void sum_loads(Plan& plan, const PlanOptions& options) {
  plan.loads.assign(plan.mesh.slots(), SlotLoad{});
  for (std::size_t i = 0; i < plan.matrices.size(); ++i) {
    SlotLoad& load = plan.loads[plan.slot_index(plan.owners[i])];
    load.cost_seconds += plan.costs[i];
    load.elements += plan.matrices[i].numel();
    load.bytes += options.state_bytes(plan.matrices[i]);
    ++load.matrices;
  }
}

double max_load(const Plan& plan) {
  double result = 0.0;
  for (const SlotLoad& load : plan.loads) result = std::max(result, load.cost_seconds);
  return result;
}

}  // namespace

OwnerStrategy parse_owner_strategy(const std::string& name) {
  if (name == "lpt") return OwnerStrategy::kLpt;
  if (name == "round_robin") return OwnerStrategy::kRoundRobin;
  if (name == "rank0") return OwnerStrategy::kRank0;
  throw std::invalid_argument("[dmuon.plan] owner_strategy is '" + name +
                              "'; expected 'lpt', 'round_robin' or 'rank0'. Pass one of these.");
}

Plan compute_balanced_assignment(std::vector<Matrix> matrices, MeshShape mesh, const PlanOptions& options) {
  check_inputs(matrices, mesh, options);

  Plan plan;
  plan.mesh = mesh;
  plan.matrices = std::move(matrices);
  plan.costs = matrix_costs(plan.matrices, options.cost);
  const std::vector<Unit> units = make_units(plan.matrices, plan.costs, options);
  const double bound = lower_bound(units, mesh.slots());
  const Goal goal{
      .mesh = mesh,
      .cap = slot_cap(options),
      .max_over_mean = std::max(options.target_imbalance, kRounding * bound / mean_load(units, mesh.slots()))};

  set_owners(plan, units, place_units(units, plan.matrices, options.strategy, goal));
  sum_loads(plan, options);
  plan.lower_bound_seconds = std::min(bound, max_load(plan));  // the sums round differently
  plan.balance_note = explain_balance(plan, units, options);
  return plan;
}

}  // namespace dmuon::plan
