#include <gtest/gtest.h>

#include "dmuon/plan.h"

namespace dmuon::plan {
namespace {

std::vector<Matrix> layers(int count) {
  std::vector<Matrix> matrices;
  for (int i = 0; i < count; ++i) {
    const std::string layer = "layers." + std::to_string(i);
    matrices.push_back({.name = layer + ".w", .rows = 64, .cols = 64, .layer = layer});
  }
  return matrices;
}

TEST(DescribeInputs, WritesOneLinePerMatrix) {
  EXPECT_EQ(describe_inputs(layers(2)), "layers.0.w 64 64 layers.0\nlayers.1.w 64 64 layers.1\n");
  EXPECT_EQ(describe_inputs({}), "");
}

TEST(DescribeInputs, SaysWhatIsElementwise) {
  std::vector<Matrix> matrices = layers(2);
  const std::string text = describe_inputs(matrices);
  matrices[1].kind = Kind::kElementwise;
  EXPECT_EQ(describe_inputs(matrices), "layers.0.w 64 64 layers.0\nlayers.1.w 64 64 layers.1 elementwise\n");
  EXPECT_EQ(first_difference({text, describe_inputs(matrices)}),
            "rank 1 differs from rank 0 at parameter 1: rank 0 has 'layers.1.w' [64, 64] (layers.1), rank 1 has "
            "'layers.1.w' [64, 64] (layers.1 elementwise)");
}

TEST(FirstDifference, IsEmptyWhenAllAgree) {
  const std::string text = describe_inputs(layers(3));
  EXPECT_EQ(first_difference({text, text, text}), "");
  EXPECT_EQ(first_difference({text, text.substr(0, text.size() - 1)}), "");
  EXPECT_EQ(first_difference({text}), "");
  EXPECT_EQ(first_difference({}), "");
}

TEST(FirstDifference, NamesRankAndParameters) {
  std::vector<Matrix> other = layers(5);
  other[3].name = "layers.9.w";
  const std::string text = describe_inputs(layers(5));
  EXPECT_EQ(
      first_difference({text, text, describe_inputs(other)}),
      "rank 2 differs from rank 0 at parameter 3: rank 0 has 'layers.3.w' [64, 64], rank 2 has 'layers.9.w' [64, 64]");
}

TEST(FirstDifference, ShowsShapes) {
  EXPECT_EQ(first_difference({"w 64 64 l\n", "w 64 32 l\n"}),
            "rank 1 differs from rank 0 at parameter 0: rank 0 has 'w' [64, 64], rank 1 has 'w' [64, 32]");
}

TEST(FirstDifference, ReportsShorterList) {
  const std::string three = describe_inputs(layers(3));
  const std::string two = describe_inputs(layers(2));
  EXPECT_EQ(
      first_difference({three, two}),
      "rank 1 differs from rank 0 at parameter 2: rank 0 has 'layers.2.w' [64, 64], rank 1 has only 2 parameters");
  EXPECT_EQ(
      first_difference({two, three}),
      "rank 1 differs from rank 0 at parameter 2: rank 0 has only 2 parameters, rank 1 has 'layers.2.w' [64, 64]");
}

TEST(FirstDifference, ReportsEmptyList) {
  const std::string text = describe_inputs(layers(1));
  EXPECT_EQ(first_difference({text, ""}),
            "rank 1 differs from rank 0 at parameter 0: rank 0 has 'layers.0.w' [64, 64], rank 1 has no parameters");
  EXPECT_EQ(first_difference({"", text}),
            "rank 1 differs from rank 0 at parameter 0: rank 0 has no parameters, rank 1 has 'layers.0.w' [64, 64]");
}

TEST(FirstDifference, ShowsAppendedFieldsWhenOnlyTheyDiffer) {
  EXPECT_EQ(first_difference({"w 4 4 l float32\n", "w 4 4 l bfloat16\n"}),
            "rank 1 differs from rank 0 at parameter 0: rank 0 has 'w' [4, 4] (l float32), rank 1 has 'w' [4, 4] (l "
            "bfloat16)");
}

TEST(FirstDifference, ShowsLinesOfOtherFormsAsTheyAre) {
  EXPECT_EQ(first_difference({"divide factor: 2\n", "\n"}),
            "rank 1 differs from rank 0 at parameter 0: rank 0 has 'divide factor: 2', rank 1 has ''");
}

}  // namespace
}  // namespace dmuon::plan
