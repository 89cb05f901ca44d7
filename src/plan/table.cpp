#include <algorithm>
#include <cstdio>
#include <numeric>

#include "dmuon/plan.h"

namespace dmuon::plan {
namespace {

constexpr std::size_t kMaxRows = 32;  ///< more slots than this are summed up
constexpr std::size_t kEndRows = 4;   ///< then this many rows from each end are shown

std::string row(const Plan& plan, int slot, double total_seconds) {
  const SlotLoad& load = plan.loads[slot];
  char text[160];
  std::snprintf(text, sizeof(text), "(%4d, %4d)  %9d  %12.1f  %10.3f  %6.2f%%\n", slot % plan.mesh.shard,
                slot / plan.mesh.shard, load.matrices, static_cast<double>(load.bytes) / (1024.0 * 1024.0),
                load.cost_seconds * 1e3, total_seconds > 0 ? 100.0 * load.cost_seconds / total_seconds : 0.0);
  return text;
}

std::string hidden_rows(const Plan& plan, const std::vector<int>& order) {
  const int most = order[kEndRows];
  const int least = order[order.size() - kEndRows - 1];
  char text[160];
  std::snprintf(text, sizeof(text), "... %zu more slots, %.3f to %.3f ms ...\n", order.size() - 2 * kEndRows,
                plan.loads[most].cost_seconds * 1e3, plan.loads[least].cost_seconds * 1e3);
  return text;
}

std::vector<int> most_loaded_first(const Plan& plan) {
  std::vector<int> order(plan.loads.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return plan.loads[a].cost_seconds > plan.loads[b].cost_seconds; });
  return order;
}

std::string summary(const Plan& plan) {
  double largest = 0.0;
  for (const SlotLoad& load : plan.loads) largest = std::max(largest, load.cost_seconds);
  char text[160];
  std::snprintf(text, sizeof(text), "max/mean %.3f; max %.3f ms; lower bound %.3f ms\n", plan.imbalance(),
                largest * 1e3, plan.lower_bound_seconds * 1e3);
  return plan.balance_note.empty() ? text : text + ("note: " + plan.balance_note + "\n");
}

}  // namespace

std::string Plan::table() const {
  double total = 0.0;
  for (const SlotLoad& load : loads) total += load.cost_seconds;

  std::string text = "     owner    matrices           MiB          ms    share\n";
  if (loads.size() <= kMaxRows) {
    for (std::size_t slot = 0; slot < loads.size(); ++slot) text += row(*this, static_cast<int>(slot), total);
    return text + summary(*this);
  }
  const std::vector<int> order = most_loaded_first(*this);
  for (std::size_t i = 0; i < kEndRows; ++i) text += row(*this, order[i], total);
  text += hidden_rows(*this, order);
  for (std::size_t i = order.size() - kEndRows; i < order.size(); ++i) text += row(*this, order[i], total);
  return text + summary(*this);
}

}  // namespace dmuon::plan
