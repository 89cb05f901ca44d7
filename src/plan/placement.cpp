#include "plan/placement.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace dmuon::plan {

LoadOrder::LoadOrder(int count) : keys_(count) {
  for (int i = 0; i < count; ++i) keys_[i].index = i;
  order_.insert(keys_.begin(), keys_.end());
}

void LoadOrder::add(int index, std::int64_t weight, std::int64_t bytes) {
  auto node = order_.extract(keys_[index]);
  node.value().weight += weight;
  node.value().bytes += bytes;
  keys_[index] = node.value();
  order_.insert(std::move(node));
}

LayerSpread::LayerSpread(std::span<const Unit> units, int shard) : shard_(shard) {
  int layers = 0;
  for (const Unit& unit : units) layers = std::max(layers, unit.layer + 1);
  taken_.assign(bit(layers, 0), false);
  coordinates_.assign(layers, 0);
}

void LayerSpread::set(int layer, int coordinate, bool taken) {
  if (layer == kNoLayer || taken_[bit(layer, coordinate)] == taken) return;
  taken_[bit(layer, coordinate)] = taken;
  coordinates_[layer] += taken ? 1 : -1;
}

namespace {

/// kSpread: columns are balanced first and then the slots of the column, and a layer's units go to distinct columns
/// while balance allows.  kBalance: Graham's rule over all slots (each counts as a column); only among equally loaded
/// ones is a shard coordinate without this layer preferred.
enum class Aim { kSpread, kBalance };

/// Longest processing time first.
class Greedy {
 public:
  Greedy(std::span<const Unit> units, const Goal& goal, Aim aim)
      : aim_(aim),
        shard_(goal.mesh.shard),
        cap_(goal.cap),
        columns_(aim == Aim::kSpread ? goal.mesh.shard : goal.mesh.slots()),
        slots_(columns_.size(), LoadOrder(aim == Aim::kSpread ? goal.mesh.replicate : 1)),
        spread_(units, goal.mesh.shard) {}

  /// Slot index for the next unit, or nullopt if it fits nowhere.
  std::optional<int> place(const Unit& unit, std::int64_t weight) {
    const std::optional<int> column = choose_column(unit, weight);
    if (!column) return std::nullopt;
    const int replicate = *choose_slot(*column, unit);
    columns_.add(*column, weight, unit.bytes);
    slots_[*column].add(replicate, weight, unit.bytes);
    spread_.set(unit.layer, *column % shard_, true);
    return replicate * columns_.size() + *column;
  }

 private:
  /// The lightest column without a unit of this layer if it is near enough to the lightest of all, else that.
  [[nodiscard]] std::optional<int> choose_column(const Unit& unit, std::int64_t weight) const {
    const bool spreads = unit.layer != kNoLayer && !spread_.full(unit.layer);
    const std::int64_t tolerance = aim_ == Aim::kSpread ? weight : 0;
    const LoadOrder::Key* lightest = nullptr;
    for (const LoadOrder::Key& key : columns_.ascending()) {
      if (!choose_slot(key.index, unit)) continue;
      if (lightest == nullptr) lightest = &key;
      if (!spreads || key.weight - lightest->weight > tolerance) break;
      if (!spread_.taken(unit.layer, key.index % shard_)) return key.index;
    }
    return lightest != nullptr ? std::optional(lightest->index) : std::nullopt;
  }

  [[nodiscard]] std::optional<int> choose_slot(int column, const Unit& unit) const {
    for (const LoadOrder::Key& key : slots_[column].ascending()) {
      if (key.bytes <= cap_ - unit.bytes) return key.index;
    }
    return std::nullopt;
  }

