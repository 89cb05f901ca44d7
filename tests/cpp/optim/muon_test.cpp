#include "dmuon/muon.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class MuonStep : public ::testing::Test {
 protected:
  at::Tensor gaussian(std::int64_t rows, std::int64_t cols) {
    return at::randn({rows, cols}, generator_, at::TensorOptions(at::kFloat));
  }

  MuonMatrix matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    return {name, gaussian(rows, cols), gaussian(rows, cols), gaussian(rows, cols)};
  }

  at::Generator generator_ = at::detail::createCPUGenerator(5);
};

MuonOptions default_options() {
  MuonOptions options;
  options.ns = make_ns_options("gram", 5, "polar_express");
  return options;
}

MuonMatrix copy(const MuonMatrix& m) { return {m.name, m.weight.clone(), m.grad.clone(), m.momentum.clone()}; }

bool same_bits(const at::Tensor& x, const at::Tensor& y) {
  return x.sizes() == y.sizes() && std::memcmp(x.contiguous().const_data_ptr(), y.contiguous().const_data_ptr(),
                                               static_cast<std::size_t>(x.numel()) * sizeof(float)) == 0;
}

bool same_bits(const MuonMatrix& x, const MuonMatrix& y) {
  return same_bits(x.weight, y.weight) && same_bits(x.grad, y.grad) && same_bits(x.momentum, y.momentum);
}

double relative_error(const at::Tensor& x, const at::Tensor& expected) {
  return ((x.to(at::kDouble) - expected).norm() / expected.norm()).item<double>();
}

// The formula in fp64, written out: no batches, no Gram matrix form.
struct PlainMuon {
  at::Tensor weight;
  at::Tensor momentum;

  void step(const at::Tensor& grad, const MuonOptions& options) {
    momentum = options.momentum * momentum + grad;
    at::Tensor x = options.nesterov ? grad + options.momentum * momentum : momentum;
    x = x / x.norm();
    for (const auto& [a, b, c] : options.ns.coefficients) {
      const at::Tensor gram = x.mm(x.mT());
      x = a * x + b * gram.mm(x) + c * gram.mm(gram).mm(x);
    }
    const auto rows = static_cast<double>(weight.size(0));
    const auto cols = static_cast<double>(weight.size(1));
    const double scale = options.adjust_lr == AdjustLr::kOriginal ? std::sqrt(std::max(1.0, rows / cols))
                                                                  : 0.2 * std::sqrt(std::max(rows, cols));
    weight = weight * (1.0 - options.lr * options.weight_decay) - options.lr * scale * x;
  }
};

