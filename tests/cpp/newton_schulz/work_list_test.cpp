// The work lists of the GPU engine, run on the CPU: their order, their waits and their arithmetic.
#include "newton_schulz/work_list.h"

#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "newton_schulz/gpu_engine.h"
#include "newton_schulz/iteration.h"
#include "newton_schulz/list_interpreter.h"
#include "newton_schulz/matrices.h"
#include "newton_schulz/normalize.h"

namespace dmuon {
namespace {

using kernels::TileOp;
using kernels::WorkItem;
using testing::ListInterpreter;
using testing::Matrices;

struct Case {
  std::vector<WorkMatrix> matrices;
  std::vector<NsCoefficients> steps;
  WorkOptions options;
};

std::vector<int> random_restarts(std::mt19937_64& random, int steps) {
  std::vector<int> restarts;
  for (int step = 1; step < steps; ++step) {
    if (random() % 2 == 0) restarts.push_back(step);
  }
  return restarts;
}

// One to four matrices with one to three panels on their short side, wide, tall and square.
Case random_case(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const int steps = static_cast<int>(1 + random() % 4);
  Case result{.matrices = {}, .steps = coefficient_set("polar_express", steps), .options = {}};
  const auto count = 1 + random() % 4;
  for (std::size_t i = 0; i < count; ++i) {
    const auto side = [&random] { return static_cast<std::int64_t>(1 + random() % 300); };
    const std::int64_t n = side();
    const std::int64_t m = random() % 3 == 0 ? n : side();
    result.matrices.push_back({n, m, random_restarts(random, steps)});
  }
  constexpr int kWidths[] = {0, 1, 2, 4};
  result.options = {.slots = static_cast<int>(1 + random() % 3),
                    .prescale = static_cast<int>(random() % 5),
                    .width = kWidths[random() % 4],
                    .to_caller = random() % 2 == 0};
  return result;
}

std::vector<at::Tensor> inputs_of(const Case& c, Matrices& make) {
  std::vector<at::Tensor> inputs;
  for (const WorkMatrix& matrix : c.matrices) {
    inputs.push_back(
        normalize(make.gaussian(matrix.rows, matrix.cols).to(at::kDouble), at::kDouble, c.options.prescale));
  }
  return inputs;
}

TEST(WorkList, GivesTheIterationUnderAnyScheduleOfAnyNumberOfWorkers) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Case c = random_case(seed);
    Matrices make(seed);
    const std::vector<at::Tensor> inputs = inputs_of(c, make);
    const WorkList list = make_work_list(c.matrices, c.steps, c.options);
    ListInterpreter interpreter(list, inputs);
    ASSERT_EQ(interpreter.run(static_cast<int>(1 + seed % 7), seed), "");
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor expected = iterate(inputs[i], c.steps, c.matrices[i].restarts, c.options.prescale);
      // The list's factors are fp32; Gram with few restarts magnifies what they round away.
      EXPECT_LE(testing::relative_error(interpreter.result(i), expected), 1e-4) << i;
    }
  }
}

// The check above can fail: each kind of wait that is left out is found out by some schedule.
TEST(WorkList, NeedsItsWaits) {
  const std::vector<WorkMatrix> matrices(2, {300, 500, {2}});
  const auto steps = coefficient_set("polar_express", 5);
  const WorkList whole = make_work_list(matrices, steps, {.slots = 1, .width = 2});
  Matrices make(1);
  const std::vector<at::Tensor> inputs(2, normalize(make.gaussian(300, 500).to(at::kDouble), at::kDouble, 0));
  using Drop = void (*)(TileOp&);
  const Drop drops[] = {[](TileOp& op) { op.row_waits[0] = {}; }, [](TileOp& op) { op.col_waits[0] = {}; },
                        [](TileOp& op) { op.row_waits[1] = op.col_waits[1] = {}; },
                        [](TileOp& op) { op.all_wait = {}; }};
  for (std::size_t i = 0; i < std::size(drops); ++i) {
    WorkList list = whole;
    std::for_each(list.ops.begin(), list.ops.end(), drops[i]);
    bool found = false;
    for (std::uint64_t seed = 0; seed < 20 && !found; ++seed) {
      ListInterpreter interpreter(list, inputs);
      found = !interpreter.run(12, seed).empty() ||
              !(interpreter.result(0) - interpreter.result(1)).abs().max().lt(1e-6).item<bool>();
    }
    EXPECT_TRUE(found) << "without waits of kind " << i;
  }
}

