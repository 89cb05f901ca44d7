// Accuracy of the iteration against the plain fp64 polynomial.  fp16 storage is tested on the CPU, whose products also
// accumulate in fp32.
#include "newton_schulz/iteration.h"

#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "newton_schulz/matrices.h"
#include "newton_schulz/normalize.h"

namespace dmuon {
namespace {

using testing::reference_polynomial;
using testing::relative_error;
using testing::same_bits;
using testing::spectral_norm;

// fp32 storage rounds 2^13 times finer than fp16, but its products of K terms then err by 4 sqrt(K) units as well.
double half_to_float(std::int64_t terms) { return (1.0 + 4.0 * std::sqrt(static_cast<double>(terms))) / 8192.0; }

struct Criteria {
  const char* name;
  std::vector<int> restarts;
  double error;                   // relative, log-spaced up to any condition and Gaussian
  double error_well_conditioned;  // up to condition 100
  double overshoot;               // of the largest singular value
};

const Criteria kCriteria[] = {
    {"standard", {1, 2, 3, 4}, 2e-2, 5e-3, 0.01},
    {"gram", {2}, 5e-2, 5e-2, 0.06},
    {"gram_accurate", {2, 4}, 2e-2, 2e-2, 0.01},
};

struct Case {
  testing::Spectrum spectrum;
  std::vector<NsCoefficients> steps;
  at::Tensor exact;
};

void expect_within(const Criteria& criteria, const Case& test, at::ScalarType dtype, double scale) {
  const auto& [spectrum, steps, exact] = test;
  const int prescale = dtype == at::kHalf ? 4 : 0;
  const at::Tensor found = iterate(normalize(spectrum.matrix, dtype, prescale), steps, criteria.restarts, prescale);
  ASSERT_EQ(found.scalar_type(), dtype);
  ASSERT_TRUE(found.isfinite().all().item<bool>());
  EXPECT_LE(spectral_norm(found), spectral_norm(exact) + criteria.overshoot);
  const bool full_rank = spectrum.condition > 0.0 || spectrum.name == "gaussian";
  if (!full_rank) return;  // elsewhere the error is amplified noise in directions that should be zero
  const double limit = spectrum.condition > 100.0 ? criteria.error : criteria.error_well_conditioned;
  EXPECT_LE(relative_error(found, exact), limit * scale);
}

void expect_all_within(const std::string& set, at::ScalarType dtype, const std::vector<testing::Spectrum>& spectra,
                       double scale) {
  const std::vector<NsCoefficients> steps = coefficient_set(set, 5);
  for (const testing::Spectrum& spectrum : spectra) {
    const Case test{spectrum, steps, reference_polynomial(spectrum.matrix, steps)};
    for (const Criteria& criteria : kCriteria) {
      SCOPED_TRACE(set + ", " + criteria.name + ", " + spectrum.name);
      expect_within(criteria, test, dtype, scale);
    }
  }
}

TEST(Iteration, HalfPolarExpressFollowsTheExactPolynomial) {
  expect_all_within("polar_express", at::kHalf, testing::stress_spectra(256, 704), 1.0);
}

TEST(Iteration, HalfFollowsTheExactPolynomialInEverySet) {
  for (const char* set : {"you", "keller_jordan"}) {
    expect_all_within(set, at::kHalf, testing::stress_spectra(96, 264), 1.0);
  }
}

TEST(Iteration, HalfFollowsTheExactPolynomialWhenTall) {
  testing::Matrices make(2);
  expect_all_within("polar_express", at::kHalf,
                    {{"gaussian", make.gaussian(264, 96)}, {"log", make.log_spaced(264, 96, 100), 100}}, 1.0);
}

// Where symmetric products go by block rows: two alike, and three that differ.
TEST(Iteration, LargeMatricesFollowTheExactPolynomial) {
  testing::Matrices make(5);
  const std::vector<NsCoefficients> steps = coefficient_set("polar_express", 2);
  for (const auto& [rows, cols] : {std::pair{1024, 1100}, {1601, 1537}}) {
    const at::Tensor matrix = make.gaussian(rows, cols);
    const at::Tensor exact = reference_polynomial(matrix, steps);
    const at::Tensor start = normalize(matrix.to(at::kDouble), at::kDouble, 2);
    for (const std::vector<int>& restarts : {std::vector<int>{}, {1}}) {
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols) + ", restarts " +
                   std::to_string(restarts.size()));
      const at::Tensor found = iterate(start, steps, restarts, 2);
      EXPECT_LE(relative_error(found, exact), 1e-9);
      EXPECT_LE(relative_error(iterate(start.unsqueeze(0), steps, restarts, 2).squeeze(0), exact), 1e-9);
    }
  }
}

