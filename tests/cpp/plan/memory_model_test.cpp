#include "dmuon/memory_model.h"

#include <gtest/gtest.h>

#include <vector>

#include "plan/model_shapes.h"
#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

Segment segment(Slot owner, std::int64_t padded, std::int64_t payload) {
  return {.owner = owner, .matrices = {}, .numel = padded, .payload = payload};
}

/// Two ranks: the first group has a segment on each, the second one on rank 1 only.
std::vector<GroupLayout> two_groups() {
  return {{.segments = {segment({0, 0}, 16, 10), segment({1, 0}, 8, 5)}}, {.segments = {segment({1, 0}, 24, 20)}}};
}

TEST(PredictMemory, CountsRankThatGathersBothGroups) {
  const MemoryEstimate estimate = predict_memory(two_groups(), {0, 0}, {});
  EXPECT_EQ(estimate.masters, 16 * 4);
  EXPECT_EQ(estimate.momentum, 10 * 4);
  EXPECT_EQ(estimate.published, 16 * 2);
  EXPECT_EQ(estimate.gradients, 16 * 4);
  EXPECT_EQ(estimate.forward_peak, 136 + (8 + 24) * 2);
  EXPECT_EQ(estimate.backward_peak, 136 + (24 + 8) * 2 + 20 * 2 + 24 * 4);  // the second group, filled
  EXPECT_EQ(estimate.peak(), estimate.backward_peak);
}

TEST(PredictMemory, CountsGradientsOfFinishedGroups) {
  const MemoryEstimate estimate = predict_memory(two_groups(), {1, 0}, {});
  EXPECT_EQ(estimate.resident(), 32 * 4 + 25 * 4 + 32 * 2);
  EXPECT_EQ(estimate.forward_peak, 292 + 16 * 2);
  EXPECT_EQ(estimate.backward_peak, 292 + 24 * 4 + 16 * 2 + 15 * 2 + 24 * 4);  // the first group, filled
}

TEST(PredictMemory, CountsCastGradientBesideItsReduceBuffer) {
  const MemoryOptions options{.reduce_bytes = 2, .grad_aliases_reduce = false};
  const MemoryEstimate estimate = predict_memory(two_groups(), {1, 0}, options);
  EXPECT_EQ(estimate.gradients, 25 * 4);
  EXPECT_EQ(estimate.backward_peak, 292 + 16 * 2 + 15 * 2 + 24 * 2 + 20 * 4);  // the second group, finishing
}

TEST(PredictMemory, KeepsGroupsAroundTheOneInUse) {
  std::vector<GroupLayout> groups = two_groups();
  groups.push_back(groups.back());
  const MemoryEstimate alone = predict_memory(groups, {0, 0}, {});
  const MemoryEstimate around = predict_memory(groups, {0, 0}, {.last_inside = {2, 1, 2}});
  EXPECT_EQ(alone.forward_peak, alone.resident() + (24 + 24) * 2);
  EXPECT_EQ(around.forward_peak, alone.resident() + (8 + 24 + 24) * 2);
  EXPECT_EQ(around.backward_peak - alone.backward_peak, 8 * 2 + 15 * 2);
}

TEST(PredictMemory, KeepsGathersWithoutReshard) {
  std::vector<GroupLayout> groups = two_groups();
  groups.insert(groups.begin(), {.segments = {segment({1, 0}, 8, 8)}});
  const MemoryEstimate resharded = predict_memory(groups, {0, 0}, {});
  const MemoryEstimate kept = predict_memory(groups, {0, 0}, {.reshard_after_forward = false});
  EXPECT_EQ(kept.resident(), resharded.resident());
  EXPECT_EQ(resharded.forward_peak, 136 + (8 + 24) * 2);
  EXPECT_EQ(kept.forward_peak, 136 + (8 + 8 + 24) * 2);
  EXPECT_EQ(kept.backward_peak - resharded.backward_peak, 8 * 2);
}

TEST(PredictMemory, KeepsPublishedCopyOnWholeColumn) {
  const std::vector<GroupLayout> groups = {{.segments = {segment({0, 1}, 16, 16), segment({1, 0}, 8, 8)}}};
  const MemoryEstimate peer = predict_memory(groups, {0, 0}, {});
  EXPECT_EQ(peer.masters, 0);
  EXPECT_EQ(peer.published, 16 * 2);
  EXPECT_EQ(peer.forward_peak, 16 * 2 + 8 * 2);
  EXPECT_EQ(peer.gradients, 0);
}

