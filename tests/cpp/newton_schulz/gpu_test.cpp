// The CUDA path.  Without a GPU these skip, or fail when DMUON_REQUIRE_GPU=1.
#include "gpu.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string_view>

#include "dmuon/muon.h"
#include "dmuon/newton_schulz.h"
#include "newton_schulz/iteration.h"
#include "newton_schulz/matrices.h"
#include "newton_schulz/normalize.h"

namespace dmuon {
namespace {

using testing::Matrices;
using testing::reference_polynomial;
using testing::relative_error;
using testing::same_bits;

constexpr double kHalfRounding = 1.0 / 2048.0;

class NewtonSchulzOnGpu : public testing::OnGpu {};

at::Tensor orthogonalize(const at::Tensor& x, const NsOptions& options) { return newton_schulz({x}, options)[0].cpu(); }

std::vector<at::Tensor> gaussians(Matrices& make, int count, std::int64_t rows, std::int64_t cols) {
  std::vector<at::Tensor> list;
  for (int i = 0; i < count; ++i) list.push_back(make.gaussian(rows, cols).to(at::kCUDA));
  return list;
}

// Shapes: one thread block and many, whole vectors and a tail; the last one's shares are longer than the least.
TEST_F(NewtonSchulzOnGpu, FusedNormalisationAgreesWithAten) {
  Matrices make(31);
  for (const auto& [rows, cols] : {std::pair{1, 1}, {3, 5}, {64, 64}, {100, 333}, {1111, 1237}, {3001, 2803}}) {
    for (const double scale : {1.0, 1e-20, 1e20}) {
      std::vector<at::Tensor> list = gaussians(make, 3, rows, cols);
      for (at::Tensor& x : list) x.mul_(scale);
      const at::Tensor found = normalize_to_half_batch(list, 4);
      const at::Tensor expected = normalize(at::stack(list), at::kFloat, 4);
      EXPECT_EQ(found.scalar_type(), at::kHalf);
      const at::Tensor error = (found.to(at::kFloat) - expected).abs() - kHalfRounding * expected.abs();
      EXPECT_LE(error.max().item<double>(), 6e-8) << rows << " x " << cols << " * " << scale;
    }
  }
}

TEST_F(NewtonSchulzOnGpu, NormalisationGivesTheSameBitsAtAnyPlaceAndAlignment) {
  Matrices make(32);
  std::vector<at::Tensor> list = gaussians(make, 200, 17, 31);
  const at::Tensor odd = make.gaussian(1, 17 * 31 + 1).to(at::kCUDA);
  odd[0].narrow(0, 1, 17 * 31).copy_(list[0].flatten());
  list.push_back(odd[0].narrow(0, 1, 17 * 31).view({17, 31}));  // not 16-byte aligned
  const at::Tensor found = normalize_to_half_batch(list, 4);
  EXPECT_TRUE(same_bits(found[200], found[0]));
  for (const int i : {0, 1, 127, 128, 199})
    EXPECT_TRUE(same_bits(normalize_to_half_batch({list[i]}, 4)[0], found[i])) << i;
  for (at::Tensor& x : list) x = x * std::ldexp(1.0, -40);
  EXPECT_TRUE(same_bits(normalize_to_half_batch(list, 4), found));
}

// Few matrices get their 16-bit results from the products, many and odd ones from a pass of their own.
TEST_F(NewtonSchulzOnGpu, ResultsInSixteenBitsDoNotDependOnWhoWritesThem) {
  Matrices make(33);
  NsOptions options;
  options.coefficients = coefficient_set("polar_express", 5);
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    for (const auto& [rows, cols] : {std::pair{64, 64}, {200, 520}, {520, 200}, {300, 304}}) {
      std::vector<at::Tensor> list = gaussians(make, 20, rows, cols);
      for (at::Tensor& x : list) x = x.to(dtype);
      const std::vector<at::Tensor> many = newton_schulz(list, options);
      EXPECT_EQ(many[0].scalar_type(), dtype);
      for (const std::size_t i : {0, 19}) {
        EXPECT_TRUE(same_bits(newton_schulz({list[i]}, options)[0], many[i])) << rows << " x " << cols;
        const at::Tensor odd = make.gaussian(3, 5).to(at::kCUDA).to(dtype);
        EXPECT_TRUE(same_bits(newton_schulz({list[i], odd}, options)[0], many[i])) << rows << " x " << cols;
      }
    }
  }
}

TEST_F(NewtonSchulzOnGpu, MeetsTheCriteriaOnTheStressSpectra) {
  for (const testing::Spectrum& spectrum : testing::stress_spectra(512, 1408)) {
    for (const char* backend : {"gram", "gram_accurate", "standard"}) {
      const NsOptions options = make_ns_options(backend, 5, "polar_express");
      const bool gram = std::string_view(backend) == "gram";
      const at::Tensor exact = reference_polynomial(spectrum.matrix, options.coefficients);
      for (const double scale : {1.0, 1e-42, 1e26}) {
        SCOPED_TRACE(spectrum.name + " " + backend + " * " + std::to_string(scale));
        const at::Tensor found = orthogonalize((spectrum.matrix * scale).to(at::kCUDA), options);
        ASSERT_TRUE(found.isfinite().all().item<bool>());
        if (scale < 1e-40) continue;  // the subnormal input itself is rounded
        // A rank-one matrix in few rows is mostly rounding; it is compared with bf16 below.
        if (spectrum.name != "rank one in three rows") {
          EXPECT_LE(testing::spectral_norm(found), testing::spectral_norm(exact) + (gram ? 0.06 : 0.01));
        }
        if (spectrum.condition > 0.0 || spectrum.name == "gaussian") {
          EXPECT_LE(relative_error(found, exact), gram ? 5e-2 : 2e-2);
        }
      }
    }
  }
}

TEST_F(NewtonSchulzOnGpu, IsNeverWorseThanTheStandardIterationInBf16) {
  const std::vector<int> every_step = {1, 2, 3, 4};
  for (const testing::Spectrum& spectrum : testing::stress_spectra(512, 1408)) {
    if (spectrum.name == "zeros") continue;
    for (const char* backend : {"gram", "gram_accurate", "standard"}) {
      const NsOptions options = make_ns_options(backend, 5, "polar_express");
      const at::Tensor exact = reference_polynomial(spectrum.matrix, options.coefficients);
      const at::Tensor start = normalize(spectrum.matrix.to(at::kCUDA), at::kBFloat16, 0);
      const at::Tensor bf16 = iterate(start, options.coefficients, every_step, 0).cpu();
      EXPECT_LE(relative_error(orthogonalize(spectrum.matrix.to(at::kCUDA), options), exact),
                relative_error(bf16, exact))
          << spectrum.name << " " << backend;
    }
  }
}

TEST_F(NewtonSchulzOnGpu, TakesTallSquareAndSmallMatrices) {
  Matrices make(33);
  const NsOptions options = make_ns_options("gram", 5, "polar_express");
  for (const auto& [rows, cols] : {std::pair{1408, 512}, {512, 512}, {9, 7}, {1, 33}, {1, 1}}) {
    const at::Tensor x = make.gaussian(rows, cols);
    const at::Tensor exact = reference_polynomial(x, options.coefficients);
    EXPECT_LE(relative_error(orthogonalize(x.to(at::kCUDA), options), exact), 5e-2) << rows << " x " << cols;
  }
}

TEST_F(NewtonSchulzOnGpu, GivesTheSameBitsAtAnyPlaceInItsBatch) {
  Matrices make(34);
  for (const auto& [rows, cols] : {std::pair{256, 704}, {256, 256}}) {
    const NsOptions options = make_ns_options("gram", 5, "polar_express");
    std::vector<at::Tensor> list = gaussians(make, 6, rows, cols);
    const std::vector<at::Tensor> found = newton_schulz(list, options);
    std::reverse(list.begin(), list.end());
    const std::vector<at::Tensor> reversed = newton_schulz(list, options);
    for (std::size_t i = 0; i < list.size(); ++i) EXPECT_TRUE(same_bits(found[i], reversed[list.size() - 1 - i])) << i;
  }
}

TEST_F(NewtonSchulzOnGpu, GivesTheSameBitsInABatchOfAnySize) {
  Matrices make(35);
  for (const auto& [rows, cols] : {std::pair{256, 704}, {256, 256}, {1024, 1024}, {1024, 4096}}) {
    const NsOptions options = make_ns_options("gram", 5, "polar_express");
    const std::vector<at::Tensor> list = gaussians(make, 6, rows, cols);
    const std::vector<at::Tensor> found = newton_schulz(list, options);
    for (std::size_t i = 0; i < list.size(); ++i) {
      EXPECT_TRUE(same_bits(orthogonalize(list[i], options), found[i].cpu())) << rows << " x " << cols << ", " << i;
    }
  }
}

// Side by side these take tiles of four boxes, half-stored squares and turns (TileWidth in work_list_test.cpp); alone,
// tiles of one box.
TEST_F(NewtonSchulzOnGpu, GivesTheSameBitsFromWideTilesAndNarrowOnes) {
  Matrices make(39);
  const NsOptions options = make_ns_options("gram", 5, "polar_express");
  for (const auto& [rows, cols] : {std::pair{512, 512}, {512, 1024}, {520, 500}}) {
    const std::vector<at::Tensor> list = gaussians(make, 24, rows, cols);
    const std::vector<at::Tensor> found = newton_schulz(list, options);
    for (const std::size_t i : {0, 11, 23}) {
      EXPECT_TRUE(same_bits(orthogonalize(list[i], options), found[i].cpu())) << rows << " x " << cols << ", " << i;
    }
  }
}

// fp64 takes the path of GPUs without kernels of their own; sides from 1024 on go by block rows there.
TEST_F(NewtonSchulzOnGpu, LargeMatricesFollowThePolynomialOnThePlainPath) {
  Matrices make(40);
  const NsOptions options = make_ns_options("gram", 5, "polar_express");
  for (const auto& [rows, cols] : {std::pair{1024, 1100}, {1601, 1100}, {1100, 1601}}) {
    const at::Tensor x = make.gaussian(rows, cols).to(at::kDouble);
    const at::Tensor exact = reference_polynomial(x, options.coefficients);
    EXPECT_LE(relative_error(orthogonalize(x.to(at::kCUDA), options), exact), 5e-2) << rows << " x " << cols;
  }
}

TEST_F(NewtonSchulzOnGpu, KeepsNanAndInfInTheirMatrix) {
  Matrices make(36);
  std::vector<at::Tensor> list = gaussians(make, 4, 64, 176);
  const NsOptions options = make_ns_options("gram", 5, "polar_express");
  const std::vector<at::Tensor> clean = newton_schulz(list, options);
  list[1][3][7] = std::nan("");
  list[2][0][0] = std::numeric_limits<float>::infinity();
  const std::vector<at::Tensor> found = newton_schulz(list, options);
  EXPECT_TRUE(same_bits(found[0], clean[0]));
  EXPECT_FALSE(found[1].isfinite().all().item<bool>());
  EXPECT_FALSE(found[2].isfinite().all().item<bool>());
  EXPECT_TRUE(same_bits(found[3], clean[3]));
}

TEST_F(NewtonSchulzOnGpu, TakesEveryDtype) {
  const NsOptions options = make_ns_options("gram", 5, "polar_express");
  const at::Tensor x = Matrices(37).gaussian(64, 176);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const at::Tensor found = orthogonalize(x.to(dtype).to(at::kCUDA), options);
    EXPECT_EQ(found.scalar_type(), dtype);
    EXPECT_LE(relative_error(found, reference_polynomial(x.to(dtype), options.coefficients)), 5e-2) << dtype;
  }
}