  Aim aim_;
  int shard_;
  std::int64_t cap_;
  LoadOrder columns_;
  std::vector<LoadOrder> slots_;  // [columns]
  LayerSpread spread_;
};

struct Attempt {
  Placement placement;
  int unplaced = -1;  // the first unit that fits nowhere
  double max_over_mean = 0.0;
};

/// Ties break by bytes, then by input order.
std::vector<int> heaviest_first(std::span<const Unit> units, std::int64_t Unit::*weight) {
  std::vector<LoadOrder::Key> keys;
  keys.reserve(units.size());
  for (const Unit& unit : units) keys.push_back({-(unit.*weight), -unit.bytes, static_cast<int>(keys.size())});
  std::sort(keys.begin(), keys.end());
  std::vector<int> order;
  order.reserve(units.size());
  for (const LoadOrder::Key& key : keys) order.push_back(key.index);
  return order;
}

/// `weight`: what is balanced, ticks or bytes.
Attempt place_greedily(std::span<const Unit> units, const Goal& goal, Aim aim, std::int64_t Unit::*weight) {
  Attempt attempt{.placement = Placement(units.size(), 0)};
  Greedy greedy(units, goal, aim);
  for (const int index : heaviest_first(units, weight)) {
    const std::optional<int> slot = greedy.place(units[index], units[index].*weight);
    if (!slot) {
      attempt.unplaced = index;
      break;
    }
    attempt.placement[index] = *slot;
  }
  return attempt;
}

/// Unit i goes to slot i modulo `slots`.
Attempt place_in_turn(std::span<const Unit> units, int slots, std::int64_t cap) {
  Attempt attempt{.placement = Placement(units.size(), 0)};
  std::vector<std::int64_t> bytes(slots, 0);
  for (std::size_t i = 0; i < units.size(); ++i) {
    const int slot = static_cast<int>(i % slots);
    bytes[slot] += units[i].bytes;
    if (bytes[slot] > cap && attempt.unplaced < 0) attempt.unplaced = static_cast<int>(i);
    attempt.placement[i] = slot;
  }
  return attempt;
}

/// Balances time; if the cap stops that, bytes.
Attempt place_longest_first(std::span<const Unit> units, const Goal& goal, Aim aim) {
  Attempt attempt = place_greedily(units, goal, aim, &Unit::ticks);
  if (attempt.unplaced >= 0) attempt = place_greedily(units, goal, aim, &Unit::bytes);
  if (attempt.unplaced < 0) attempt.max_over_mean = improve_placement(attempt.placement, units, goal);
  return attempt;
}

Attempt place_balanced(std::span<const Unit> units, const Goal& goal) {
  Attempt spread = place_longest_first(units, goal, Aim::kSpread);
  if (spread.unplaced < 0 && spread.max_over_mean <= goal.max_over_mean) return spread;

  Attempt balanced = place_longest_first(units, goal, Aim::kBalance);
  if (balanced.unplaced >= 0) return spread;
  return spread.unplaced >= 0 || balanced.max_over_mean < spread.max_over_mean ? balanced : spread;
}

Attempt place_by_strategy(std::span<const Unit> units, OwnerStrategy strategy, const Goal& goal) {
  if (strategy == OwnerStrategy::kRank0) return place_in_turn(units, 1, goal.cap);
  if (strategy == OwnerStrategy::kRoundRobin) return place_in_turn(units, goal.mesh.slots(), goal.cap);
  return place_balanced(units, goal);
}

}  // namespace

Placement place_units(std::span<const Unit> units, const std::vector<Matrix>& matrices, OwnerStrategy strategy,
                      const Goal& goal) {
  Attempt attempt = place_by_strategy(units, strategy, goal);
  if (attempt.unplaced >= 0) {
    const Unit& unit = units[attempt.unplaced];
    throw std::invalid_argument(
        "[dmuon.plan] matrix " + unit_text(unit, matrices) + ": no slot has " + std::to_string(unit.bytes) +
        " bytes left under max_bytes_per_slot = " + std::to_string(goal.cap) + ". Raise the cap or use more ranks.");
  }
  return std::move(attempt.placement);
}

}  // namespace dmuon::plan