TEST(PredictMemory, SendsMasterWithoutPublishedCopy) {
  const std::vector<GroupLayout> groups = {{.segments = {segment({0, 1}, 16, 16), segment({1, 0}, 8, 8)}}};
  const MemoryOptions options{.compute_bytes = 4, .published_copy = false};
  EXPECT_EQ(predict_memory(groups, {0, 1}, options).published, 0);
  EXPECT_EQ(predict_memory(groups, {0, 0}, options).published, 16 * 4);
}

TEST(PredictMemory, CountsBothMomentsOfElementwiseParameters) {
  const std::vector<Matrix> matrices = {
      {.name = "w", .rows = 4, .cols = 4, .layer = "l"},
      {.name = "bias", .rows = 5, .cols = 1, .layer = "l", .kind = Kind::kElementwise}};
  const Plan plan = compute_balanced_assignment(matrices, {1, 1});
  const std::vector<int> members = {0, 1};
  const GroupLayout layout = make_group_layout(plan, members);
  const MemoryEstimate estimate = predict_memory(std::vector<GroupLayout>{layout}, {0, 0}, {});
  EXPECT_EQ(estimate.masters, (16 + 8) * 4);
  EXPECT_EQ(estimate.momentum, (16 + 2 * 5) * 4);
  EXPECT_EQ(plan.loads[0].bytes, 16 * 8 + 5 * 12);
  EXPECT_EQ(make_sub_layout(layout, {true, false}).segments[0].elementwise, 0);
  EXPECT_EQ(make_sub_layout(layout, {false, true}).segments[0].elementwise, 5);
}

TEST(PredictMemory, IsZeroWithoutGroups) {
  const MemoryEstimate estimate = predict_memory({}, {0, 0}, {});
  EXPECT_EQ(estimate.resident(), 0);
  EXPECT_EQ(estimate.peak(), 0);
}

/// One group per five matrices.
std::vector<GroupLayout> group_layouts(const Plan& plan) {
  std::vector<GroupLayout> groups;
  const int count = static_cast<int>(plan.matrices.size());
  for (int begin = 0; begin < count; begin += 5) {
    std::vector<int> members;
    for (int i = begin; i < std::min(begin + 5, count); ++i) members.push_back(i);
    groups.push_back(make_group_layout(plan, members));
  }
  return groups;
}

TEST(PredictMemoryProperty, RanksHoldEverythingOnceTogether) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan plan = compute_balanced_assignment(problem.matrices, problem.mesh, problem.options);
    const std::vector<GroupLayout> groups = group_layouts(plan);
    std::int64_t padded = 0;
    std::int64_t payload = 0;
    for (const GroupLayout& group : groups) {
      padded += group.numel();
      payload += group.payload();
    }
    MemoryEstimate sum;
    for (int shard = 0; shard < problem.mesh.shard; ++shard) {
      for (int replicate = 0; replicate < problem.mesh.replicate; ++replicate) {
        const MemoryEstimate one = predict_memory(groups, {shard, replicate}, {});
        sum.masters += one.masters;
        sum.momentum += one.momentum;
        sum.published += one.published;
        sum.gradients += one.gradients;
        EXPECT_GE(one.forward_peak, one.resident());
        EXPECT_GE(one.backward_peak, one.resident() + one.gradients);
      }
    }
    EXPECT_EQ(sum.masters, padded * 4);
    EXPECT_EQ(sum.momentum, payload * 4);
    EXPECT_EQ(sum.published, padded * 2 * problem.mesh.replicate);
    EXPECT_EQ(sum.gradients, padded * 4);
  }
}

TEST(PredictMemoryProperty, KeepingGathersNeverSavesMemory) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan plan = compute_balanced_assignment(problem.matrices, problem.mesh, problem.options);
    const std::vector<GroupLayout> groups = group_layouts(plan);
    const MemoryEstimate resharded = predict_memory(groups, {0, 0}, {});
    const MemoryEstimate kept = predict_memory(groups, {0, 0}, {.reshard_after_forward = false});
    EXPECT_GE(kept.forward_peak, resharded.forward_peak);
    EXPECT_GE(kept.backward_peak, resharded.backward_peak);
  }
}

TEST(PredictMemory, FallsWithRanksOnRealModel) {
  std::int64_t previous = 0;
  for (const int ranks : {64, 8, 2}) {
    const Plan plan = compute_balanced_assignment(llama3_8b().matrices, {ranks, 1});
    std::int64_t worst = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      worst = std::max(worst, predict_memory(group_layouts(plan), {rank, 0}, {}).peak());
    }
    EXPECT_GT(worst, previous);
    previous = worst;
  }
}

}  // namespace
}  // namespace dmuon::plan
