// Training on thread ranks against training alone: weights after five steps of exact Muon on the mean gradient.
#include <gtest/gtest.h>

#include "runtime/trainer.h"

namespace dmuon {
namespace {

constexpr int kSteps = 5;

void plain(Trainer& trainer, int) { trainer.backward(trainer.loss({0, 1, 2})); }

// ranks, Z3, param_dtype, dtype of the masters, nested groups
using Case = std::tuple<int, bool, std::optional<at::ScalarType>, at::ScalarType, bool>;

class Parity : public ::testing::TestWithParam<Case> {
 protected:
  static TrainSetup make_setup() {
    TrainSetup setup;
    std::tie(setup.ranks, setup.reshard_after_forward, setup.param_dtype, setup.shape.dtype, setup.shape.nested) =
        GetParam();
    setup.muon = setup.shape.dtype == at::kFloat;
    return setup;
  }
};

TEST_P(Parity, HoldsAfterFiveSteps) {
  RecordProperty("error", std::to_string(expect_parity(make_setup(), kSteps, plain)));
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  const auto& [ranks, reshard, param_dtype, dtype, nested] = info.param;
  return std::to_string(ranks) + "Ranks" + (reshard ? "Z3" : "Z2") +
         (param_dtype ? at::toString(*param_dtype) : at::toString(dtype)) + (nested ? "Nested" : "");
}

const auto kRanks = ::testing::Values(1, 2, 3, 4);
INSTANTIATE_TEST_SUITE_P(Float, Parity,
                         ::testing::Combine(kRanks, ::testing::Bool(), ::testing::Values(std::nullopt),
                                            ::testing::Values(at::kFloat), ::testing::Bool()),
                         case_name);
INSTANTIATE_TEST_SUITE_P(MixedPrecision, Parity,
                         ::testing::Combine(kRanks, ::testing::Bool(), ::testing::Values(at::kBFloat16),
                                            ::testing::Values(at::kFloat), ::testing::Values(false)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(DoubleMasters, Parity,
                         ::testing::Combine(::testing::Values(1, 3), ::testing::Bool(), ::testing::Values(std::nullopt),
                                            ::testing::Values(at::kDouble), ::testing::Values(false)),
                         case_name);

TEST(ParityOf, MergedSmallMatrices) {
  TrainSetup setup;
  setup.ranks = 4;
  setup.small_matrix_threshold = std::nullopt;
  expect_parity(setup, kSteps, plain);
}

// Wire bytes, summed over ranks: (N - 1) P for every gather and reduction; one call a group, pass and rank.
class Traffic : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(Traffic, IsWhatTheFormulaSays) {
  const auto [ranks, reshard, mixed] = GetParam();
  TrainSetup setup;
  setup.ranks = ranks;
  setup.reshard_after_forward = reshard;
  if (mixed) setup.param_dtype = at::kBFloat16;
  const auto trained = train_on_threads(setup, 3, plain);
  const std::int64_t elements = setup.shape.blocks * 2 * setup.shape.width * setup.shape.hidden;
  const std::int64_t gathers = reshard ? 2 : 1;
  for (const auto& step : trained.traffic) {
    EXPECT_EQ(step.broadcast_bytes, gathers * (ranks - 1) * elements * (mixed ? 2 : 4));
    EXPECT_EQ(step.reduce_bytes, (ranks - 1) * elements * 4);
    if (ranks == 1) continue;
    EXPECT_EQ(step.broadcast_calls, gathers * ranks * setup.shape.blocks);
    EXPECT_EQ(step.reduce_calls, ranks * setup.shape.blocks);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Traffic,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool(), ::testing::Bool()));

}  // namespace
}  // namespace dmuon
