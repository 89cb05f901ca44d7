// RuntimeOptions::reproducible: every mesh of four ranks, and one rank with four micro-batches, give the same bits.
#include <gtest/gtest.h>

#include "runtime/trainer.h"

namespace dmuon {
namespace {

constexpr int kRanks = 4;
constexpr int kSteps = 3;
const Route kAll{0, 1, 2};

TrainSetup make_setup(bool reshard, std::optional<at::ScalarType> param_dtype) {
  TrainSetup setup;
  setup.ranks = kRanks;
  setup.reshard_after_forward = reshard;
  setup.param_dtype = param_dtype;
  setup.reproducible = true;
  setup.trains_rest = false;  // the mean gradient of what is not dedicated is summed in no fixed order
  return setup;
}

Trained train_on_mesh(TrainSetup setup, int replicas) {
  setup.replicas = replicas;
  return train_on_threads(setup, kSteps, [](Trainer& trainer, int) { trainer.backward(trainer.loss(kAll)); });
}

// Micro-batch 1000 r of rank 0 has the data of rank r's micro-batch 0 (trainer.h).  Dividing by four rounds nothing.
Trained train_on_one_rank(TrainSetup setup) {
  setup.ranks = 1;
  return train_on_threads(setup, kSteps, [](Trainer& trainer, int) {
    for (int rank = 0; rank < kRanks; ++rank) trainer.backward(trainer.loss(kAll, 1000 * rank) / kRanks);
  });
}

class Reproducible : public ::testing::TestWithParam<std::tuple<bool, std::optional<at::ScalarType>>> {
 protected:
  const TrainSetup setup_ = make_setup(std::get<0>(GetParam()), std::get<1>(GetParam()));
};

TEST_P(Reproducible, GivesTheSameBitsOnEveryMesh) {
  const auto expected = train_on_one_rank(setup_);
  EXPECT_EQ(expected.stepped.back().size(), 6U);
  for (const int replicas : {1, 2, 4}) {
    SCOPED_TRACE(c10::str(replicas, "x", kRanks / replicas));
    expect_same_bits(train_on_mesh(setup_, replicas), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, Reproducible,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(std::nullopt, at::kBFloat16)),
                         [](const auto& mode) {
                           return std::string(std::get<0>(mode.param) ? "Z3" : "Z2") +
                                  (std::get<1>(mode.param) ? "BFloat16" : "Float");
                         });

// Else the test above would show nothing.
TEST(ReproducibleSums, DifferFromOrdinaryOnes) {
  auto setup = make_setup(true, std::nullopt);
  const auto fixed = train_on_mesh(setup, 1);
  setup.reproducible = false;
  const auto ordinary = train_on_mesh(setup, 1);
  EXPECT_FALSE(at::equal(fixed.weights.at("blocks.0.up"), ordinary.weights.at("blocks.0.up")));
  EXPECT_LE(relative_error(fixed, ordinary), 1e-5);
}

TEST(ReproducibleSums, NeedAShardGroupOfAPowerOfTwoUnderReplicas) {
  auto setup = make_setup(true, std::nullopt);
  setup.ranks = 6;
  EXPECT_THROW(static_cast<void>(train_on_mesh(setup, 2)), std::runtime_error);
}

}  // namespace
}  // namespace dmuon
