#include <gtest/gtest.h>

#include "dmuon/plan.h"

namespace dmuon::plan {
namespace {

TEST(CostModel, CountsStandardBelowAspect) {
  const CostModel cost;
  EXPECT_DOUBLE_EQ(cost.flops(10, 10), 5 * (3 * 1000 + 1000));
  EXPECT_DOUBLE_EQ(cost.flops(10, 12), 5 * (3 * 1200 + 1000));
}

TEST(CostModel, CountsGramWithOneRestart) {
  const CostModel cost;
  EXPECT_DOUBLE_EQ(cost.flops(10, 13), 6 * 1300 + 14 * 1000);
  EXPECT_DOUBLE_EQ(cost.flops(10, 40), 6 * 4000 + 14 * 1000);
}

TEST(CostModel, CountsGramForOtherStepCounts) {
  CostModel cost;
  cost.ns_steps = 3;  // segments of 2 and 1 steps: 5 and 1 products
  EXPECT_DOUBLE_EQ(cost.flops(10, 40), 6 * 4000 + 6 * 1000);
  cost.ns_steps = 2;  // one segment
  EXPECT_DOUBLE_EQ(cost.flops(10, 40), 3 * 4000 + 5 * 1000);
  cost.ns_steps = 1;
  EXPECT_DOUBLE_EQ(cost.flops(10, 40), 3 * 4000 + 1000);
}

TEST(CostModel, IgnoresOrientation) {
  const CostModel cost;
  EXPECT_EQ(cost.flops(512, 2048), cost.flops(2048, 512));
  EXPECT_EQ(cost.seconds(512, 2048), cost.seconds(2048, 512));
}

TEST(CostModel, AddsElementwiseAndConstantTime) {
  CostModel cost;
  cost.flops_per_second = 1e300;
  cost.bytes_per_second = 100.0;
  cost.elementwise_bytes = 50.0;
  cost.seconds_per_matrix = 2.0;
  EXPECT_DOUBLE_EQ(cost.seconds(10, 20), 200 * 50.0 / 100.0 + 2.0);
}

TEST(CostModel, CountsBytesOfAdamwAlone) {
  CostModel cost;
  cost.bytes_per_second = 100.0;
  const Matrix norm{.name = "norm", .rows = 10, .cols = 20, .layer = "", .kind = Kind::kElementwise};
  EXPECT_DOUBLE_EQ(cost.seconds(norm), 200 * 28.0 / 100.0);
  EXPECT_DOUBLE_EQ(cost.seconds({.name = "w", .rows = 10, .cols = 20, .layer = ""}), cost.seconds(10, 20));
}

}  // namespace
}  // namespace dmuon::plan