std::string error_of(const std::vector<MuonMatrix>& matrices, const MuonOptions& options) {
  try {
    (void)muon_step(matrices, options);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST_F(MuonStep, FollowsTheFormulaForSeveralSteps) {
  for (const double momentum : {0.0, 0.95}) {
    for (const bool nesterov : {true, false}) {
      for (const double weight_decay : {0.0, 0.1}) {
        for (const AdjustLr adjust_lr : {AdjustLr::kOriginal, AdjustLr::kMatchRmsAdamw}) {
          MuonOptions options = default_options();
          options.momentum = momentum;
          options.nesterov = nesterov;
          options.weight_decay = weight_decay;
          options.adjust_lr = adjust_lr;
          std::vector<MuonMatrix> matrices = {matrix("a", 24, 64), matrix("b", 64, 24), matrix("c", 24, 64),
                                              matrix("d", 32, 32), matrix("e", 24, 64)};
          std::vector<PlainMuon> plain;
          for (const MuonMatrix& m : matrices) plain.push_back({m.weight.to(at::kDouble), m.momentum.to(at::kDouble)});
          for (int step = 0; step < 5; ++step) {
            for (std::size_t i = 0; i < matrices.size(); ++i) {
              matrices[i].grad.copy_(gaussian(matrices[i].grad.size(0), matrices[i].grad.size(1)));
              plain[i].step(matrices[i].grad.to(at::kDouble), options);
            }
            for (const at::Tensor& finite : muon_step(matrices, options)) EXPECT_TRUE(finite.item<bool>());
          }
          for (std::size_t i = 0; i < matrices.size(); ++i) {
            EXPECT_LE(relative_error(matrices[i].weight, plain[i].weight), 1e-6) << matrices[i].name;
            EXPECT_LE(relative_error(matrices[i].momentum, plain[i].momentum), 1e-6) << matrices[i].name;
          }
        }
      }
    }
  }
}

TEST_F(MuonStep, GivesTheSameBitsAloneAndTogetherInAnyOrder) {
  const MuonOptions options = default_options();
  std::vector<MuonMatrix> together;
  for (int i = 0; i < 5; ++i) together.push_back(matrix("wide", 24, 64));
  for (int i = 0; i < 3; ++i) together.push_back(matrix("tall", 64, 24));
  std::vector<MuonMatrix> alone;
  std::vector<MuonMatrix> reversed;
  for (const MuonMatrix& m : together) alone.push_back(copy(m));
  for (const MuonMatrix& m : together) reversed.insert(reversed.begin(), copy(m));
  (void)muon_step(together, options);
  (void)muon_step(reversed, options);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    (void)muon_step({alone[i]}, options);
    EXPECT_TRUE(same_bits(alone[i], together[i])) << i;
    EXPECT_TRUE(same_bits(alone[i], reversed[alone.size() - 1 - i])) << i;
  }
}

TEST_F(MuonStep, LeavesTheGradientAndUpdatesInPlace) {
  MuonMatrix m = matrix("a", 24, 64);
  m.weight.requires_grad_();
  const MuonMatrix before = {m.name, m.weight.detach().clone(), m.grad.clone(), m.momentum.clone()};
  const void* storage = m.weight.const_data_ptr();
  (void)muon_step({m}, default_options());
  EXPECT_TRUE(same_bits(m.grad, before.grad));
  EXPECT_EQ(m.weight.const_data_ptr(), storage);
  EXPECT_FALSE(same_bits(m.weight.detach(), before.weight));
  EXPECT_FALSE(same_bits(m.momentum, before.momentum));
}

TEST_F(MuonStep, UpdatesStridedViews) {
  const MuonOptions options = default_options();
  const at::Tensor storage = gaussian(64, 24);
  MuonMatrix view = {"view", storage.mT(), gaussian(24, 64), gaussian(24, 64)};
  MuonMatrix dense = {"dense", storage.mT().contiguous(), view.grad.clone(), view.momentum.clone()};
  (void)muon_step({view, dense}, options);
  EXPECT_TRUE(same_bits(storage.mT(), dense.weight));
}

TEST_F(MuonStep, DoesNotDependOnTheGradientsScale) {
  MuonOptions options = default_options();
  MuonMatrix m = matrix("a", 24, 64);
  m.momentum.zero_();
  for (const double scale : {1e-8, 1e8}) {
    MuonMatrix plain = copy(m);
    MuonMatrix scaled = copy(m);
    scaled.grad.mul_(scale);
    (void)muon_step({plain}, options);
    (void)muon_step({scaled}, options);
    EXPECT_LE(relative_error(scaled.weight, plain.weight.to(at::kDouble)), 1e-6) << scale;
  }
}

TEST_F(MuonStep, ZeroGradientOnlyDecays) {
  MuonOptions options = default_options();
  options.weight_decay = 0.5;
  MuonMatrix m = matrix("a", 24, 64);
  m.grad.zero_();
  m.momentum.zero_();
  const at::Tensor expected = m.weight * (1.0 - options.lr * options.weight_decay);
  EXPECT_TRUE(muon_step({m}, options)[0].item<bool>());
  EXPECT_TRUE(same_bits(m.weight, expected));
}

TEST_F(MuonStep, ReportsAndIsolatesNanAndInf) {
  const MuonOptions options = default_options();
  std::vector<MuonMatrix> matrices;
  for (int i = 0; i < 4; ++i) matrices.push_back(matrix(std::to_string(i), 24, 64));
  std::vector<MuonMatrix> clean;
  for (const MuonMatrix& m : matrices) clean.push_back(copy(m));
  matrices[1].grad[0][0] = std::nan("");
  matrices[3].momentum[5][5] = std::numeric_limits<float>::infinity();
  const std::vector<at::Tensor> finite = muon_step(matrices, options);
  (void)muon_step(clean, options);
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    EXPECT_EQ(finite[i].scalar_type(), at::kBool);
    EXPECT_EQ(finite[i].dim(), 0);
    EXPECT_EQ(finite[i].item<bool>(), i % 2 == 0) << i;
    EXPECT_EQ(same_bits(matrices[i].weight, clean[i].weight), i % 2 == 0) << i;
  }
}

