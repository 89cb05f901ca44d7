#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "dmuon/plan.h"
#include "plan/model_shapes.h"
#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

const std::vector<MeshShape> kMeshes = {{1, 1}, {2, 1},   {8, 1},  {2, 4},    {64, 1},
                                        {8, 8}, {256, 1}, {32, 8}, {1024, 1}, {64, 16}};

TEST(Balance, IsNearTheLowerBoundOnRealModels) {
  for (const ModelShapes& model : all_models()) {
    for (const MeshShape mesh : kMeshes) {
      const Plan plan = compute_balanced_assignment(model.matrices, mesh);
      // Where the excess is large, few units per slot do not fit together: 1.20 is the optimum of 70B on 256 slots.
      EXPECT_LE(max_load(plan), 1.21 * plan.lower_bound_seconds)
          << model.name << " on " << mesh.shard << " x " << mesh.replicate;
    }
  }
}

TEST(Balance, MeetsTargetWhereThereAreManyUnits) {
  for (const ModelShapes& model : {llama3_8b(), llama3_70b(), qwen3_30b_a3b(), vision_language_action()}) {
    for (const MeshShape mesh : {MeshShape{2, 1}, MeshShape{8, 1}, MeshShape{4, 2}}) {
      EXPECT_LE(compute_balanced_assignment(model.matrices, mesh).imbalance(), 1.02) << model.name;
    }
  }
  for (const ModelShapes& model : {llama3_8b(), llama3_70b()}) {
    EXPECT_LE(compute_balanced_assignment(model.matrices, {64, 1}).imbalance(), 1.02) << model.name;
    EXPECT_LE(compute_balanced_assignment(model.matrices, {8, 8}).imbalance(), 1.02) << model.name;
  }
}

TEST(Balance, SpreadsExpertsOverAThousandSlotsWithoutMerging) {
  PlanOptions options;
  options.small_matrix_threshold = 0;
  EXPECT_LE(compute_balanced_assignment(qwen3_30b_a3b().matrices, {1024, 1}, options).imbalance(), 1.02);
  EXPECT_LE(compute_balanced_assignment(qwen3_30b_a3b().matrices, {64, 16}, options).imbalance(), 1.02);
}

TEST(Balance, BalancesColumnsOfTwoDimensionalMesh) {
  const Plan plan = compute_balanced_assignment(llama3_70b().matrices, {8, 4});
  std::vector<double> columns(8, 0.0);
  for (std::size_t i = 0; i < plan.owners.size(); ++i) columns[plan.owners[i].shard] += plan.costs[i];
  EXPECT_LE(*std::max_element(columns.begin(), columns.end()), 1.02 * 4 * mean_load(plan));
}

TEST(Balance, SpreadsLayersOfRealModel) {
  for (const MeshShape mesh : {MeshShape{8, 1}, MeshShape{8, 8}, MeshShape{64, 1}}) {
    const Plan plan = compute_balanced_assignment(llama3_70b().matrices, mesh);
    std::set<std::pair<std::string, int>> used;
    for (std::size_t i = 0; i < plan.owners.size(); ++i) used.emplace(plan.matrices[i].layer, plan.owners[i].shard);
    EXPECT_GE(used.size(), 80U * 6U) << mesh.shard << " x " << mesh.replicate;  // of 80 layers with 7 matrices
  }
}

TEST(Balance, UsesPigeonholeBound) {
  // 3 equal units on 2 slots: some slot gets two.
  const std::vector<Matrix> matrices = {flat("a", 10), flat("b", 10), flat("c", 10)};
  const Plan plan = compute_balanced_assignment(matrices, {2, 1}, by_numel());
  EXPECT_DOUBLE_EQ(plan.lower_bound_seconds, 20.0);
  EXPECT_DOUBLE_EQ(max_load(plan), 20.0);
  EXPECT_DOUBLE_EQ(plan.imbalance(), 20.0 / 15.0);
}

TEST(Balance, NotesTooFewUnits) {
  const std::vector<Matrix> matrices = {flat("a", 10), flat("b", 10), flat("c", 10)};
  EXPECT_EQ(compute_balanced_assignment(matrices, {8, 1}, by_numel()).balance_note,
            "3 units for 8 slots: at most 3 slots can work");
}

TEST(Balance, NotesTooLargeUnit) {
  const std::vector<Matrix> matrices = {flat("a", 70), flat("b", 10), flat("c", 10), flat("d", 10)};
  EXPECT_EQ(compute_balanced_assignment(matrices, {2, 1}, by_numel()).balance_note,
            "the largest unit alone ('a') takes 1.40x the mean");
}

TEST(Balance, NotesMergedUnit) {
  PlanOptions options = by_numel();
  options.small_matrix_threshold = 100;
  const std::vector<Matrix> matrices = {flat("a", 70, "x"), flat("b", 70, "x"), flat("c", 30), flat("d", 30)};
  EXPECT_EQ(compute_balanced_assignment(matrices, {2, 1}, options).balance_note,
            "the largest unit alone ('a' and 1 more of its layer) takes 1.40x the mean; a lower "
            "small_matrix_threshold makes more units");
}

TEST(Balance, NotesUnevenFit) {
  const std::vector<Matrix> matrices = {flat("a", 10), flat("b", 10), flat("c", 10)};
  EXPECT_EQ(
      compute_balanced_assignment(matrices, {2, 1}, by_numel()).balance_note,
      "no better assignment was found: 3 units for 2 slots do not fit together evenly (lower bound 1.33x the mean)");
}

TEST(Balance, NotesStrategyThatDoesNotBalance) {
  PlanOptions options = by_numel();
  options.strategy = OwnerStrategy::kRank0;
  EXPECT_NE(compute_balanced_assignment({flat("a", 1), flat("b", 1)}, {2, 1}, options).balance_note.find("'lpt' does"),
            std::string::npos);
}

}  // namespace
}  // namespace dmuon::plan
