// Where the units are: the state that the greedy pass makes and the local search improves.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "plan/units.h"

namespace dmuon::plan {

/// Slots or columns in ascending order of load; ties break by bytes, then by index.
class LoadOrder {
 public:
  struct Key {
    std::int64_t weight = 0;
    std::int64_t bytes = 0;
    int index = 0;

    auto operator<=>(const Key&) const = default;
  };

  explicit LoadOrder(int count);

  [[nodiscard]] int size() const { return static_cast<int>(keys_.size()); }
  /// Negative amounts take load away.  O(log count).
  void add(int index, std::int64_t weight, std::int64_t bytes);

  [[nodiscard]] const Key& operator[](int index) const { return keys_[index]; }
  [[nodiscard]] const std::set<Key>& ascending() const { return order_; }

 private:
  std::vector<Key> keys_;
  std::set<Key> order_;
};

/// Which shard coordinates own a unit of each layer.  Ignores kNoLayer.
class LayerSpread {
 public:
  LayerSpread(std::span<const Unit> units, int shard);

  void set(int layer, int coordinate, bool taken);
  [[nodiscard]] bool taken(int layer, int coordinate) const {
    return layer != kNoLayer && taken_[bit(layer, coordinate)];
  }
  /// True when no shard coordinate is without a unit of this layer.
  [[nodiscard]] bool full(int layer) const { return coordinates_[layer] == shard_; }

 private:
  [[nodiscard]] std::size_t bit(int layer, int coordinate) const {
    return static_cast<std::size_t>(layer) * shard_ + coordinate;
  }

  int shard_;
  std::vector<bool> taken_;       // [layers, shard]
  std::vector<int> coordinates_;  // [layers] how many are taken
};

/// [units] slot index of each unit.
using Placement = std::vector<int>;

struct Goal {
  MeshShape mesh;
  std::int64_t cap = 0;        ///< bytes per slot
  double max_over_mean = 1.0;  ///< good enough: the target, or the lower bound where that is higher
};

/// Places the units by `strategy`.  kLpt: columns first with the layers spread, then the search; if that misses the
/// goal, plain LPT over all slots and the search, and the better of both: so without a cap max is within Graham's
/// bound. Throws std::invalid_argument, with a name from `matrices`, if the cap cannot be met.
[[nodiscard]] Placement place_units(std::span<const Unit> units, const std::vector<Matrix>& matrices,
                                    OwnerStrategy strategy, const Goal& goal);

/// Moves and swaps units between the most loaded slot and the lightest ones until the goal is met, no change helps, or
/// a fixed amount of work is done.  Never exceeds the cap, and never raises the maximum load.  Returns max/mean.
double improve_placement(Placement& placement, std::span<const Unit> units, const Goal& goal);

}  // namespace dmuon::plan
