// Parameters that are cut by rows: the parts, what the plan makes of them, and where they lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>

#include "dmuon/layout.h"
#include "dmuon/memory_model.h"
#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

Matrix table(std::int64_t rows, std::int64_t cols) {
  return {.name = "table", .rows = rows, .cols = cols, .layer = "", .kind = Kind::kElementwise};
}

// Matrices and cut parameters in any order; the same for the same seed.
Problem random_cut_problem(unsigned seed) {
  Problem problem = random_problem(seed, 20);
  std::mt19937 random(seed);
  std::vector<Matrix> matrices;
  for (auto& matrix : problem.matrices) {
    if (random() % 3 != 0) {
      matrices.push_back(matrix);
      continue;
    }
    matrix.kind = Kind::kElementwise;
    for (auto& part : cut_by_rows(matrix, problem.mesh, 1)) matrices.push_back(part);
  }
  problem.matrices = std::move(matrices);
  return problem;
}

TEST(CutByRows, GivesEverySlotItsRowsAsDTensorDoes) {
  const auto parts = cut_by_rows(table(10, 3), {.shard = 3, .replicate = 2}, 1);  // 5 and 5 rows, each 2, 2, 1
  std::vector<std::string> names;
  std::vector<Slot> owners;
  for (const auto& part : parts) {
    names.push_back(part.name);
    owners.push_back(part.part->owner);
    EXPECT_EQ(part.part->total, 10);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"table[0:2]", "table[2:4]", "table[4:5]", "table[5:7]", "table[7:9]",
                                             "table[9:10]"}));
  EXPECT_EQ(owners, (std::vector<Slot>{{0, 0}, {1, 0}, {2, 0}, {0, 1}, {1, 1}, {2, 1}}));
}

TEST(CutByRows, LeavesOutSlotsWithoutRows) {
  EXPECT_EQ(cut_by_rows(table(5, 1), {.shard = 4}, 1).size(), 3U);
  EXPECT_EQ(cut_by_rows(table(32000, 2048), {.shard = 1024}).size(), 1000U);
}

TEST(CutByRows, KeepsTheRestWhole) {
  const auto stays = [](const Matrix& matrix, MeshShape mesh, std::int64_t least) {
    const auto parts = cut_by_rows(matrix, mesh, least);
    return parts.size() == 1 && !parts[0].part && parts[0].name == matrix.name;
  };
  auto matrix = table(64, 64);
  EXPECT_FALSE(stays(matrix, {.shard = 2}, 64 * 64));
  EXPECT_TRUE(stays(matrix, {.shard = 2}, 64 * 64 + 1));
  EXPECT_TRUE(stays(matrix, {.shard = 1}, 1));
  EXPECT_TRUE(stays(table(3, 64), {.shard = 2, .replicate = 2}, 1));
  EXPECT_FALSE(stays(table(2048, 2048), {.shard = 2}, kCutElements));
  matrix.kind = Kind::kMatrix;
  EXPECT_TRUE(stays(matrix, {.shard = 2}, 1));
}

TEST(CutByRows, PartsStayWithTheirOwnersAndCount) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const auto problem = random_cut_problem(seed);
    if (problem.matrices.empty()) continue;
    SCOPED_TRACE(seed);
    const auto plan = compute_balanced_assignment(problem.matrices, problem.mesh, problem.options);
    std::int64_t elements = 0;
    for (size_t i = 0; i < plan.matrices.size(); ++i) {
      elements += plan.matrices[i].numel();
      if (plan.matrices[i].part) {
        EXPECT_EQ(plan.owners[i], plan.matrices[i].part->owner);
      }
    }
    for (const auto& load : plan.loads) elements -= load.elements;
    EXPECT_EQ(elements, 0);
    EXPECT_GE(max_load(plan) * (1 + 1e-12), plan.lower_bound_seconds);
  }
}

TEST(CutByRows, ACapHoldsForPartsAndMatricesTogether) {
  auto options = by_numel();
  auto matrices = cut_by_rows(table(8, 1), {.shard = 2}, 1);  // 4 elements of 12 bytes on each slot
  matrices.push_back(flat("a", 10));
  matrices.push_back(flat("b", 10));
  options.max_bytes_per_slot = 4 * 12 + 10 * 8;
  const auto plan = compute_balanced_assignment(matrices, {.shard = 2}, options);
  EXPECT_EQ(plan.loads[0].bytes, plan.loads[1].bytes);
  --*options.max_bytes_per_slot;
  EXPECT_INVALID(compute_balanced_assignment(matrices, {.shard = 2}, options), "no slot has 80 bytes left");
}

