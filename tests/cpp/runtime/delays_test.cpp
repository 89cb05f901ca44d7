// Random training with every collective of every rank delayed at random: timing changes no bit, and nothing hangs.
#include <gtest/gtest.h>

#include "comm/delaying_communicator.h"
#include "runtime/random_case.h"

namespace dmuon {
namespace {

constexpr unsigned kFirstSeed = 1000;
constexpr unsigned kCasesPerTest = 12;
constexpr unsigned kCases = 48;

Decorate delays(unsigned seed) {
  return [seed](CommunicatorPtr communicator, int number) {
    return std::make_shared<DelayingCommunicator>(std::move(communicator), 100 * seed + static_cast<unsigned>(number));
  };
}

void expect_delays_to_change_nothing(const RandomCase& random, unsigned seed) {
  auto setup = random.setup;
  const auto steps = static_cast<int>(random.steps.size());
  const auto on_time = train_on_threads(setup, steps, body_of(random));
  setup.decorate = delays(seed);
  expect_same_bits(train_on_threads(setup, steps, body_of(random)), on_time);
}

class RandomDelays : public ::testing::TestWithParam<unsigned> {};

TEST_P(RandomDelays, ChangeNoBit) {
  for (unsigned seed = GetParam(); seed < GetParam() + kCasesPerTest; ++seed) {
    const RandomCase random(seed);
    SCOPED_TRACE(c10::str("seed ", seed, ": ", describe(random)));
    EXPECT_NO_THROW(expect_delays_to_change_nothing(random, seed));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomDelays, ::testing::Range(kFirstSeed, kFirstSeed + kCases, kCasesPerTest));

bool has_different_branches(const RandomCase& random) {
  for (const auto& step : random.steps) {
    for (const auto& micro : step) {
      for (const auto& route : micro.routes) {
        if (route != micro.routes.front()) return true;
      }
    }
  }
  return false;
}

// The cases above are worth running only if they contain what timing could upset.
TEST(RandomDelaysCover, EveryModeWithDifferentBranches) {
  std::map<std::pair<bool, bool>, int> found;  // (replicas, Z3)
  for (unsigned seed = kFirstSeed; seed < kFirstSeed + kCases; ++seed) {
    const RandomCase random(seed);
    if (!has_different_branches(random)) continue;
    ++found[{random.setup.replicas > 1, random.setup.reshard_after_forward}];
  }
  for (const bool replicas : {false, true}) {
    for (const bool reshard : {false, true}) EXPECT_GE((found[{replicas, reshard}]), 2) << replicas << reshard;
  }
}

}  // namespace
}  // namespace dmuon
