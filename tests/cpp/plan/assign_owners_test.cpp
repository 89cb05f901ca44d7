#include <gtest/gtest.h>

#include <set>

#include "dmuon/plan.h"
#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

std::vector<int> slots_of(const Plan& plan) {
  std::vector<int> slots;
  for (const Slot owner : plan.owners) slots.push_back(plan.slot_index(owner));
  return slots;
}

TEST(AssignOwners, BreaksTiesByIndex) {
  const std::vector<Matrix> matrices = {flat("a", 10), flat("b", 10), flat("c", 10), flat("d", 10)};
  EXPECT_EQ(slots_of(compute_balanced_assignment(matrices, {4, 1}, by_numel())), (std::vector<int>{0, 1, 2, 3}));
}

TEST(AssignOwners, BreaksTiesByBytes) {
  PlanOptions options = by_numel();
  options.cost.elementwise_bytes = 0.0;
  options.cost.seconds_per_matrix = 1.0;
  const std::vector<Matrix> matrices = {flat("a", 10), flat("b", 30), flat("c", 20)};
  EXPECT_EQ(slots_of(compute_balanced_assignment(matrices, {3, 1}, options)), (std::vector<int>{2, 0, 1}));
}

TEST(AssignOwners, PlacesLongestFirst) {
  const std::vector<Matrix> matrices = {flat("a", 20), flat("b", 30), flat("c", 60), flat("d", 10)};
  const Plan plan = compute_balanced_assignment(matrices, {2, 1}, by_numel());
  EXPECT_EQ(slots_of(plan), (std::vector<int>{1, 1, 0, 1}));
  EXPECT_DOUBLE_EQ(plan.imbalance(), 1.0);
  EXPECT_EQ(plan.balance_note, "");
}

TEST(AssignOwners, SearchImprovesOnGreedy) {
  // Longest first gives 70 and 50 elements on two slots; 30 + 30 and 20 + 20 + 20 is even.
  const std::vector<Matrix> matrices = {flat("a", 30), flat("b", 30), flat("c", 20), flat("d", 20), flat("e", 20)};
  EXPECT_DOUBLE_EQ(compute_balanced_assignment(matrices, {2, 1}, by_numel()).imbalance(), 1.0);
}

TEST(AssignOwners, SpreadsLayerOverSlots) {
  std::vector<Matrix> matrices;
  for (int i = 0; i < 32; ++i) matrices.push_back(flat("w" + std::to_string(i), 10, "layers." + std::to_string(i % 4)));
  const Plan plan = compute_balanced_assignment(matrices, {8, 1}, by_numel());
  for (int layer = 0; layer < 4; ++layer) {
    std::set<int> coordinates;
    for (int i = layer; i < 32; i += 4) coordinates.insert(plan.owners[i].shard);
    EXPECT_EQ(coordinates.size(), 8U);
  }
}

TEST(AssignOwners, SpreadsLayerOverColumns) {
  std::vector<Matrix> matrices;
  for (int i = 0; i < 32; ++i) matrices.push_back(flat("w" + std::to_string(i), 10, "layers." + std::to_string(i / 4)));
  const Plan plan = compute_balanced_assignment(matrices, {4, 2}, by_numel());
  EXPECT_DOUBLE_EQ(plan.imbalance(), 1.0);
  for (int layer = 0; layer < 8; ++layer) {
    std::set<int> coordinates;
    for (int i = 4 * layer; i < 4 * layer + 4; ++i) coordinates.insert(plan.owners[i].shard);
    EXPECT_EQ(coordinates.size(), 4U);
  }
}

TEST(AssignOwners, PrefersBalanceToSpread) {
  const std::vector<Matrix> matrices = {flat("a", 100), flat("b", 100), flat("c", 10, "layer"), flat("d", 5, "layer")};
  EXPECT_EQ(slots_of(compute_balanced_assignment(matrices, {3, 1}, by_numel())), (std::vector<int>{0, 1, 2, 2}));
}