// The same again in a batch, where a matrix must not get what is another's.
TEST(Iteration, LargeMatricesOfABatchStayApart) {
  testing::Matrices make(6);
  const std::vector<NsCoefficients> steps = coefficient_set("polar_express", 2);
  const std::vector<at::Tensor> list = {make.gaussian(1030, 1040), make.gaussian(1030, 1040)};
  std::vector<at::Tensor> starts;
  for (const at::Tensor& x : list) starts.push_back(normalize(x.to(at::kDouble), at::kDouble, 0));
  const at::Tensor found = iterate(at::stack(starts), steps, std::vector<int>{1}, 0);
  for (std::int64_t i = 0; i < 2; ++i) {
    EXPECT_LE(relative_error(found[i], reference_polynomial(list[static_cast<std::size_t>(i)], steps)), 1e-9) << i;
  }
}

TEST(Iteration, FloatFollowsTheExactPolynomial) {
  for (const char* set : {"polar_express", "you", "keller_jordan"}) {
    expect_all_within(set, at::kFloat, testing::stress_spectra(96, 264), half_to_float(264));
    expect_all_within(set, at::kFloat, testing::stress_spectra(128, 128), half_to_float(128));
  }
}

TEST(Iteration, PrescaleChangesNoBitOfAFloatResult) {
  testing::Matrices make(3);
  const std::vector<NsCoefficients> steps = coefficient_set("polar_express", 5);
  for (const std::vector<int>& restarts : {std::vector<int>{}, {1}, {2}, {2, 4}, {1, 2, 3, 4}}) {
    const at::Tensor x = make.gaussian(24, 70);
    const at::Tensor plain = iterate(normalize(x, at::kFloat, 0), steps, restarts, 0);
    for (int prescale = 1; prescale <= 6; ++prescale) {
      EXPECT_TRUE(same_bits(iterate(normalize(x, at::kFloat, prescale), steps, restarts, prescale), plain)) << prescale;
    }
  }
}

TEST(Iteration, PrescaleKeepsTheSmallEntriesOfLargeHalfMatrices) {
  const std::vector<NsCoefficients> steps = coefficient_set("polar_express", 5);
  const std::vector<int> restarts = {3};
  const at::Tensor x = testing::Matrices(4).gaussian(96, 264);
  const at::Tensor exact = reference_polynomial(x, steps);
  // 2^-6 times the normalised matrix has entries as small as those of one with 64 times the rows and columns.
  const double without = relative_error(iterate(normalize(x, at::kHalf, -6), steps, restarts, -6), exact);
  const double with = relative_error(iterate(normalize(x, at::kHalf, -2), steps, restarts, -2), exact);
  EXPECT_GT(without, 5.0 * with);
}

TEST(Iteration, BatchEqualsItsMatrices) {
  testing::Matrices make(5);
  const std::vector<NsCoefficients> steps = coefficient_set("you", 5);
  const std::vector<int> restarts = {2};
  std::vector<at::Tensor> inputs;
  for (int i = 0; i < 3; ++i) inputs.push_back(normalize(make.gaussian(70, 24), at::kFloat, 0));
  const at::Tensor batch = iterate(at::stack(inputs), steps, restarts, 0);
  for (int i = 0; i < 3; ++i) EXPECT_LE(relative_error(batch[i], iterate(inputs[i], steps, restarts, 0)), 1e-5);
}

TEST(Iteration, RestartsOutsideTheStepsDoNothing) {
  const at::Tensor x = normalize(testing::Matrices(6).gaussian(24, 70), at::kFloat, 0);
  const std::vector<NsCoefficients> steps = coefficient_set("you", 4);
  const std::vector<int> inside = {2};
  const std::vector<int> more = {9, 4, 2, 0};
  EXPECT_TRUE(same_bits(iterate(x, steps, inside, 0), iterate(x, steps, more, 0)));
}

}  // namespace
}  // namespace dmuon
