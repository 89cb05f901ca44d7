#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

#include "dmuon/plan.h"
#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

constexpr unsigned kSeeds = 300;

Plan solve(const Problem& problem) {
  return compute_balanced_assignment(problem.matrices, problem.mesh, problem.options);
}

TEST(AssignOwnersProperty, GivesEveryMatrixOneOwnerOnTheMesh) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan plan = solve(problem);
    ASSERT_EQ(plan.owners.size(), problem.matrices.size());
    ASSERT_EQ(plan.costs.size(), problem.matrices.size());
    ASSERT_EQ(plan.loads.size(), static_cast<std::size_t>(problem.mesh.slots()));
    for (const Slot owner : plan.owners) {
      EXPECT_TRUE(owner.shard >= 0 && owner.shard < problem.mesh.shard);
      EXPECT_TRUE(owner.replicate >= 0 && owner.replicate < problem.mesh.replicate);
    }
  }
}

TEST(AssignOwnersProperty, CountsEveryMatrixOnceInTheLoads) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan plan = solve(problem);
    std::int64_t expected = 0;
    for (const Matrix& matrix : problem.matrices) expected += matrix.numel();
    std::int64_t elements = 0;
    int matrices = 0;
    for (const SlotLoad& load : plan.loads) {
      elements += load.elements;
      matrices += load.matrices;
      EXPECT_EQ(load.bytes, load.elements * problem.options.state_bytes_per_element);
    }
    EXPECT_EQ(elements, expected);
    EXPECT_EQ(matrices, static_cast<int>(problem.matrices.size()));
  }
}

TEST(AssignOwnersProperty, KeepsSmallMatricesOfLayerTogether) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan plan = solve(problem);
    std::map<std::string, Slot> owners;
    for (std::size_t i = 0; i < plan.matrices.size(); ++i) {
      const Matrix& matrix = plan.matrices[i];
      if (matrix.layer.empty() || matrix.numel() >= problem.options.small_matrix_threshold) continue;
      EXPECT_EQ(owners.try_emplace(matrix.layer, plan.owners[i]).first->second, plan.owners[i]) << "seed " << seed;
    }
  }
}

TEST(AssignOwnersProperty, RepeatsItself) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan first = solve(problem);
    const Plan second = solve(problem);
    EXPECT_EQ(first.owners, second.owners);
    EXPECT_EQ(first.fingerprint(), second.fingerprint());
    EXPECT_EQ(first.table(), second.table());
  }
}

TEST(AssignOwnersProperty, StaysBetweenLowerBoundAndListSchedulingBound) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    Problem problem = random_problem(seed);
    problem.options.small_matrix_threshold = 0;
    const Plan plan = solve(problem);
    const double mean = mean_load(plan);
    const double largest = *std::max_element(plan.costs.begin(), plan.costs.end());
    const double slots = problem.mesh.slots();
    EXPECT_LE(plan.lower_bound_seconds, max_load(plan));
    EXPECT_GE(plan.lower_bound_seconds, std::max(mean, largest) * (1 - 1e-9));
    const double bound = std::max(problem.options.target_imbalance * mean, mean + largest * (1 - 1 / slots));
    EXPECT_LE(max_load(plan), bound * (1 + 1e-9)) << "seed " << seed;
  }
}

/// The smallest possible maximum load, by trying every assignment.
double optimum(const std::vector<double>& costs, std::size_t next, std::vector<double>& loads) {
  if (next == costs.size()) return *std::max_element(loads.begin(), loads.end());
  double best = std::numeric_limits<double>::max();
  for (double& load : loads) {
    const double before = load;
    load += costs[next];
    best = std::min(best, optimum(costs, next + 1, loads));
    load = before;
  }
  return best;
}

TEST(AssignOwnersProperty, StaysWithinGrahamBoundOfOptimum) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Problem problem = random_problem(seed, 8);
    problem.mesh = seed % 2 == 0 ? MeshShape{.shard = 3, .replicate = 1} : MeshShape{.shard = 2, .replicate = 2};
    problem.options.small_matrix_threshold = 0;
    const Plan plan = solve(problem);
    std::vector<double> loads(problem.mesh.slots(), 0.0);
    const double best = optimum(plan.costs, 0, loads);
    const double graham = 4.0 / 3.0 - 1.0 / (3.0 * problem.mesh.slots());
    EXPECT_LE(max_load(plan), graham * best * (1 + 1e-9)) << "seed " << seed;
    EXPECT_LE(plan.lower_bound_seconds, best * (1 + 1e-9)) << "seed " << seed;
  }
}

TEST(AssignOwnersProperty, ObeysCap) {
  int solved = 0;
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    Problem problem = random_problem(seed);
    std::int64_t total = 0;
    std::int64_t largest = 0;
    for (const Matrix& matrix : problem.matrices) {
      total += matrix.numel() * problem.options.state_bytes_per_element;
      largest = std::max(largest, matrix.numel() * problem.options.state_bytes_per_element);
    }
    problem.options.max_bytes_per_slot = std::max(largest, total / problem.mesh.slots() * 3 / 2);
    try {
      const Plan plan = solve(problem);
      for (const SlotLoad& load : plan.loads) EXPECT_LE(load.bytes, *problem.options.max_bytes_per_slot);
      ++solved;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("max_bytes_per_slot"), std::string::npos);
    }
  }
  EXPECT_GT(solved, static_cast<int>(kSeeds) * 3 / 4);
}

TEST(AssignOwnersProperty, ExplainsEveryMissedTarget) {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan plan = solve(problem);
    EXPECT_EQ(plan.balance_note.empty(), plan.imbalance() <= problem.options.target_imbalance) << plan.balance_note;
  }
}

}  // namespace
}  // namespace dmuon::plan