TEST(AssignOwners, MergesSmallMatricesOfLayer) {
  PlanOptions options = by_numel();
  options.small_matrix_threshold = 10;
  const std::vector<Matrix> matrices = {flat("a", 9, "x"), flat("b", 10, "x"), flat("c", 9, "x"),
                                        flat("d", 9, "y"), flat("e", 9),       flat("f", 9)};
  const Plan plan = compute_balanced_assignment(matrices, {5, 1}, options);
  EXPECT_EQ(plan.owners[0], plan.owners[2]);
  EXPECT_EQ(std::set<Slot>(plan.owners.begin(), plan.owners.end()).size(), 5U);
}

TEST(AssignOwners, FollowsFixedStrategies) {
  const std::vector<Matrix> matrices = {flat("a", 1), flat("b", 50), flat("c", 1), flat("d", 1), flat("e", 1)};
  PlanOptions options = by_numel();
  options.strategy = OwnerStrategy::kRoundRobin;
  EXPECT_EQ(slots_of(compute_balanced_assignment(matrices, {2, 2}, options)), (std::vector<int>{0, 1, 2, 3, 0}));
  options.strategy = OwnerStrategy::kRank0;
  EXPECT_EQ(slots_of(compute_balanced_assignment(matrices, {2, 2}, options)), (std::vector<int>{0, 0, 0, 0, 0}));
}

TEST(AssignOwners, ParsesStrategyNames) {
  EXPECT_EQ(parse_owner_strategy("lpt"), OwnerStrategy::kLpt);
  EXPECT_EQ(parse_owner_strategy("round_robin"), OwnerStrategy::kRoundRobin);
  EXPECT_EQ(parse_owner_strategy("rank0"), OwnerStrategy::kRank0);
  EXPECT_INVALID(parse_owner_strategy("LPT"), "'lpt', 'round_robin' or 'rank0'");
}

TEST(AssignOwners, MeetsCapThatTimeAloneWouldBreak) {
  PlanOptions options = by_numel();
  options.cost.elementwise_bytes = 0.0;
  options.cost.seconds_per_matrix = 1.0;  // equal times, unequal bytes
  options.max_bytes_per_slot = 50 * 8;
  const std::vector<Matrix> matrices = {flat("a", 50), flat("b", 20), flat("c", 20), flat("d", 10)};
  const Plan plan = compute_balanced_assignment(matrices, {2, 1}, options);
  EXPECT_EQ(plan.loads[0].elements, 50);
  EXPECT_EQ(plan.loads[1].elements, 50);
}

TEST(AssignOwners, SplitsMergedUnitAtCap) {
  PlanOptions options = by_numel();
  options.small_matrix_threshold = 100;
  options.max_bytes_per_slot = 20 * 8;
  const std::vector<Matrix> matrices = {flat("a", 10, "x"), flat("b", 10, "x"), flat("c", 10, "x"), flat("d", 10, "x")};
  const Plan plan = compute_balanced_assignment(matrices, {2, 1}, options);
  EXPECT_EQ(plan.loads[0].elements, 20);
  EXPECT_EQ(plan.loads[1].elements, 20);
}

TEST(AssignOwners, NamesMatrixThatDoesNotFit) {
  PlanOptions options = by_numel();
  options.max_bytes_per_slot = 79;
  const std::vector<Matrix> matrices = {flat("small", 1), flat("blocks.7.huge", 10)};
  for (const auto strategy : {OwnerStrategy::kLpt, OwnerStrategy::kRoundRobin, OwnerStrategy::kRank0}) {
    options.strategy = strategy;
    EXPECT_INVALID(compute_balanced_assignment(matrices, {2, 2}, options),
                   "'blocks.7.huge': no slot has 80 bytes left");
  }
}

