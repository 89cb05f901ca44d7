#include <algorithm>
#include <numeric>
#include <utility>

#include "plan/placement.h"

namespace dmuon::plan {
namespace {

/// Pairs of units looked at in one search: bounds its time, and unlike a clock gives every rank the same answer.
constexpr std::int64_t kMaxPairs = 250'000;
/// Lightest slots tried as partners of the most loaded one.
constexpr int kMaxPartners = 64;
constexpr int kNoUnit = -1;

/// Exchange of unit `out` of the most loaded slot for unit `in` of `partner` (kNoUnit: a move).
struct Change {
  int out = kNoUnit;
  int in = kNoUnit;
  int partner = 0;
  std::int64_t gain = 0;  // how far the larger of both loads falls
};

class Search {
 public:
  Search(Placement& placement, std::span<const Unit> units, const Goal& goal)
      : placement_(placement),
        units_(units),
        mesh_(goal.mesh),
        cap_(goal.cap),
        loads_(mesh_.slots()),
        spread_(units, mesh_.shard),
        members_(mesh_.slots()) {
    for (int i = 0; i < static_cast<int>(units.size()); ++i) {
      members_[placement[i]].push_back(i);
      loads_.add(placement[i], units[i].ticks, units[i].bytes);
      spread_.set(units[i].layer, coordinate(placement[i]), true);
    }
    for (std::vector<int>& slot : members_) {
      std::sort(slot.begin(), slot.end(), [this](int a, int b) { return lighter(a, b); });
    }
  }

  [[nodiscard]] std::int64_t maximum() const { return loads_.ascending().rbegin()->weight; }

  /// One change that lowers the most loaded slot; false if there is none or the work is used up.
  bool improve() {
    const int heavy = loads_.ascending().rbegin()->index;
    Change change = best_change(heavy, true);
    if (change.gain == 0) change = best_change(heavy, false);
    if (change.gain == 0) return false;
    take(change.out);
    put(change.out, change.partner);
    if (change.in != kNoUnit) {
      take(change.in);
      put(change.in, heavy);
    }
    return true;
  }

 private:
  /// Order of a slot's units: by ticks, then by index.
  [[nodiscard]] bool lighter(int a, int b) const {
    return std::pair(units_[a].ticks, a) < std::pair(units_[b].ticks, b);
  }

  auto position(int slot, int unit) {
    return std::lower_bound(members_[slot].begin(), members_[slot].end(), unit,
                            [this](int a, int b) { return lighter(a, b); });
  }

  void put(int unit, int slot) {
    placement_[unit] = slot;
    members_[slot].insert(position(slot, unit), unit);
    loads_.add(slot, units_[unit].ticks, units_[unit].bytes);
    spread_.set(units_[unit].layer, coordinate(slot), true);
  }

  void take(int unit) {
    const int slot = placement_[unit];
    members_[slot].erase(position(slot, unit));
    loads_.add(slot, -units_[unit].ticks, -units_[unit].bytes);
    spread_.set(units_[unit].layer, coordinate(slot), holds_layer(coordinate(slot), units_[unit].layer));
  }

  [[nodiscard]] bool holds_layer(int column, int layer) const {
    for (int slot = column; slot < mesh_.slots(); slot += mesh_.shard) {
      const bool held = std::any_of(members_[slot].begin(), members_[slot].end(),
                                    [&](int unit) { return units_[unit].layer == layer; });
      if (held) return true;
    }
    return false;
  }

  /// `keep_spread`: only changes that put no second unit of a layer at a shard coordinate.
  Change best_change(int heavy, bool keep_spread) {
    Change best;
    int partners = 0;
    for (const LoadOrder::Key& key : loads_.ascending()) {
      if (key.index == heavy || partners++ == kMaxPartners || pairs_ >= kMaxPairs) break;
      const std::int64_t gap = loads_[heavy].weight - key.weight;
      if (gap / 2 <= best.gain) break;
      for (const int out : members_[heavy]) try_exchanges(best, out, key.index, keep_spread);
    }
    return best;
  }

  /// The best partner for `out` brings both slots to the same load: look at the units next to that size, and at none.
  void try_exchanges(Change& best, int out, int partner, bool keep_spread) {
    const std::vector<int>& candidates = members_[partner];
    const std::int64_t gap = loads_[placement_[out]].weight - loads_[partner].weight;
    const std::int64_t wanted = units_[out].ticks - gap / 2;
    const auto next = std::lower_bound(candidates.begin(), candidates.end(), wanted,
                                       [this](int unit, std::int64_t ticks) { return units_[unit].ticks < ticks; });
    consider(best, {.out = out, .in = kNoUnit, .partner = partner}, gap, keep_spread);
    if (next != candidates.end()) consider(best, {.out = out, .in = *next, .partner = partner}, gap, keep_spread);
    if (next != candidates.begin()) {
      consider(best, {.out = out, .in = *std::prev(next), .partner = partner}, gap, keep_spread);
    }
  }

  void consider(Change& best, Change change, std::int64_t gap, bool keep_spread) {
    ++pairs_;
    const std::int64_t shift = units_[change.out].ticks - (change.in == kNoUnit ? 0 : units_[change.in].ticks);
    change.gain = std::min(shift, gap - shift);
    if (change.gain > best.gain && fits(change) && (!keep_spread || keeps_spread(change))) best = change;
  }

  [[nodiscard]] bool fits(const Change& change) const {
    const std::int64_t shift = units_[change.out].bytes - (change.in == kNoUnit ? 0 : units_[change.in].bytes);
    return shift > 0 ? loads_[change.partner].bytes <= cap_ - shift
                     : loads_[placement_[change.out]].bytes <= cap_ + shift;
  }

  [[nodiscard]] bool keeps_spread(const Change& change) const {
    const int from = coordinate(placement_[change.out]);
    const int to = coordinate(change.partner);
    const int out_layer = units_[change.out].layer;
    const int in_layer = change.in == kNoUnit ? kNoLayer : units_[change.in].layer;
    if (from == to || (out_layer == in_layer && change.in != kNoUnit)) return true;
    return !spread_.taken(out_layer, to) && !spread_.taken(in_layer, from);
  }

  [[nodiscard]] int coordinate(int slot) const { return slot % mesh_.shard; }

  Placement& placement_;
  std::span<const Unit> units_;
  MeshShape mesh_;
  std::int64_t cap_;
  LoadOrder loads_;
  LayerSpread spread_;
  std::vector<std::vector<int>> members_;  // [slots], ascending by ticks
  std::int64_t pairs_ = 0;
};

std::vector<std::int64_t> slot_ticks(const Placement& placement, std::span<const Unit> units, int slots) {
  std::vector<std::int64_t> ticks(slots, 0);
  for (std::size_t i = 0; i < units.size(); ++i) ticks[placement[i]] += units[i].ticks;
  return ticks;
}

}  // namespace

double improve_placement(Placement& placement, std::span<const Unit> units, const Goal& goal) {
  const int slots = goal.mesh.slots();
  const std::vector<std::int64_t> ticks = slot_ticks(placement, units, slots);
  const double mean = static_cast<double>(std::accumulate(ticks.begin(), ticks.end(), std::int64_t{0})) / slots;
  auto max_over_mean = static_cast<double>(*std::max_element(ticks.begin(), ticks.end())) / mean;
  if (max_over_mean <= goal.max_over_mean) return max_over_mean;

  Search search(placement, units, goal);
  while (max_over_mean > goal.max_over_mean && search.improve()) {
    max_over_mean = static_cast<double>(search.maximum()) / mean;
  }
  return max_over_mean;
}

}  // namespace dmuon::plan
