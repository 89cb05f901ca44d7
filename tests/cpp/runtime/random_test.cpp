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

INSTANTIATE_TEST_SUITE_P(Seeds, RandomTraining, ::testing::Range(0U, 200U, kCasesPerTest));

}  // namespace
}  // namespace dmuon
