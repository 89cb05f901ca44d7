#include "dmuon/newton_schulz.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "newton_schulz/matrices.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using testing::compose;
using ::testing::HasSubstr;
using testing::Matrices;
using testing::reference_polynomial;
using testing::relative_error;
using testing::same_bits;

constexpr double kRounding = 5e-5;  // fp32 Gram: a rounding of the input comes out about 500 times larger

const char* const kBackends[] = {"gram", "gram_accurate", "standard"};
const char* const kSets[] = {"polar_express", "you", "keller_jordan"};

at::Tensor orthogonalize(const at::Tensor& x, const NsOptions& options) { return newton_schulz({x}, options)[0]; }

at::Tensor orthogonalize(const at::Tensor& x) { return orthogonalize(x, make_ns_options("gram", 5, "polar_express")); }

std::string error_of(const std::vector<at::Tensor>& matrices, const NsOptions& options) {
  try {
    (void)newton_schulz(matrices, options);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(NewtonSchulz, MatchesThePolynomialForEveryShape) {
  Matrices make(11);
  for (const auto& [rows, cols] : {std::pair{40, 104}, {104, 40}, {64, 64}, {64, 72}, {1, 9}, {9, 1}, {1, 1}}) {
    for (const char* backend : kBackends) {
      for (const char* set : kSets) {
        const NsOptions options = make_ns_options(backend, 5, set);
        const at::Tensor x = make.gaussian(rows, cols);
        const double error = relative_error(orthogonalize(x, options), reference_polynomial(x, options.coefficients));
        EXPECT_LE(error, kRounding) << rows << " x " << cols << " " << backend << " " << set;
      }
    }
  }
}

// U^T NS(X) V is diagonal, and its diagonal is the composed polynomial of the singular values.
TEST(NewtonSchulz, KeepsSingularVectorsAndMapsSingularValues) {
  for (const testing::Spectrum& spectrum : testing::stress_spectra(48, 132)) {
    const NsOptions options = make_ns_options("gram", 5, "polar_express");
    const at::Tensor x = spectrum.matrix.to(at::kDouble);
    const double norm = std::max(x.norm().item<double>(), std::numeric_limits<double>::min());
    const auto [u, sigma, vt] = at::linalg_svd(x, /*full_matrices=*/false);
    const at::Tensor found = u.mT().mm(orthogonalize(spectrum.matrix, options).to(at::kDouble)).mm(vt.mT());
    at::Tensor expected = sigma / norm;
    for (const auto& [a, b, c] : options.coefficients) {
      expected = a * expected + b * expected.pow(3) + c * expected.pow(5);
    }
    EXPECT_LE((found - expected.diag()).abs().max().item<double>(), 2e-3) << spectrum.name;
  }
}

TEST(NewtonSchulz, StaysFiniteAndInBandOnTheStressSpectra) {
  for (const testing::Spectrum& spectrum : testing::stress_spectra(64, 176)) {
    for (const double scale : {1.0, 1e-42, 1e-30, 1e26}) {
      for (const char* backend : kBackends) {
        for (const char* set : kSets) {
          const at::Tensor x = orthogonalize(spectrum.matrix * scale, make_ns_options(backend, 5, set));
          ASSERT_TRUE(x.isfinite().all().item<bool>())
              << spectrum.name << " * " << scale << " " << backend << " " << set;
          EXPECT_LE(testing::spectral_norm(x), 1.203)
              << spectrum.name << " * " << scale << " " << backend << " " << set;
        }
      }
    }
  }
}

TEST(NewtonSchulz, DoesExactlyTheStepsItIsGiven) {
  Matrices make(12);
  for (int steps = 1; steps <= 9; ++steps) {
    for (const char* backend : kBackends) {
      const NsOptions options = make_ns_options(backend, steps, "you");
      const at::Tensor x = make.gaussian(32, 90);
      EXPECT_LE(relative_error(orthogonalize(x, options), reference_polynomial(x, options.coefficients)), kRounding)
          << steps << " " << backend;
    }
  }
}

TEST(NewtonSchulz, TakesAnySolvedCoefficients) {
  NsOptions options;
  options.coefficients = solve_coefficients(3e-3, 6);
  const at::Tensor x = orthogonalize(Matrices(13).gaussian(32, 90), options);
  EXPECT_LE((x.mm(x.mT()) - at::eye(32)).abs().max().item<double>(), 1e-4);
}

TEST(NewtonSchulz, DoesNotDependOnTheScale) {
  Matrices make(14);
  for (const auto& [rows, cols] : {std::pair{32, 90}, {64, 64}}) {
    const at::Tensor x = make.gaussian(rows, cols);
    const at::Tensor plain = orthogonalize(x);
    for (const double scale : {1e-20, 1e-8, 1e8, 1e20}) {
      EXPECT_LE(relative_error(orthogonalize(x * scale), plain), kRounding) << scale;
    }
    for (const int exponent : {-60, -3, 1, 60}) {
      EXPECT_TRUE(same_bits(orthogonalize(x * std::ldexp(1.0, exponent)), plain)) << exponent;
    }
    const at::Tensor wide_range = x.to(at::kDouble) * 1e200;
    EXPECT_LE(relative_error(orthogonalize(wide_range), plain), kRounding);
  }
}

TEST(NewtonSchulz, GivesZeroForZero) {
  for (const char* backend : kBackends) {
    const at::Tensor x = orthogonalize(at::zeros({16, 40}), make_ns_options(backend, 5, "polar_express"));
    EXPECT_TRUE(same_bits(x, at::zeros({16, 40}))) << backend;
  }
}

TEST(NewtonSchulz, GivesTheTransposeForTheTranspose) {
  const at::Tensor x = Matrices(15).gaussian(32, 90);
  EXPECT_LE(relative_error(orthogonalize(x.mT()), orthogonalize(x).mT()), kRounding);
}

// Property: any list order, any company.
TEST(NewtonSchulz, GivesTheSameBitsAnywhereInAnyList) {
  Matrices make(16);
  std::mt19937_64 random(16);
  std::vector<at::Tensor> matrices;
  for (const auto& [rows, cols] : {std::pair{32, 90}, {90, 32}, {48, 48}, {16, 24}}) {
    for (int i = 0; i < 4; ++i) matrices.push_back(make.gaussian(rows, cols));
  }
  const NsOptions options = make_ns_options("gram", 5, "polar_express");
  std::vector<at::Tensor> alone;
  for (const at::Tensor& matrix : matrices) alone.push_back(orthogonalize(matrix, options));
  std::vector<std::size_t> order(matrices.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int trial = 0; trial < 20; ++trial) {
    std::shuffle(order.begin(), order.end(), random);
    const std::size_t count = 1 + random() % order.size();
    std::vector<at::Tensor> list;
    for (std::size_t i = 0; i < count; ++i) list.push_back(matrices[order[i]]);
    const std::vector<at::Tensor> found = newton_schulz(list, options);
    for (std::size_t i = 0; i < count; ++i) EXPECT_TRUE(same_bits(found[i], alone[order[i]])) << trial << " " << i;
  }
}

TEST(NewtonSchulz, KeepsNanAndInfInTheirMatrix) {
  Matrices make(17);
  std::vector<at::Tensor> matrices;
  for (int i = 0; i < 4; ++i) matrices.push_back(make.gaussian(16, 40));
  const NsOptions options = make_ns_options("gram", 5, "polar_express");
  const std::vector<at::Tensor> clean = newton_schulz(matrices, options);
  matrices[1][3][7] = std::nan("");
  matrices[2][0][0] = std::numeric_limits<float>::infinity();
  const std::vector<at::Tensor> found = newton_schulz(matrices, options);
  EXPECT_TRUE(same_bits(found[0], clean[0]));
  EXPECT_TRUE(found[1].isnan().all().item<bool>());
  EXPECT_TRUE(found[2].isnan().all().item<bool>());
  EXPECT_TRUE(same_bits(found[3], clean[3]));
}

TEST(NewtonSchulz, LeavesItsInputsAndKeepsShapeAndDtype) {
  Matrices make(18);
  const at::Tensor x = make.gaussian(16, 40);
  const std::pair<at::ScalarType, double> cases[] = {
      {at::kFloat, kRounding}, {at::kDouble, kRounding}, {at::kBFloat16, 8e-3}, {at::kHalf, 1e-3}};
  for (const auto& [dtype, tolerance] : cases) {
    const at::Tensor input = x.to(dtype, /*non_blocking=*/false, /*copy=*/true);
    const at::Tensor before = input.clone();
    const at::Tensor found = orthogonalize(input);
    EXPECT_EQ(found.scalar_type(), dtype);
    EXPECT_EQ(found.sizes(), input.sizes());
    EXPECT_TRUE(same_bits(input, before));
    EXPECT_LE(relative_error(found, orthogonalize(before.to(at::kFloat))), tolerance) << dtype;
  }
}

TEST(NewtonSchulz, TakesStridedViews) {
  const at::Tensor base = Matrices(19).gaussian(40, 64);
  const at::Tensor view = base.slice(0, 0, 40, 2).slice(1, 1, 64, 2);
  EXPECT_TRUE(same_bits(orthogonalize(view), orthogonalize(view.contiguous())));
  EXPECT_LE(relative_error(orthogonalize(base.mT()), orthogonalize(base.mT().contiguous())), kRounding);
}

TEST(NewtonSchulz, IgnoresAutogradAndAutocast) {
  const at::Tensor x = Matrices(20).gaussian(16, 40);
  const at::Tensor plain = orthogonalize(x);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor found = orthogonalize(x.clone().requires_grad_());
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_TRUE(same_bits(found, plain));
  EXPECT_FALSE(found.requires_grad());
}

TEST(NewtonSchulz, TakesEmptyListsAndMatrices) {
  const NsOptions options = make_ns_options("gram", 5, "you");
  EXPECT_TRUE(newton_schulz({}, options).empty());
  EXPECT_EQ(orthogonalize(at::zeros({0, 5}), options).sizes(), at::IntArrayRef({0, 5}));
  EXPECT_EQ(orthogonalize(at::zeros({5, 0}), options).sizes(), at::IntArrayRef({5, 0}));
}

TEST(NewtonSchulz, SaysWhatItExpects) {
  const NsOptions good = make_ns_options("gram", 5, "you");
  const at::Tensor x = at::zeros({4, 4});
  EXPECT_THAT(error_of({x, at::zeros({2, 3, 4})}, good), AllOf(HasSubstr("matrix 1"), HasSubstr("[2, 3, 4]")));
  EXPECT_THAT(error_of({x, at::Tensor()}, good), AllOf(HasSubstr("matrix 1"), HasSubstr("undefined")));
  EXPECT_THAT(error_of({at::zeros({4, 4}, at::kInt)}, good), AllOf(HasSubstr("matrix 0"), HasSubstr("Int")));
  EXPECT_THAT(error_of({x}, NsOptions{}), HasSubstr("coefficients is empty"));
  NsOptions bad = good;
  bad.restarts = {0};
  EXPECT_THAT(error_of({x}, bad), HasSubstr("restart 0"));
}

TEST(UsesGram, LooksAtTheAspectRatio) {
  EXPECT_FALSE(uses_gram(100, 100));
  EXPECT_FALSE(uses_gram(100, 129));
  EXPECT_TRUE(uses_gram(100, 130));
  EXPECT_TRUE(uses_gram(130, 100));
}

}  // namespace
}  // namespace dmuon
