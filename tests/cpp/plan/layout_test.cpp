#include "dmuon/layout.h"

#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>

#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

/// Owners as given; nothing else of the plan matters to a layout.
Plan plan_with(std::vector<Matrix> matrices, std::vector<Slot> owners, MeshShape mesh) {
  Plan plan;
  plan.mesh = mesh;
  plan.matrices = std::move(matrices);
  plan.owners = std::move(owners);
  return plan;
}

TEST(GroupLayout, PacksSegmentsByOwnerInModuleOrder) {
  const Plan plan =
      plan_with({flat("a", 5), flat("b", 8), flat("c", 9), flat("d", 1)}, {{1, 0}, {0, 1}, {1, 0}, {0, 0}}, {2, 2});
  const GroupLayout layout = make_group_layout(plan, std::vector<int>{2, 1, 0, 3});
  ASSERT_EQ(layout.segments.size(), 3U);
  EXPECT_EQ(layout.segments[0].owner, (Slot{0, 0}));
  EXPECT_EQ(layout.segments[1].owner, (Slot{0, 1}));
  EXPECT_EQ(layout.segments[2].owner, (Slot{1, 0}));

  const Segment& segment = layout.segments[2];
  ASSERT_EQ(segment.matrices.size(), 2U);
  EXPECT_EQ(segment.matrices[0].matrix, 2);
  EXPECT_EQ(segment.matrices[1].matrix, 0);
  EXPECT_EQ(segment.matrices[1].offset, 16);
  EXPECT_EQ(segment.numel, 24);
  EXPECT_EQ(segment.payload, 14);
  EXPECT_EQ(layout.numel(), 8 + 24 + 8);
  EXPECT_EQ(layout.payload(), 23);
}

TEST(GroupLayout, IsEmptyForNoMembers) {
  const Plan plan = plan_with({flat("a", 5)}, {{0, 0}}, {1, 1});
  const GroupLayout layout = make_group_layout(plan, {});
  EXPECT_TRUE(layout.segments.empty());
  EXPECT_EQ(layout.numel(), 0);
}

TEST(GroupLayout, RejectsBadMembers) {
  const Plan plan = plan_with({flat("a", 5), flat("b", 5)}, {{0, 0}, {0, 0}}, {1, 1});
  EXPECT_INVALID(make_group_layout(plan, std::vector<int>{0, 2}), "member 2 is out of range");
  EXPECT_INVALID(make_group_layout(plan, std::vector<int>{-1}), "member -1 is out of range");
  EXPECT_INVALID(make_group_layout(plan, std::vector<int>{1, 0, 1}), "'b' appears twice");
}

void expect_packed(const Segment& segment, const Plan& plan, std::set<int>& seen) {
  std::int64_t end = 0;
  std::int64_t payload = 0;
  for (const PackedMatrix& packed : segment.matrices) {
    EXPECT_TRUE(seen.insert(packed.matrix).second);
    EXPECT_EQ(plan.owners[packed.matrix], segment.owner);
    EXPECT_EQ(packed.numel, plan.matrices[packed.matrix].numel());
    EXPECT_EQ(packed.offset % kAlignElements, 0);
    EXPECT_GE(packed.offset, end);
    EXPECT_LT(packed.offset - end, kAlignElements);
    end = packed.offset + packed.numel;
    payload += packed.numel;
  }
  EXPECT_GE(segment.numel, end);
  EXPECT_LT(segment.numel - end, kAlignElements);
  EXPECT_EQ(segment.numel % kAlignElements, 0);
  EXPECT_EQ(segment.payload, payload);
}

TEST(GroupLayoutProperty, CoversEveryElementOnceAndAligned) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const Problem problem = random_problem(seed);
    const Plan plan = compute_balanced_assignment(problem.matrices, problem.mesh, problem.options);
    std::vector<int> members(plan.matrices.size());
    std::iota(members.begin(), members.end(), 0);
    const GroupLayout layout = make_group_layout(plan, members);
    std::set<int> seen;
    std::optional<Slot> previous;
    for (const Segment& segment : layout.segments) {
      EXPECT_TRUE(!previous || *previous < segment.owner);
      previous = segment.owner;
      expect_packed(segment, plan, seen);
    }
    EXPECT_EQ(seen.size(), members.size());
  }
}

}  // namespace
}  // namespace dmuon::plan
