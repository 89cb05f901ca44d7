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

/// What the parts of parameters that are cut by rows put on each slot, whatever the placement.
struct Fixed {
  double least_seconds = 0.0;
  std::int64_t most_bytes = 0;
};

Fixed fixed_loads(const Plan& plan, const PlanOptions& options) {
  std::vector<SlotLoad> loads(plan.mesh.slots());
  for (std::size_t i = 0; i < plan.matrices.size(); ++i) {
    if (!plan.matrices[i].part) continue;
    SlotLoad& load = loads[plan.slot_index(plan.matrices[i].part->owner)];
    load.cost_seconds += plan.costs[i];
    load.bytes += options.state_bytes(plan.matrices[i]);
  }
  Fixed fixed{.least_seconds = loads.front().cost_seconds};
  for (const SlotLoad& load : loads) {
    fixed.least_seconds = std::min(fixed.least_seconds, load.cost_seconds);
    fixed.most_bytes = std::max(fixed.most_bytes, load.bytes);
  }
  return fixed;
}

void set_owners(Plan& plan, const std::vector<Unit>& units, const Placement& placement) {
  plan.owners.resize(plan.matrices.size());
  for (std::size_t i = 0; i < plan.matrices.size(); ++i) {
    if (plan.matrices[i].part) plan.owners[i] = plan.matrices[i].part->owner;
  }
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
  const Fixed fixed = fixed_loads(plan, options);
  PlanOptions left = options;  // for those that can still choose
  if (left.max_bytes_per_slot) *left.max_bytes_per_slot -= fixed.most_bytes;
  const std::vector<Unit> units = make_units(plan.matrices, plan.costs, left);
  const double bound = lower_bound(units, mesh.slots());
  const Goal goal{
      .mesh = mesh,
      .cap = slot_cap(left),
      .max_over_mean = std::max(options.target_imbalance, kRounding * bound / mean_load(units, mesh.slots()))};

  set_owners(plan, units, place_units(units, plan.matrices, options.strategy, goal));
  sum_loads(plan, options);
  plan.lower_bound_seconds = std::min(bound + fixed.least_seconds, max_load(plan));  // the sums round differently
  plan.balance_note = explain_balance(plan, units, options);
  return plan;
}

}  // namespace dmuon::plan
