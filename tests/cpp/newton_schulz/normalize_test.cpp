#include "newton_schulz/normalize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "newton_schulz/matrices.h"

namespace dmuon {
namespace {

using testing::Matrices;

double frobenius(const at::Tensor& x) { return x.to(at::kDouble).norm().item<double>(); }

TEST(Normalize, GivesUnitNormTimesThePrescale) {
  Matrices make(41);
  for (const auto& [rows, cols] : {std::pair{1, 1}, {3, 5}, {2048, 2048}, {2, 1 << 16}, {1 << 16, 2}}) {
    const at::Tensor x = make.gaussian(rows, cols);
    for (const double scale : {1.0, 1e-30, 1e30}) {
      EXPECT_NEAR(frobenius(normalize(x * scale, at::kFloat, 0)), 1.0, 2e-6) << rows << " x " << cols << " * " << scale;
      EXPECT_NEAR(frobenius(normalize(x * scale, at::kFloat, 4)), 16.0, 3.2e-5)
          << rows << " x " << cols << " * " << scale;
    }
  }
}

TEST(Normalize, TreatsEachMatrixOfABatchAlone) {
  Matrices make(42);
  at::Tensor batch = at::zeros({5, 6, 9});
  for (int i = 0; i < 5; ++i) batch[i].copy_(make.gaussian(6, 9));
  batch[1].zero_();
  batch[2].mul_(1e25);
  batch[3][2][4] = std::nan("");
  batch[4][0][0] = std::numeric_limits<float>::infinity();
  const at::Tensor found = normalize(batch, at::kFloat, 0);
  EXPECT_NEAR(frobenius(found[0]), 1.0, 1e-6);
  EXPECT_EQ(frobenius(found[1]), 0.0);
  EXPECT_NEAR(frobenius(found[2]), 1.0, 1e-6);
  EXPECT_TRUE(found[3].isnan().all().item<bool>());
  EXPECT_TRUE(found[4].isnan().all().item<bool>());
}

TEST(Normalize, LeavesItsInput) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor x = Matrices(43).gaussian(6, 9).to(dtype);
    const at::Tensor before = x.clone();
    EXPECT_EQ(normalize(x, at::kHalf, 4).scalar_type(), at::kHalf);
    EXPECT_TRUE(testing::same_bits(x, before));
  }
}

}  // namespace
}  // namespace dmuon
