#include "runtime/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "comm/thread_ranks.h"
#include "dmuon/muon.h"
#include "dmuon/thread_communicator.h"

namespace dmuon {
namespace {

constexpr double kRestLr = 0.05;
constexpr auto kTimeout = std::chrono::seconds(20);

MuonOptions muon_options() {
  MuonOptions options;
  options.weight_decay = 0.01;
  options.ns = make_ns_options("gram", 5, "polar_express");
  return options;
}

/// [2, 9] tokens of one rank.
at::Tensor batch(const TrainSetup& setup, int rank, int step, int micro) {
  auto generator = at::detail::createCPUGenerator(setup.seed + 1000 * static_cast<std::uint64_t>(rank) +
                                                  100 * static_cast<std::uint64_t>(step) +
                                                  static_cast<std::uint64_t>(micro));
  return at::randint(0, 32, {2, 9}, generator, at::TensorOptions(at::kLong));
}

void sgd(const at::Tensor& weight, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  weight.variable_data().sub_(gradient, kRestLr);
}

// ---- with dedicated ownership -----------------------------------------------------------------------------------

struct Shared {
  Shared(int ranks, int steps)
      : gather(make_thread_world(ranks, kTimeout)),
        reduce(make_thread_world(ranks, kTimeout)),
        rest(make_thread_world(ranks, kTimeout)) {
    trained.traffic.resize(static_cast<size_t>(steps));
    trained.stepped.resize(static_cast<size_t>(steps));
  }
  std::shared_ptr<ThreadWorld> gather, reduce, rest;
  std::mutex mutex;
  Trained trained;
};

DedicateOptions dedicate_options(const TrainSetup& setup) {
  DedicateOptions options;
  options.runtime.param_dtype = setup.param_dtype;
  if (setup.param_dtype) options.runtime.reduce_dtype = setup.shape.dtype;
  options.runtime.cast_forward_inputs = setup.param_dtype.has_value();
  options.runtime.reshard_after_forward = setup.reshard_after_forward;
  if (setup.small_matrix_threshold) options.plan.small_matrix_threshold = *setup.small_matrix_threshold;
  return options;
}

class ThreadRank final : public Trainer {
 public:
  // Ranks begin with different values on purpose: rank 0's must win.
  ThreadRank(const TrainSetup& setup, Shared& shared, int rank)
      : setup_(setup),
        shared_(shared),
        rank_(rank),
        model_(setup.shape, rank == 0 ? setup.seed : setup.seed + 77 + static_cast<std::uint64_t>(rank)),
        gather_(std::make_shared<RecordingCommunicator>(make_thread_communicator(shared.gather, rank))),
        reduce_(std::make_shared<RecordingCommunicator>(make_thread_communicator(shared.reduce, rank))),
        rest_(make_thread_communicator(shared.rest, rank)),
        runtime_(dedicate(model_.hook_modules(), {gather_, reduce_}, dedicate_options(setup))) {
    for (const auto& [name, weight] : model_.rest()) rest_weights_.push_back(weight);
    broadcast_from_first(*rest_, rest_weights_, at::kCPU);
    gather_->reset();
    runtime_->check_invariants();
  }

  int rank() const override { return rank_; }
  Runtime* runtime() override { return runtime_.get(); }
  void begin_step(int step) { step_ = step; }
  void set_sync(bool enabled) override { runtime_->set_requires_gradient_sync(enabled); }

  at::Tensor loss(const Route& route, int micro) override {
    const ModuleCalls calls{[&](const auto& forward) { return call_root(*runtime_, forward); },
                            [&](int group, const auto& input, const auto& forward) {
                              return call_module(*runtime_, group, input, forward);
                            }};
    auto result = model_.loss(batch(setup_, rank_, step_, micro), route, calls);
    runtime_->check_invariants();
    return result;
  }

  void backward(const at::Tensor& loss, bool keep_graph) override {
    loss.backward({}, keep_graph);
    runtime_->check_invariants();
    for (const auto& param : runtime_->params()) {
      EXPECT_FALSE(param->unsharded().grad().defined()) << param->name() << " keeps an unreduced gradient";
    }
    for (const auto& group : runtime_->groups()) EXPECT_EQ(group->state(), GroupState::kSharded) << group->name();
  }

  void discard_gradients() override {
    for (const auto& param : runtime_->params()) param->registered().mutable_grad() = at::Tensor();
    for (const auto& weight : rest_weights_) weight.mutable_grad() = at::Tensor();
    runtime_->clear_accumulated();
  }

  void step() {
    count_traffic();
    std::vector<MuonMatrix> matrices;
    for (const auto& param : runtime_->params()) {
      const auto gradient = param->reduced_grad();
      if (!gradient.defined()) continue;
      note_stepped(param->name());
      if (!setup_.muon) sgd(param->registered(), gradient);
      auto& momentum = momenta_[param->name()];
      if (!momentum.defined()) momentum = at::zeros_like(gradient);
      matrices.push_back({param->name(), param->registered(), gradient, momentum});
    }
    if (setup_.muon) static_cast<void>(muon_step(matrices, muon_options()));
    average_gradients(*rest_, rest_weights_);
    for (const auto& weight : rest_weights_) sgd(weight, weight.grad());
    discard_gradients();
    runtime_->check_invariants();
  }

  void hand_over_weights() {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    for (const auto& param : runtime_->params()) {
      if (param->is_owner()) shared_.trained.weights[param->name()] = param->registered().detach().clone();
    }
    for (const auto& [name, weight] : model_.rest()) {
      const auto place = shared_.trained.weights.emplace(name, weight.detach().clone()).first;
      EXPECT_TRUE(at::equal(place->second, weight)) << name << " differs between ranks";
    }
  }

