// set_requires_all_reduce(false): with replicas, only the last micro-batch of a step sends gradients across them.
#include <gtest/gtest.h>

#include "runtime/trainer.h"

namespace dmuon {
namespace {

constexpr int kMicroBatches = 3;
const Route kAll{0, 1, 2};

// ranks, replicas, Z3, param_dtype
using Case = std::tuple<int, int, bool, std::optional<at::ScalarType>>;

class AllReduce : public ::testing::TestWithParam<Case> {
 protected:
  static TrainSetup make_setup() {
    TrainSetup setup;
    std::tie(setup.ranks, setup.replicas, setup.reshard_after_forward, setup.param_dtype) = GetParam();
    setup.shape.dtype = at::kDouble;  // the reference adds in another order
    setup.muon = false;
    return setup;
  }
};

void set_all_reduce(Trainer& trainer, bool enabled) {
  if (trainer.runtime()) trainer.runtime()->set_requires_all_reduce(enabled);
}

void expect_no_gradients(Trainer& trainer) {
  if (!trainer.runtime()) return;
  for (const auto& param : trainer.runtime()->params()) {
    EXPECT_FALSE(param->reduced_grad().defined()) << param->name() << " has a gradient before stage 2";
  }
}

void accumulate(Trainer& trainer, const std::vector<Route>& routes) {
  for (int micro = 0; micro < kMicroBatches; ++micro) {
    const bool last = micro + 1 == kMicroBatches;
    set_all_reduce(trainer, last);
    trainer.backward(trainer.loss(routes[static_cast<size_t>(micro)], micro));
    if (!last) expect_no_gradients(trainer);
  }
}

void all_modules(Trainer& trainer, int) { accumulate(trainer, {kAll, kAll, kAll}); }

// Each module is missing from some micro-batch of some rank, module 1 from the last one of all.
void different_modules(Trainer& trainer, int step) {
  accumulate(trainer, {{0, 1 + (trainer.rank() + step) % 2}, trainer.rank() == 1 ? Route{} : Route{1, 2}, {2, 0}});
}

// The first micro-batch stays on its rank, the second on its row owner.
void after_no_sync(Trainer& trainer, int) {
  for (int micro = 0; micro < kMicroBatches; ++micro) {
    trainer.set_sync(micro > 0);
    set_all_reduce(trainer, micro == 2);
    trainer.backward(trainer.loss(kAll, micro));
    if (micro < 2) expect_no_gradients(trainer);
  }
}

TEST_P(AllReduce, OnTheLastMicroBatchIsExact) { expect_parity(make_setup(), 3, all_modules); }

TEST_P(AllReduce, IsExactWhenMicroBatchesUseDifferentModules) { expect_parity(make_setup(), 3, different_modules); }

TEST_P(AllReduce, IsExactAfterNoSync) { expect_parity(make_setup(), 3, after_no_sync); }

TEST_P(AllReduce, SendsAcrossReplicasOnce) {
  const auto setup = make_setup();
  const auto& shape = setup.shape;
  const std::int64_t bytes = shape.blocks * 2 * shape.width * shape.hidden * 8;
  for (const auto& step : train_on_threads(setup, 2, all_modules).replicate_traffic) {
    EXPECT_EQ(step.reduce_bytes, (setup.replicas - 1) * bytes);
    EXPECT_EQ(step.reduce_calls, setup.ranks * shape.blocks);
  }
}

// What a step without stage 2 sends across replicas is new weights alone, and nobody steps; zero_grad forgets its sums.
TEST_P(AllReduce, SendsNothingWhileItIsOff) {
  const auto off_in_the_first_step = [](Trainer& trainer, int step) {
    set_all_reduce(trainer, step > 0);
    for (int micro = 0; micro < kMicroBatches; ++micro) trainer.backward(trainer.loss(kAll, micro));
    if (step == 0) trainer.discard_gradients();
  };
  const auto setup = make_setup();
  const auto together = train_on_threads(setup, 2, off_in_the_first_step);
  EXPECT_EQ(together.replicate_traffic[0].reduce_calls, 0);
  EXPECT_TRUE(together.stepped[0].empty());
  EXPECT_LE(relative_error(together, train_alone(setup, 2, off_in_the_first_step)), 1e-12);
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const auto& [ranks, replicas, reshard, param_dtype] = info.param;
  return c10::str(replicas, "x", ranks / replicas, reshard ? "Z3" : "Z2", param_dtype ? "BFloat16" : "Double");
}

INSTANTIATE_TEST_SUITE_P(Pairs, AllReduce,
                         ::testing::Combine(::testing::Values(2, 4), ::testing::Values(2), ::testing::Bool(),
                                            ::testing::Values(std::nullopt, at::kBFloat16)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Triples, AllReduce,
                         ::testing::Combine(::testing::Values(6), ::testing::Values(3), ::testing::Bool(),
                                            ::testing::Values(std::nullopt)),
                         case_name);

}  // namespace
}  // namespace dmuon