TEST(CutByRows, APlanOfPartsAloneAndOneOfAnotherMesh) {
  const auto parts = cut_by_rows(table(8, 1), {.shard = 4}, 1);
  const auto plan = compute_balanced_assignment(parts, {.shard = 4});
  EXPECT_DOUBLE_EQ(plan.imbalance(), 1.0);
  EXPECT_EQ(plan.balance_note, "");
  EXPECT_INVALID(compute_balanced_assignment(parts, {.shard = 2}), "'table[4:6]' belongs to shard 2");
}

TEST(CutByRows, PartsThatAreMissingOrApartAreAnError) {
  const auto parts = cut_by_rows(table(8, 1), {.shard = 4}, 1);
  const auto plan = [](std::vector<Matrix> matrices) {
    return compute_balanced_assignment(std::move(matrices), {.shard = 4});
  };
  EXPECT_INVALID(plan({parts[0], parts[2], parts[3]}), "at 'table[4:6]' a part that begins at row 2 is missing");
  EXPECT_INVALID(plan({parts[1], parts[2], parts[3]}), "at 'table[2:4]' a part that begins at row 0 is missing");
  EXPECT_INVALID(plan({parts[0], flat("a", 4), parts[1], parts[2], parts[3]}), "at 'a' a part that begins at row 2");
  EXPECT_INVALID(plan({parts[0], parts[1], parts[2]}), "after 'table[4:6]' the rest of its parameter is missing");
}

// On every column: what others send and what is whole lies apart, and a whole one has its rows in their order.
void expect_apart(const GroupLayout& layout, const GatherPlaces& places, int shard) {
  std::vector<int> taken(static_cast<size_t>(places.numel), 0);
  ASSERT_EQ(places.offsets.size(), layout.segments.size());
  std::map<int, std::int64_t> begins;
  for (size_t s = 0; s < layout.segments.size(); ++s) {
    const auto& segment = layout.segments[s];
    if (!segment.part && segment.owner.shard == shard) {
      EXPECT_EQ(places.offsets[s], -1);
      continue;
    }
    const auto numel = segment.part ? segment.payload : segment.numel;
    ASSERT_LE(places.offsets[s] + numel, places.numel);
    for (std::int64_t i = 0; i < numel; ++i) ++taken[static_cast<size_t>(places.offsets[s] + i)];
    if (!segment.part) continue;
    const auto begin = places.offsets[s] - segment.part->start;
    EXPECT_EQ(begins.try_emplace(segment.part->parameter, begin).first->second, begin);
    EXPECT_EQ(begin % kAlignElements, 0);
  }
  EXPECT_LE(*std::max_element(taken.begin(), taken.end()), 1);
}

TEST(GatherPlaces, HoldEveryPartOnceAndInOrder) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    auto problem = random_cut_problem(seed);
    for (auto& matrix : problem.matrices) matrix.cols = std::min<std::int64_t>(matrix.cols, 5);
    if (problem.matrices.empty()) continue;
    SCOPED_TRACE(seed);
    const auto plan = compute_balanced_assignment(problem.matrices, problem.mesh, problem.options);
    std::vector<int> members(plan.matrices.size());
    std::iota(members.begin(), members.end(), 0);
    const auto layout = make_group_layout(plan, members);
    for (int shard = 0; shard < problem.mesh.shard; ++shard) {
      const auto places = gather_places(layout, shard);
      if (places.numel > 0) expect_apart(layout, places, shard);
    }
  }
}

TEST(GatherPlaces, AreCountedByTheMemoryModel) {
  const auto parts = cut_by_rows(table(6, 4), {.shard = 2}, 1);
  const auto plan = compute_balanced_assignment(parts, {.shard = 2});
  const std::vector<GroupLayout> groups{make_group_layout(plan, std::vector<int>{0, 1})};
  EXPECT_EQ(gather_places(groups[0], 0).numel, 24);
  const auto estimate = predict_memory(groups, {0, 0}, {});
  const std::int64_t own = 16;  // 12 elements, aligned
  EXPECT_EQ(estimate.resident(), own * 4 + 12 * 8 + own * 2);
  EXPECT_EQ(estimate.forward_peak - estimate.resident(), 24 * 2);
}

}  // namespace
}  // namespace dmuon::plan