// Random lists: sides of one to five blocks and a bit, odd ones too, any scale; more lists than are kept prepared.
TEST_F(NewtonSchulzOnGpu, FollowsThePolynomialOnRandomListsAtAnyScale) {
  const NsOptions options = make_ns_options("gram", 5, "you");
  std::mt19937_64 random(38);
  for (int round = 0; round < 40; ++round) {
    Matrices make(static_cast<std::uint64_t>(100 + round));
    std::vector<at::Tensor> list;
    for (std::uint64_t i = 0; i <= random() % 4; ++i) {
      const auto side = [&random] { return static_cast<std::int64_t>(1 + random() % (random() % 2 == 0 ? 70 : 700)); };
      const double scale = std::pow(10.0, static_cast<double>(random() % 61) - 30.0);
      list.push_back((make.gaussian(side(), side()) * scale).to(at::kCUDA));
    }
    const std::vector<at::Tensor> found = newton_schulz(list, options);
    for (std::size_t i = 0; i < list.size(); ++i) {
      SCOPED_TRACE("round " + std::to_string(round) + ", " + c10::str(list[i].sizes()));
      EXPECT_LE(relative_error(found[i].cpu(), reference_polynomial(list[i].cpu(), options.coefficients)), 2e-2);
      EXPECT_TRUE(same_bits(orthogonalize(list[i], options), found[i].cpu()));
    }
  }
}

