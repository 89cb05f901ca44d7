// Random training: never a hang, always the numbers of one process.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/random_case.h"

namespace dmuon {
namespace {

double train(const RandomCase& random) {
  return expect_parity(random.setup, static_cast<int>(random.steps.size()), body_of(random));
}

class RandomTraining : public ::testing::TestWithParam<unsigned> {};

constexpr unsigned kCasesPerTest = 20;
constexpr unsigned kCases = 440;

// A failing case prints its seed and its story.  `RandomCase(seed)` is all it takes to run it alone.
TEST_P(RandomTraining, IsExact) {
  double worst = 0.0;
  for (unsigned seed = GetParam(); seed < GetParam() + kCasesPerTest; ++seed) {
    const RandomCase random(seed);
    SCOPED_TRACE(c10::str("seed ", seed, ": ", describe(random)));
    EXPECT_NO_THROW(worst = std::max(worst, train(random)));
  }
  RecordProperty("worst_error", c10::str(worst));
}

TEST(RandomCases, AreMany) {
  unsigned replicated = 0;
  for (unsigned seed = 0; seed < kCases; ++seed) replicated += RandomCase(seed).setup.replicas > 1 ? 1 : 0;
  EXPECT_GE(replicated, 200U);
  EXPECT_GE(kCases - replicated, 200U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTraining, ::testing::Range(0U, kCases, kCasesPerTest));

}  // namespace
}  // namespace dmuon
