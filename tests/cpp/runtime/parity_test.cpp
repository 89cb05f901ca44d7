// Training on thread ranks against training alone: weights after five steps of exact Muon on the mean gradient.
#include <gtest/gtest.h>

#include "runtime/trainer.h"

namespace dmuon {
namespace {

constexpr int kSteps = 5;

void plain(Trainer& trainer, int) { trainer.backward(trainer.loss({0, 1, 2})); }

// ranks, Z3, param_dtype, dtype of the masters, nested groups, shared memory
using Case = std::tuple<int, bool, std::optional<at::ScalarType>, at::ScalarType, bool, bool>;

class Parity : public ::testing::TestWithParam<Case> {
 protected:
  static TrainSetup make_setup() {
    TrainSetup setup;
    std::tie(setup.ranks, setup.reshard_after_forward, setup.param_dtype, setup.shape.dtype, setup.shape.nested,
             setup.shares) = GetParam();
    setup.muon = setup.shape.dtype == at::kFloat;
    return setup;
  }
};

TEST_P(Parity, HoldsAfterFiveSteps) { RecordProperty("error", c10::str(expect_parity(make_setup(), kSteps, plain))); }

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const auto& [ranks, reshard, param_dtype, dtype, nested, shares] = info.param;
  return std::to_string(ranks) + "Ranks" + (reshard ? "Z3" : "Z2") +
         (param_dtype ? at::toString(*param_dtype) : at::toString(dtype)) + (nested ? "Nested" : "") +
         (shares ? "Shared" : "");
}

const auto kRanks = ::testing::Values(1, 2, 3, 4);
INSTANTIATE_TEST_SUITE_P(Float, Parity,
                         ::testing::Combine(kRanks, ::testing::Bool(), ::testing::Values(std::nullopt),
                                            ::testing::Values(at::kFloat), ::testing::Bool(), ::testing::Bool()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(MixedPrecision, Parity,
                         ::testing::Combine(kRanks, ::testing::Bool(), ::testing::Values(at::kBFloat16),
                                            ::testing::Values(at::kFloat), ::testing::Values(false), ::testing::Bool()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(DoubleMasters, Parity,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Bool(), ::testing::Values(std::nullopt),
                                            ::testing::Values(at::kDouble), ::testing::Values(false),
                                            ::testing::Bool()),
                         case_name);

TEST(ParityOf, MergedSmallMatrices) {
  TrainSetup setup;
  setup.ranks = 4;
  setup.small_matrix_threshold = std::nullopt;
  expect_parity(setup, kSteps, plain);
}

TEST(ParityOf, Replicas) {
  for (const auto& [ranks, replicas] : {std::pair(2, 2), std::pair(4, 2), std::pair(6, 2), std::pair(6, 3)}) {
    for (const bool flag : {true, false}) {
      SCOPED_TRACE(c10::str(ranks, " ranks, ", replicas, " replicas", flag ? ", Z3, shared memory" : ", Z2"));
      TrainSetup setup;
      setup.ranks = ranks;
      setup.replicas = replicas;
      setup.reshard_after_forward = setup.shares = flag;
      expect_parity(setup, kSteps, plain);
      setup.param_dtype = at::kBFloat16;
      expect_parity(setup, kSteps, plain);
    }
  }
}

// Wire bytes, summed over ranks: (N - 1) P for every gather and reduction; one call a group, pass and rank.
class Traffic : public ::testing::TestWithParam<int> {};

void expect_traffic(const TrainSetup& setup) {
  const auto trained = train_on_threads(setup, 3, plain);
  const std::int64_t compute = setup.param_dtype ? 2 : 4;
  const std::int64_t elements = setup.shape.blocks * 2 * setup.shape.width * setup.shape.hidden;
  const std::int64_t gathers = setup.reshard_after_forward ? 2 : 1;
  for (const auto& step : trained.traffic) {
    EXPECT_EQ(step.broadcast_bytes, gathers * setup.replicas * (setup.shards() - 1) * elements * compute);
    EXPECT_EQ(step.reduce_bytes, setup.replicas * (setup.shards() - 1) * elements * (setup.shares ? compute : 4));
    if (setup.shards() == 1) continue;
    EXPECT_EQ(step.broadcast_calls, gathers * setup.ranks * setup.shape.blocks);
    EXPECT_EQ(step.reduce_calls, setup.ranks * setup.shape.blocks);
  }
  for (const auto& step : trained.replicate_traffic) {
    EXPECT_EQ(step.broadcast_bytes, (setup.replicas - 1) * elements * compute);
    EXPECT_EQ(step.reduce_bytes, (setup.replicas - 1) * elements * 4);
  }
}

TEST_P(Traffic, IsWhatTheFormulaSays) {
  for (const bool reshard : {true, false}) {
    for (const bool mixed : {true, false}) {
      SCOPED_TRACE(c10::str(reshard ? "Z3" : "Z2", mixed ? ", bf16" : ", fp32"));
      TrainSetup setup;
      setup.ranks = GetParam();
      setup.reshard_after_forward = reshard;
      if (mixed) setup.param_dtype = at::kBFloat16;
      expect_traffic(setup);
      setup.shares = true;
      expect_traffic(setup);
      if (setup.ranks == 4) {
        setup.replicas = 2;
        expect_traffic(setup);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Traffic, ::testing::Values(1, 2, 3, 4));

}  // namespace
}  // namespace dmuon