TEST(AssignOwners, RejectsBadInput) {
  const std::vector<Matrix> good = {flat("a", 1)};
  EXPECT_INVALID(compute_balanced_assignment({}, {1, 1}), "no matrices");
  EXPECT_INVALID(compute_balanced_assignment({flat("a", 1), flat("b", 2), flat("a", 3)}, {1, 1}), "'a' appears twice");
  EXPECT_INVALID(compute_balanced_assignment({{"w", 0, 3, ""}}, {1, 1}), "'w' is [0, 3]");
  EXPECT_INVALID(compute_balanced_assignment({{"w", 3, -1, ""}}, {1, 1}), "'w' is [3, -1]");
  EXPECT_INVALID(compute_balanced_assignment({{"w", std::int64_t{1} << 40, std::int64_t{1} << 40, ""}}, {1, 1}), "'w'");
  EXPECT_INVALID(compute_balanced_assignment({flat("v", 1), flat("w", std::int64_t{1} << 61)}, {1, 1}), "'w'");
  EXPECT_INVALID(compute_balanced_assignment(good, {0, 1}), "shard = 0");
  EXPECT_INVALID(compute_balanced_assignment(good, {1, -2}), "replicate = -2");
  EXPECT_INVALID(compute_balanced_assignment(good, {1 << 20, 1 << 20}), "more slots");
}

TEST(AssignOwners, RejectsBadOptions) {
  const auto assign = [](auto change) {
    PlanOptions options;
    change(options);
    return compute_balanced_assignment({flat("a", 1)}, {1, 1}, options);
  };
  EXPECT_INVALID(assign([](PlanOptions& o) { o.cost.flops_per_second = 0; }), "cost.flops_per_second");
  EXPECT_INVALID(assign([](PlanOptions& o) { o.cost.bytes_per_second = -1; }), "cost.bytes_per_second");
  EXPECT_INVALID(assign([](PlanOptions& o) { o.cost.ns_steps = 0; }), "cost.ns_steps");
  EXPECT_INVALID(assign([](PlanOptions& o) { o.cost.seconds_per_matrix = -1; }), "cost.seconds_per_matrix");
  EXPECT_INVALID(assign([](PlanOptions& o) { o.small_matrix_threshold = -1; }), "small_matrix_threshold");
  EXPECT_INVALID(assign([](PlanOptions& o) { o.state_bytes_per_element = 0; }), "state_bytes_per_element");
  EXPECT_INVALID(assign([](PlanOptions& o) { o.max_bytes_per_slot = 0; }), "max_bytes_per_slot");
  EXPECT_INVALID(assign([](PlanOptions& o) { o.target_imbalance = 0.9; }), "target_imbalance");
}

TEST(AssignOwners, SmallElementwiseParametersJoinTheMatricesOfTheirLayer) {
  std::vector<Matrix> matrices;
  for (const std::string layer : {"layers.0", "layers.1"}) {
    matrices.push_back({.name = layer + ".w", .rows = 64, .cols = 64, .layer = layer});
    matrices.push_back({.name = layer + ".norm", .rows = 64, .cols = 1, .layer = layer, .kind = Kind::kElementwise});
  }
  const Plan plan = compute_balanced_assignment(matrices, {2, 1});
  EXPECT_EQ(plan.owners[0], plan.owners[1]);
  EXPECT_EQ(plan.owners[2], plan.owners[3]);
  EXPECT_NE(plan.owners[0], plan.owners[2]);
}

TEST(AssignOwners, BalancesMatricesAgainstLargeElementwiseParameters) {
  const CostModel cost;
  std::vector<Matrix> matrices = {
      {.name = "embedding", .rows = 32000, .cols = 4096, .layer = "", .kind = Kind::kElementwise}};
  for (int i = 0; i < 8; ++i)
    matrices.push_back({.name = "w" + std::to_string(i), .rows = 4096, .cols = 4096, .layer = ""});
  const Plan plan = compute_balanced_assignment(matrices, {2, 1});
  EXPECT_LT(cost.seconds(matrices[0]), cost.seconds(4096, 32000) / 8);
  EXPECT_LE(plan.imbalance(), 1.2);
  EXPECT_EQ(plan.loads[0].bytes + plan.loads[1].bytes, 32000LL * 4096 * 12 + 8LL * 4096 * 4096 * 8);
}

}  // namespace
}  // namespace dmuon::plan
