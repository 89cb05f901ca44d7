// Inputs for planner tests: cost models that are easy to reckon with, and seeded random problems.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "dmuon/plan.h"

namespace dmuon::plan {

/// A matrix of `numel` elements in one row.
inline Matrix flat(const std::string& name, std::int64_t numel, const std::string& layer = "") {
  return {.name = name, .rows = 1, .cols = numel, .layer = layer};
}

/// Cost proportional to the number of elements; no merging.
inline PlanOptions by_numel() {
  PlanOptions options;
  options.small_matrix_threshold = 0;
  options.cost = {
      .flops_per_second = 1e300, .bytes_per_second = 1.0, .seconds_per_matrix = 0.0, .elementwise_bytes = 1.0};
  return options;
}

struct Problem {
  std::vector<Matrix> matrices;
  MeshShape mesh;
  PlanOptions options;
};

/// Any mix of shapes, layers (also none), meshes and thresholds; the same for the same seed.
inline Problem random_problem(unsigned seed, int max_matrices = 80) {
  std::mt19937 random(seed);
  const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  Problem problem;
  problem.mesh = {.shard = pick(1, 9), .replicate = pick(0, 1) == 0 ? 1 : pick(2, 4)};
  problem.options.small_matrix_threshold = pick(0, 2) == 0 ? 0 : std::int64_t{1} << pick(10, 24);
  const int count = pick(1, max_matrices);
  const int layers = pick(1, 12);
  for (int i = 0; i < count; ++i) {
    const int layer = pick(0, layers);
    const std::int64_t side = std::int64_t{1} << pick(0, 12);
    problem.matrices.push_back({.name = "w" + std::to_string(i),
                                .rows = side + pick(0, 9),
                                .cols = (side << pick(0, 2)) + pick(0, 9),
                                .layer = layer == 0 ? "" : "layers." + std::to_string(layer)});
  }
  return problem;
}

inline double max_load(const Plan& plan) {
  double largest = 0.0;
  for (const SlotLoad& load : plan.loads) largest = load.cost_seconds > largest ? load.cost_seconds : largest;
  return largest;
}

inline double mean_load(const Plan& plan) {
  double total = 0.0;
  for (const SlotLoad& load : plan.loads) total += load.cost_seconds;
  return total / static_cast<double>(plan.loads.size());
}

/// Expects a std::invalid_argument whose message contains `part`.
#define EXPECT_INVALID(statement, part)                                                 \
  try {                                                                                 \
    static_cast<void>(statement);                                                       \
    ADD_FAILURE() << "no exception from " #statement;                                   \
  } catch (const std::invalid_argument& error) {                                        \
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what(); \
  }

}  // namespace dmuon::plan
