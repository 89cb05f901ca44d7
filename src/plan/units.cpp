#include "plan/units.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string_view>
#include <unordered_map>

namespace dmuon::plan {
namespace {

/// Ticks that all units have together: fine enough for any list, and far from overflow.
constexpr double kTotalTicks = 1e15;

/// Dense numbers for the layer keys, in order of appearance; an empty key gets kNoLayer.
std::vector<int> number_layers(const std::vector<Matrix>& matrices) {
  std::unordered_map<std::string_view, int> numbers;
  std::vector<int> layers(matrices.size(), kNoLayer);
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    if (matrices[i].layer.empty()) continue;
    layers[i] = numbers.try_emplace(matrices[i].layer, static_cast<int>(numbers.size())).first->second;
  }
  return layers;
}

int layer_count(const std::vector<int>& layers) { return 1 + *std::max_element(layers.begin(), layers.end()); }

void add_matrix(Unit& unit, int index, double seconds, std::int64_t bytes) {
  unit.matrices.push_back(index);
  unit.seconds += seconds;
  unit.bytes += bytes;
}

void fill_ticks(std::vector<Unit>& units) {
  const double total =
      std::accumulate(units.begin(), units.end(), 0.0, [](double sum, const Unit& unit) { return sum + unit.seconds; });
  for (Unit& unit : units) {
    unit.ticks = std::max<std::int64_t>(1, std::llround(unit.seconds / total * kTotalTicks));
  }
}

/// A layer with one unit has nothing to spread.
void forget_lone_layers(std::vector<Unit>& units, int layers) {
  std::vector<int> count(layers, 0);
  for (const Unit& unit : units) {
    if (unit.layer != kNoLayer) ++count[unit.layer];
  }
  for (Unit& unit : units) {
    if (unit.layer != kNoLayer && count[unit.layer] == 1) unit.layer = kNoLayer;
  }
}

}  // namespace

std::int64_t slot_cap(const PlanOptions& options) {
  return options.max_bytes_per_slot.value_or(std::numeric_limits<std::int64_t>::max());
}

std::vector<double> matrix_costs(const std::vector<Matrix>& matrices, const CostModel& cost) {
  std::vector<double> costs;
  costs.reserve(matrices.size());
  for (const Matrix& matrix : matrices) costs.push_back(cost.seconds(matrix));
  return costs;
}

std::vector<Unit> make_units(const std::vector<Matrix>& matrices, const std::vector<double>& costs,
                             const PlanOptions& options) {
  const std::int64_t cap = slot_cap(options);
  const std::vector<int> layers = number_layers(matrices);
  std::vector<int> open(layer_count(layers), -1);  // per layer the unit that still takes small matrices
  std::vector<Unit> units;
  units.reserve(matrices.size());
  for (int i = 0; i < static_cast<int>(matrices.size()); ++i) {
    if (matrices[i].part) continue;  // has its owner
    const std::int64_t bytes = options.state_bytes(matrices[i]);
    const bool merges = layers[i] != kNoLayer && matrices[i].numel() < options.small_matrix_threshold;
    int target = merges ? open[layers[i]] : -1;
    if (target < 0 || units[target].bytes > cap - bytes) {
      target = static_cast<int>(units.size());
      units.emplace_back().layer = layers[i];
      if (merges) open[layers[i]] = target;
    }
    add_matrix(units[target], i, costs[i], bytes);
  }
  fill_ticks(units);
  forget_lone_layers(units, static_cast<int>(open.size()));
  return units;
}

std::string unit_text(const Unit& unit, const std::vector<Matrix>& matrices) {
  std::string text = "'" + matrices[unit.matrices.front()].name + "'";
  const std::size_t others = unit.matrices.size() - 1;
  if (others > 0) text += " and " + std::to_string(others) + " more of its layer";
  return text;
}

}  // namespace dmuon::plan