TEST_F(MuonStep, TakesAnEmptyList) { EXPECT_TRUE(muon_step({}, default_options()).empty()); }

TEST_F(MuonStep, NamesTheMatrixAndChangesNothingWhenOneDoesNotFit) {
  const MuonMatrix good = matrix("layers.0.wq", 24, 64);
  const MuonMatrix before = copy(good);
  const auto bad = [this](const auto& change) {
    MuonMatrix m = matrix("layers.1.wo", 24, 64);
    change(m);
    return m;
  };
  const std::pair<MuonMatrix, std::vector<std::string>> cases[] = {
      {bad([](MuonMatrix& m) { m.grad = at::Tensor(); }), {"'layers.1.wo' has no grad"}},
      {bad([](MuonMatrix& m) { m.momentum = at::Tensor(); }), {"'layers.1.wo' has no momentum"}},
      {bad([](MuonMatrix& m) { m.weight = at::Tensor(); }), {"'layers.1.wo' has no weight"}},
      {bad([](MuonMatrix& m) {
         m.grad = at::zeros({64, 24});
       }),
       {"grad of 'layers.1.wo'", "[64, 24]", "[24, 64]"}},
      {bad([](MuonMatrix& m) {
         m.momentum = at::zeros({24, 1});
       }),
       {"momentum of 'layers.1.wo'", "[24, 1]"}},
      {bad([](MuonMatrix& m) { m.weight = at::zeros({24}); }), {"weight of 'layers.1.wo'", "[24]", "[rows, cols]"}},
      {bad([](MuonMatrix& m) { m.grad = m.grad.to(at::kBFloat16); }), {"grad of 'layers.1.wo'", "BFloat16", "float32"}},
      {bad([](MuonMatrix& m) { m.weight = m.weight.to(at::kDouble); }), {"weight of 'layers.1.wo'", "Double"}},
      {bad([](MuonMatrix& m) { m.grad = m.grad.to(at::kMeta); }), {"grad of 'layers.1.wo'", "meta", "cpu"}},
  };
  for (const auto& [wrong, words] : cases) {
    const std::string error = error_of({good, wrong}, default_options());
    for (const std::string& word : words) EXPECT_THAT(error, HasSubstr(word));
    EXPECT_TRUE(same_bits(good, before)) << error;
  }
}

TEST_F(MuonStep, ChangesNothingWhenAnOptionIsWrong) {
  const MuonMatrix good = matrix("layers.0.wq", 24, 64);
  const MuonMatrix before = copy(good);
  const auto expect_error = [&](const auto& change, const std::string& word) {
    MuonOptions options = default_options();
    change(options);
    EXPECT_THAT(error_of({good}, options), HasSubstr(word));
    EXPECT_TRUE(same_bits(good, before)) << word;
  };
  expect_error([](MuonOptions& o) { o.lr = -1.0; }, "lr is -1");
  expect_error([](MuonOptions& o) { o.lr = std::nan(""); }, "lr is nan");
  expect_error([](MuonOptions& o) { o.momentum = 1.0; }, "momentum is 1");
  expect_error([](MuonOptions& o) { o.weight_decay = -0.1; }, "weight_decay is -0.1");
  expect_error([](MuonOptions& o) { o.ns.coefficients.clear(); }, "coefficients is empty");
  expect_error([](MuonOptions& o) { o.ns.restarts = {0}; }, "restart 0");
}

TEST(LrScale, HasTwoModes) {
  EXPECT_EQ(parse_adjust_lr("original"), AdjustLr::kOriginal);
  EXPECT_EQ(parse_adjust_lr("match_rms_adamw"), AdjustLr::kMatchRmsAdamw);
  EXPECT_DOUBLE_EQ(lr_scale(AdjustLr::kOriginal, 400, 100), 2.0);
  EXPECT_DOUBLE_EQ(lr_scale(AdjustLr::kOriginal, 100, 400), 1.0);
  EXPECT_DOUBLE_EQ(lr_scale(AdjustLr::kMatchRmsAdamw, 400, 100), 4.0);
  EXPECT_DOUBLE_EQ(lr_scale(AdjustLr::kMatchRmsAdamw, 100, 400), 4.0);
  try {
    (void)parse_adjust_lr("adam");
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                AllOf(HasSubstr("'adam'"), HasSubstr("'original'"), HasSubstr("'match_rms_adamw'")));
  }
}

}  // namespace
}  // namespace dmuon
