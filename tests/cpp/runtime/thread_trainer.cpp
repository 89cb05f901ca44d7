// The training loop on thread ranks with dedicated ownership.
#include <gtest/gtest.h>

#include <mutex>

#include "comm/thread_ranks.h"
#include "dmuon/thread_communicator.h"
#include "runtime/trainer.h"

namespace dmuon {
namespace {

constexpr auto kTimeout = std::chrono::seconds(10);

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

}  // namespace dmuon