 private:
  void note_stepped(const std::string& name) {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    shared_.trained.stepped[static_cast<size_t>(step_)].insert(name);
  }

  void count_traffic() {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    auto& total = shared_.trained.traffic[static_cast<size_t>(step_)];
    total.broadcast_calls += gather_->stats().broadcast_calls;
    total.broadcast_bytes += gather_->stats().broadcast_bytes;
    total.reduce_calls += reduce_->stats().reduce_calls;
    total.reduce_bytes += reduce_->stats().reduce_bytes;
    EXPECT_EQ(gather_->stats().reduce_calls + reduce_->stats().broadcast_calls, 0);
    gather_->reset();
    reduce_->reset();
  }

  const TrainSetup& setup_;
  Shared& shared_;
  int rank_;
  int step_ = 0;
  ToyModel model_;
  std::shared_ptr<RecordingCommunicator> gather_, reduce_;
  CommunicatorPtr rest_;
  RuntimePtr runtime_;
  std::vector<at::Tensor> rest_weights_;
  std::map<std::string, at::Tensor> momenta_;
};

// ---- alone ------------------------------------------------------------------------------------------------------

using Named = std::vector<std::pair<std::string, at::Tensor>>;

class Alone final : public Trainer {
 public:
  explicit Alone(const TrainSetup& setup) : setup_(setup), model_(setup.shape, setup.seed), rest_(model_.rest()) {
    for (const auto& module : model_.hook_modules()) {
      matrices_.insert(matrices_.end(), module.matrices.begin(), module.matrices.end());
    }
  }

  int rank() const override { return rank_; }
  void set_sync(bool) override {}

  void be(int rank, int step) {
    rank_ = rank;
    step_ = step;
  }

  at::Tensor loss(const Route& route, int micro) override {
    const ModuleCalls calls{[](const auto& forward) { return forward(); },
                            [&](int, const auto& input, const auto& forward) {
                              return forward(setup_.param_dtype ? input.to(*setup_.param_dtype) : input);
                            }};
    return model_.loss(batch(setup_, rank_, step_, micro), route, calls);
  }

  void backward(const at::Tensor& loss, bool keep_graph) override { loss.backward({}, keep_graph); }
  void discard_gradients() override { static_cast<void>(take_gradients()); }

  /// This rank is done with its step: its gradients join the sum.
  void collect() {
    for (auto& [name, gradient] : take_gradients()) {
      auto& sum = sums_[name];
      sum = sum.defined() ? sum + gradient : gradient;
    }
  }

  std::set<std::string> step() {
    std::set<std::string> stepped;
    for (const auto& [name, weight] : matrices_) {
      if (!sums_.count(name)) continue;
      stepped.insert(name);
      const auto gradient = sums_[name] / setup_.ranks;
      setup_.muon ? muon(name, weight, gradient) : sgd(weight, gradient);
    }
    for (const auto& [name, weight] : rest_) {
      if (sums_.count(name)) sgd(weight, sums_[name] / setup_.ranks);
    }
    sums_.clear();
    return stepped;
  }

  [[nodiscard]] std::map<std::string, at::Tensor> weights() const {
    std::map<std::string, at::Tensor> result(rest_.begin(), rest_.end());
    result.insert(matrices_.begin(), matrices_.end());
    for (auto& [name, weight] : result) weight = weight.detach().clone();
    return result;
  }

 private:
  std::map<std::string, at::Tensor> take_gradients() {
    std::map<std::string, at::Tensor> gradients;
    for (const auto* list : {&matrices_, &rest_}) {
      for (const auto& [name, weight] : *list) {
        if (weight.grad().defined()) gradients[name] = weight.grad();
        weight.mutable_grad() = at::Tensor();
      }
    }
    return gradients;
  }

  void muon(const std::string& name, const at::Tensor& weight, const at::Tensor& gradient) {
    const auto options = muon_options();
    auto& momentum = momenta_[name];
    momentum = momentum.defined() ? momentum * options.momentum + gradient : gradient;
    const auto update = newton_schulz({gradient + momentum * options.momentum}, options.ns).front();
    const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(weight.size(0), weight.size(1))));
    auto data = weight.variable_data();
    data.copy_(data * (1.0 - options.lr * options.weight_decay) - update * (options.lr * scale));
  }

  const TrainSetup& setup_;
  ToyModel model_;
  Named rest_;
  Named matrices_;
  int rank_ = 0;
  int step_ = 0;
  std::map<std::string, at::Tensor> sums_;
  std::map<std::string, at::Tensor> momenta_;
};

}  // namespace

Trained train_on_threads(const TrainSetup& setup, int steps, const Body& body) {
  Shared shared(setup.ranks, steps);
  on_threads(setup.ranks, [&](int index) {
    ThreadRank rank(setup, shared, index);
    for (int step = 0; step < steps; ++step) {
      rank.begin_step(step);
      body(rank, step);
      rank.step();
    }
    rank.hand_over_weights();
  });
  return std::move(shared.trained);
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

double expect_parity(const TrainSetup& setup, int steps, const Body& body) {
  const auto together = train_on_threads(setup, steps, body);
  const auto alone = train_alone(setup, steps, body);
  EXPECT_EQ(together.stepped, alone.stepped);
  const double error = relative_error(together, alone);
  EXPECT_LE(error, setup.shape.dtype == at::kDouble ? 1e-12 : 1e-6);
  return error;
}

}  // namespace dmuon
