// The reference, and what both trainings share.
#include "runtime/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

namespace dmuon {
namespace {

using Tensors = std::map<std::string, at::Tensor>;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

class Alone final : public Trainer {
 public:
  explicit Alone(const TrainSetup& setup) : setup_(setup), model_(setup.shape, setup.seed), rest_(model_.rest()) {
    for (const auto& module : model_.hook_modules()) {
      matrices_.insert(matrices_.end(), module.matrices.begin(), module.matrices.end());
    }
  }

  int rank() const override { return rank_; }
  void set_sync(bool enabled) override { sync_ = enabled; }

  void be(int rank, int step) {
    rank_ = rank;
    step_ = step;
    sync_ = true;
  }

  at::Tensor loss(const Route& route, int micro) override {
    const ModuleCalls calls{[](const auto& forward) { return forward(); },
                            [&](int, const auto& input, const auto& forward) {
                              return forward(setup_.param_dtype ? input.to(*setup_.param_dtype) : input);
                            }};
    return model_.loss(batch(setup_, rank_, step_, micro), route, calls);
  }

  void backward(const at::Tensor& loss, bool keep_graph) override {
    loss.backward({}, keep_graph);
    if (sync_) rounds_.push_back(take_gradients(matrices_));
  }

  void discard_gradients() override {
    static_cast<void>(take_gradients(matrices_));
    static_cast<void>(take_gradients(rest_));
    rounds_.clear();
  }

  /// This rank is done with its step: each of its synchronised backwards joins those of the ranks before.
  void collect() {
    sums_.resize(std::max(sums_.size(), rounds_.size()), std::vector<Tensors>(static_cast<size_t>(setup_.replicas)));
    const auto row = static_cast<size_t>(rank_ / setup_.shards());
    for (size_t round = 0; round < rounds_.size(); ++round) {
      for (const auto& [name, gradient] : rounds_[round]) add_to(sums_[round][row][name], gradient);
    }
    rounds_.clear();
    for (const auto& [name, gradient] : take_gradients(rest_)) add_to(rest_sums_[name], gradient);
  }

  /// The mean over the ranks of every round, summed over the rounds.
  std::set<std::string> step() {
    Tensors means;
    for (const auto& rows : sums_) {
      Tensors sums;
      for (const auto& row : rows) {
        for (const auto& [name, sum] : row) add_to(sums[name], sum);
      }
      for (const auto& [name, sum] : sums) add_to(means[name], sum / setup_.ranks);
    }
    sums_.clear();
    std::set<std::string> stepped;
    for (const auto& [name, weight] : matrices_) {
      if (!means.count(name)) continue;
      stepped.insert(name);
      setup_.muon ? muon(name, weight, means[name]) : sgd(weight, means[name]);
    }
    for (const auto& [name, weight] : rest_) {
      if (setup_.trains_rest && rest_sums_.count(name)) sgd(weight, rest_sums_[name] / setup_.ranks);
    }
    rest_sums_.clear();
    return stepped;
  }

  [[nodiscard]] std::map<std::string, at::Tensor> weights() const {
    std::map<std::string, at::Tensor> result(rest_.begin(), rest_.end());
    result.insert(matrices_.begin(), matrices_.end());
    for (auto& [name, weight] : result) weight = weight.detach().clone();
    return result;
  }

 private:
  static void add_to(at::Tensor& total, const at::Tensor& gradient) {
    total = total.defined() ? total + gradient : gradient;
  }

  static Tensors take_gradients(const Named& parameters) {
    Tensors gradients;
    for (const auto& [name, weight] : parameters) {
      if (weight.grad().defined()) gradients[name] = weight.grad();
      weight.mutable_grad() = at::Tensor();
    }
    return gradients;
  }

  void muon(const std::string& name, const at::Tensor& weight, const at::Tensor& gradient) {
    const auto options = muon_options();
    auto& momentum = momenta_[name];
    if (!momentum.defined()) momentum = at::zeros_like(gradient);
    momentum.mul_(options.momentum).add_(gradient);
    const auto update = newton_schulz({gradient.add(momentum, options.momentum)}, options.ns).front();
    const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(weight.size(0), weight.size(1))));
    weight.variable_data().mul_(1.0 - options.lr * options.weight_decay).add_(update, -options.lr * scale);
  }

  const TrainSetup& setup_;
  ToyModel model_;
  Named rest_;
  Named matrices_;
  int rank_ = 0;
  int step_ = 0;
  bool sync_ = true;
  std::vector<Tensors> rounds_;             // [synchronised backwards] of this rank and step
  std::vector<std::vector<Tensors>> sums_;  // [synchronised backwards][replicas] over the ranks so far
  Tensors rest_sums_;                       // over the ranks so far, of all backwards together
  std::map<std::string, at::Tensor> momenta_;
};

void expect_same_bits(const Tensors& a, const Tensors& b, const char* what) {
  EXPECT_EQ(a.size(), b.size()) << "tensors of kind " << what;
  const auto bytes = [](const at::Tensor& tensor) { return tensor.contiguous().view(at::kByte); };
  for (const auto& [name, tensor] : a) {
    EXPECT_TRUE(b.count(name) && at::equal(bytes(tensor), bytes(b.at(name)))) << what << " of " << name << " differs";
  }
}

}  // namespace

MuonOptions muon_options() {
  MuonOptions options;
  options.weight_decay = 0.01;
  options.ns = make_ns_options("gram", 5, "polar_express");
  return options;
}

at::Tensor batch(const TrainSetup& setup, int rank, int step, int micro) {
  auto generator =
      at::detail::createCPUGenerator(setup.seed + 1000 * static_cast<std::uint64_t>(rank) +
                                     100 * static_cast<std::uint64_t>(step) + static_cast<std::uint64_t>(micro));
  return at::randint(0, 32, {2, 9}, generator, at::TensorOptions(at::kLong));
}

void sgd(const at::Tensor& weight, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  weight.variable_data().sub_(gradient, 0.05);
}

Trained train_alone(const TrainSetup& setup, int steps, const Body& body) {
  at::set_num_threads(1);
  Trained result;
  Alone trainer(setup);
  for (int step = 0; step < steps; ++step) {
    for (int rank = 0; rank < setup.ranks; ++rank) {
      trainer.be(rank, step);
      body(trainer, step);
      trainer.collect();
    }
    result.stepped.push_back(trainer.step());
  }
  result.weights = trainer.weights();
  return result;
}

double relative_error(const Trained& a, const Trained& b) {
  double worst = a.weights.size() == b.weights.size() ? 0.0 : 1.0;
  for (const auto& [name, weight] : b.weights) {
    const auto difference = a.weights.at(name).to(at::kDouble) - weight.to(at::kDouble);
    worst = std::max(worst, (difference.norm() / weight.to(at::kDouble).norm()).item<double>());
  }
  return worst;
}

void expect_same_bits(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.stepped, b.stepped);
  expect_same_bits(a.weights, b.weights, "weight");
  expect_same_bits(a.momenta, b.momenta, "momentum");
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t step = 0; step < a.gradients.size(); ++step) {
    expect_same_bits(a.gradients[step], b.gradients[step], "gradient");
  }
}

double expect_parity(const TrainSetup& setup, int steps, const Body& body) {
  const auto together = train_on_threads(setup, steps, body);
  const auto alone = train_alone(setup, steps, body);
  EXPECT_EQ(together.stepped, alone.stepped);
  const double error = relative_error(together, alone);
  EXPECT_LE(error, setup.shape.dtype == at::kDouble ? 1e-12 : 1e-6);
  return error;
}

}  // namespace dmuon
