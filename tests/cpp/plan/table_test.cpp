#include <gtest/gtest.h>

#include <algorithm>

#include "dmuon/plan.h"
#include "plan/model_shapes.h"
#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

std::int64_t lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

TEST(Table, ShowsEverySlotAndSummary) {
  PlanOptions options = by_numel();
  options.state_bytes_per_element = 1 << 20;
  const std::vector<Matrix> matrices = {flat("a", 3), flat("b", 2), flat("c", 1)};
  EXPECT_EQ(compute_balanced_assignment(matrices, {2, 1}, options).table(),
            "     owner    matrices           MiB          ms    share\n"
            "(   0,    0)          1           3.0    3000.000   50.00%\n"
            "(   1,    0)          2           3.0    3000.000   50.00%\n"
            "max/mean 1.000; max 3000.000 ms; lower bound 3000.000 ms\n");
}

TEST(Table, ShowsNote) {
  const std::string table = compute_balanced_assignment({flat("a", 1)}, {2, 1}, by_numel()).table();
  EXPECT_NE(table.find("note: 1 unit for 2 slots: at most 1 slot can work\n"), std::string::npos) << table;
}

TEST(Table, SumsUpManySlots) {
  const std::string small = compute_balanced_assignment(llama3_8b().matrices, {8, 4}).table();
  EXPECT_GE(lines(small), 1 + 32 + 1);
  const std::string large = compute_balanced_assignment(llama3_8b().matrices, {64, 1}).table();
  EXPECT_EQ(lines(large), 1 + 4 + 1 + 4 + 1);
  EXPECT_NE(large.find("... 56 more slots, "), std::string::npos) << large;
}

}  // namespace
}  // namespace dmuon::plan