TEST(WorkList, CoversEveryBlockOnceAndNoneAboveTheDiagonal) {
  for (std::uint64_t seed = 100; seed < 160; ++seed) {
    const Case c = random_case(seed);
    const WorkList list = make_work_list(c.matrices, c.steps, c.options);
    std::map<int, std::set<std::pair<int, int>>> boxes;  // by product: (block row, box column)
    for (const WorkItem& item : list.items) {
      for (int i = 0; i < item.boxes; ++i) {
        EXPECT_TRUE(boxes[item.op].insert({item.block_row, item.box_col + i}).second) << "twice, seed " << seed;
      }
      EXPECT_LE(item.boxes, list.ops[static_cast<std::size_t>(item.op)].width);
    }
    for (std::size_t i = 0; i < list.ops.size(); ++i) {
      const TileOp& op = list.ops[i];
      for (int row = 0; row * kernels::kBlock < op.rows; ++row) {
        for (int col = 0; col * kernels::kBox < op.cols; ++col) {
          const bool needed = op.symmetric == 0 || col / 2 <= row;
          EXPECT_EQ(boxes[static_cast<int>(i)].contains({row, col}), needed) << row << ", " << col << " seed " << seed;
        }
      }
    }
  }
}

// Tensors of one matrix, and of matrices in different slots, do not overlap; lines start at whole 16 bytes.
TEST(WorkList, LaysTensorsOutApart) {
  const std::vector<WorkMatrix> matrices = {{300, 7, {}}, {7, 300, {}}, {129, 129, {}}};
  const WorkList list = make_work_list(matrices, coefficient_set("you", 5), {.slots = 1});
  std::vector<std::pair<std::int64_t, std::int64_t>> used;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    for (const int index : {list.inputs[i], list.results[i]}) {
      const ArenaMatrix& tensor = list.tensors[static_cast<std::size_t>(index)];
      EXPECT_EQ(tensor.rows, matrices[i].rows);
      EXPECT_EQ(tensor.ld % 8, 0);
      EXPECT_EQ(tensor.offset % 8, 0);
      EXPECT_LE(tensor.offset + tensor.rows * tensor.ld, list.arena_elements);
      used.emplace_back(tensor.offset, tensor.offset + tensor.rows * tensor.ld);
    }
  }
  std::sort(used.begin(), used.end());
  for (std::size_t i = 1; i < used.size(); ++i) EXPECT_GE(used[i].first, used[i - 1].second);
}

TEST(TileWidth, IsNarrowForFewProductsAndWideForMany) {
  TileOp op;
  op.rows = op.cols = op.depth = 1024;
  op.symmetric = 1;
  EXPECT_EQ(tile_width(op, 1, 132), 1);
  EXPECT_EQ(tile_width(op, 16, 132), 4);
  op.rows = op.cols = op.depth = 512;
  EXPECT_EQ(tile_width(op, 24, 132), 4);
  op.rows = op.cols = op.depth = 8192;
  EXPECT_EQ(tile_width(op, 1, 132), 4);
  int last = 1;
  for (int alike = 1; alike < 64; ++alike) {
    op.rows = op.cols = op.depth = 512;
    const int width = tile_width(op, alike, 132);
    EXPECT_GE(width, last);
    last = width;
  }
}

// Both iterates of a matrix in 16 bits at least, and not above the bound that newton_schulz.h gives.
TEST(Workspace, IsBoundedAndThatOfTheLargestPart) {
  const auto options = make_ns_options("gram", 5, "polar_express");
  const std::vector<std::pair<std::int64_t, std::int64_t>> one{{2048, 5632}};
  const auto single = gpu_workspace_bytes(one, options);
  if (single == 0) GTEST_SKIP() << "built without kernels";
  EXPECT_GE(single, 2 * 2048 * 5632 * 2);
  const std::vector<std::pair<std::int64_t, std::int64_t>> full(23, one.front());  // 2^28 elements at most in a part
  const std::vector<std::pair<std::int64_t, std::int64_t>> three(69, one.front());
  EXPECT_GT(gpu_workspace_bytes(full, options), 5 * single);
  EXPECT_LE(gpu_workspace_bytes(full, options), 3 * (std::int64_t{1} << 29));
  EXPECT_EQ(gpu_workspace_bytes(three, options), gpu_workspace_bytes(full, options));
  EXPECT_EQ(gpu_workspace_bytes({}, options), 0);
}

}  // namespace
}  // namespace dmuon