// The fused passes against the CPU's step, and the same bits whatever else is stepped.
TEST_F(NewtonSchulzOnGpu, MuonStepAgreesWithTheCpu) {
  Matrices make(39);
  std::vector<MuonMatrix> on_cpu;
  std::vector<MuonMatrix> on_gpu;
  for (const auto& [rows, cols] : {std::pair{300, 130}, {130, 300}, {256, 256}, {31, 7}, {1, 9}, {300, 130}}) {
    on_cpu.push_back({"w", make.gaussian(rows, cols), make.gaussian(rows, cols), make.gaussian(rows, cols)});
    const MuonMatrix& m = on_cpu.back();
    on_gpu.push_back({"w", m.weight.to(at::kCUDA), m.grad.to(at::kCUDA), m.momentum.to(at::kCUDA)});
  }
  MuonMatrix alone = {"w", on_gpu[1].weight.clone(), on_gpu[1].grad.clone(), on_gpu[1].momentum.clone()};
  for (const bool nesterov : {true, false}) {
    MuonOptions options;
    options.weight_decay = 0.1;
    options.nesterov = nesterov;
    options.ns = make_ns_options("gram", 5, "you");
    (void)muon_step(on_cpu, options);
    const std::int64_t version = on_gpu[0].weight._version();
    for (const at::Tensor& finite : muon_step(on_gpu, options)) EXPECT_TRUE(finite.item<bool>());
    EXPECT_GT(on_gpu[0].weight._version(), version);  // autograd can tell that it changed
    (void)muon_step({alone}, options);
    for (std::size_t i = 0; i < on_cpu.size(); ++i) {
      EXPECT_LE(relative_error(on_gpu[i].momentum.cpu(), on_cpu[i].momentum), 1e-6) << i;
      EXPECT_LE(relative_error(on_gpu[i].weight.cpu(), on_cpu[i].weight), 2e-3) << i;
    }
    EXPECT_TRUE(same_bits(alone.weight, on_gpu[1].weight));
    EXPECT_TRUE(same_bits(alone.momentum, on_gpu[1].momentum));
  }
}

TEST_F(NewtonSchulzOnGpu, MuonStepReportsTheMatrixThatIsNotFinite) {
  Matrices make(40);
  std::vector<MuonMatrix> list;
  for (const auto& [rows, cols] : {std::pair{64, 176}, {300, 130}, {7, 31}}) {
    const auto tensor = [&, r = rows, c = cols] { return make.gaussian(r, c).to(at::kCUDA); };
    list.push_back({"w", tensor(), tensor(), tensor()});
  }
  list[0].grad[3][5] = std::nan("");
  MuonOptions options;
  options.ns = make_ns_options("gram", 5, "polar_express");
  const std::vector<at::Tensor> finite = muon_step(list, options);
  for (std::size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(finite[i].item<bool>(), i != 0) << i;
    EXPECT_EQ(list[i].weight.isfinite().all().item<bool>(), i != 0) << i;
  }
}

}  // namespace
}  // namespace dmuon
