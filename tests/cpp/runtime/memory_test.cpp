// Bytes the runtime holds, against what the plan predicts and against what must be free when.
#include <gtest/gtest.h>

#include "dmuon/memory_model.h"
#include "runtime/trainer.h"

namespace dmuon {
namespace {

plan::MemoryEstimate predict(const Runtime& runtime, const TrainSetup& setup) {
  plan::MemoryOptions options;
  options.compute_bytes = setup.param_dtype ? 2 : 4;
  options.published_copy = setup.param_dtype.has_value();
  options.reshard_after_forward = setup.reshard_after_forward;
  options.outgoing = runtime.outgoing_bytes();
  options.received_bytes = runtime.received_bytes();
  options.last_inside = runtime.last_inside();
  std::vector<plan::GroupLayout> layouts;
  for (const auto& group : runtime.groups()) layouts.push_back(group->layout());
  return plan::predict_memory(layouts, runtime.rank(), options);
}

std::int64_t gather_bytes(const Runtime& runtime, const TrainSetup& setup) {
  std::int64_t elements = 0;
  for (const auto& group : runtime.groups()) {
    for (const auto& segment : group->layout().segments) {
      if (segment.owner != runtime.rank()) elements += segment.numel;
    }
  }
  return elements * (setup.param_dtype ? 2 : 4);
}

// ranks, Z3, bf16, shared memory
class Memory : public ::testing::TestWithParam<std::tuple<int, bool, bool, bool>> {
 protected:
  static TrainSetup make_setup() {
    const auto [ranks, reshard, mixed, shares] = GetParam();
    TrainSetup setup;
    setup.shape.blocks = 5;
    setup.ranks = ranks;
    setup.reshard_after_forward = reshard;
    if (mixed) setup.param_dtype = at::kBFloat16;
    setup.shares = shares;
    return setup;
  }
};

TEST_P(Memory, PeaksWhereThePlanPredicts) {
  const auto setup = make_setup();
  static_cast<void>(train_on_threads(setup, 3, [&](Trainer& trainer, int) {
    auto& runtime = *trainer.runtime();
    runtime.track_memory();
    trainer.backward(trainer.loss({0, 1, 2, 3, 4}));
    const auto predicted = predict(runtime, setup);
    const auto measured = static_cast<double>(runtime.peak_bytes() + predicted.momentum);
    EXPECT_NEAR(measured / static_cast<double>(predicted.peak()), 1.0, 0.02) << "rank " << trainer.rank();
  }));
}

// A module around others, with a large matrix that is used before and after them: in between autograd itself holds the
// first half of its gradient, which the runtime cannot see.
TEST_P(Memory, CountsModulesAroundOthers) {
  auto setup = make_setup();
  setup.shape.nested = true;
  setup.shape.width = 48;
  static_cast<void>(train_on_threads(setup, 3, [&](Trainer& trainer, int) {
    auto& runtime = *trainer.runtime();
    EXPECT_EQ(runtime.last_inside(), (std::vector<int>{3, 1, 2, 3, 4, 5}));
    runtime.track_memory();
    trainer.backward(trainer.loss({0, 1, 2, 3, 4}));
    const auto predicted = predict(runtime, setup);
    const auto measured = static_cast<double>(runtime.peak_bytes() + predicted.momentum);
    const auto unseen = static_cast<double>(48 * 48 * (setup.param_dtype ? 2 : 4));
    EXPECT_LE(measured, 1.02 * static_cast<double>(predicted.peak())) << "rank " << trainer.rank();
    EXPECT_GE(measured, 0.98 * (static_cast<double>(predicted.peak()) - unseen)) << "rank " << trainer.rank();
  }));
}

TEST_P(Memory, IsFreedWhenItIsNotNeeded) {
  const auto setup = make_setup();
  static_cast<void>(train_on_threads(setup, 2, [&](Trainer& trainer, int) {
    auto& runtime = *trainer.runtime();
    runtime.materialize();
    const auto predicted = predict(runtime, setup);
    const auto resident = predicted.resident() - predicted.momentum;
    EXPECT_EQ(runtime.live_bytes(), resident) << "before forward";
    const auto loss = trainer.loss({0, 1, 2, 3, 4});
    const auto kept = setup.reshard_after_forward ? 0 : gather_bytes(runtime, setup);
    EXPECT_EQ(runtime.live_bytes(), resident + kept) << "after forward";
    trainer.backward(loss);
    EXPECT_EQ(runtime.live_bytes(), resident + predicted.gradients) << "after backward";
    const at::NoGradGuard no_grad;
    static_cast<void>(trainer.loss({0, 3}));
    EXPECT_EQ(runtime.live_bytes(), resident + predicted.gradients) << "after an evaluation";
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Memory,
                         ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Bool(), ::testing::Bool(),
                                            ::testing::Bool()));

}  // namespace
}  // namespace dmuon
