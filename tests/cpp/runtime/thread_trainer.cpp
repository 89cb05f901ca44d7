// The training loop on thread ranks with dedicated ownership.
#include <gtest/gtest.h>

#include <mutex>

#include "comm/thread_ranks.h"
#include "dmuon/reproducible_communicator.h"
#include "dmuon/thread_communicator.h"
#include "runtime/trainer.h"

namespace dmuon {
namespace {

using Worlds = std::vector<std::shared_ptr<ThreadWorld>>;

Worlds make_worlds(int count, int ranks, std::chrono::milliseconds timeout) {
  Worlds worlds;
  for (int i = 0; i < count; ++i) worlds.push_back(make_thread_world(ranks, timeout));
  return worlds;
}

struct Shared {
  Shared(const TrainSetup& setup, int steps)
      : gather(make_worlds(setup.replicas, setup.shards(), setup.timeout)),
        reduce(make_worlds(setup.replicas, setup.shards(), setup.timeout)),
        replicate(make_worlds(setup.shards(), setup.replicas, setup.timeout)),
        rest(make_thread_world(setup.ranks, setup.timeout)) {
    trained.traffic.resize(static_cast<size_t>(steps));
    trained.replicate_traffic.resize(static_cast<size_t>(steps));
    trained.stepped.resize(static_cast<size_t>(steps));
    trained.gradients.resize(static_cast<size_t>(steps));
  }
  Worlds gather;     // [replicas]
  Worlds reduce;     // [replicas]
  Worlds replicate;  // [shards]
  std::shared_ptr<ThreadWorld> rest;
  std::mutex mutex;
  Trained trained;
};

using Recorder = std::shared_ptr<RecordingCommunicator>;

// `axis`: 0 gathers, 1 reductions, 2 replicas.
Recorder record(const TrainSetup& setup, const Worlds& worlds, int axis, int rank) {
  const int shard = rank % setup.shards();
  const int replica = rank / setup.shards();
  const auto& world = worlds[static_cast<size_t>(axis == 2 ? shard : replica)];
  auto communicator = make_thread_communicator(world, axis == 2 ? replica : shard, setup.shares && axis != 2);
  if (setup.decorate) communicator = setup.decorate(std::move(communicator), 3 * rank + axis);
  if (setup.reproducible) communicator = std::make_shared<ReproducibleCommunicator>(std::move(communicator));
  return std::make_shared<RecordingCommunicator>(std::move(communicator));
}

void move_stats(RecordingCommunicator& from, CommStats& to) {
  to.broadcast_calls += from.stats().broadcast_calls;
  to.broadcast_bytes += from.stats().broadcast_bytes;
  to.reduce_calls += from.stats().reduce_calls;
  to.reduce_bytes += from.stats().reduce_bytes;
  from.reset();
}

DedicateOptions dedicate_options(const TrainSetup& setup) {
  DedicateOptions options;
  options.runtime.param_dtype = setup.param_dtype;
  if (setup.param_dtype) options.runtime.reduce_dtype = setup.shape.dtype;
  options.runtime.cast_forward_inputs = setup.param_dtype.has_value();
  options.runtime.reshard_after_forward = setup.reshard_after_forward;
  options.runtime.reproducible = setup.reproducible;
  if (setup.cut) options.cut_elements = 1;
  if (setup.small_matrix_threshold) options.plan.small_matrix_threshold = *setup.small_matrix_threshold;
  return options;
}

std::vector<HookModule> modules_of(const ToyModel& model, bool cut) {
  auto modules = model.hook_modules();
  for (auto& module : modules) {
    if (cut) std::swap(module.matrices, module.elementwise);
  }
  return modules;
}

// Without the rows of a part.
std::string whole_name(const DedicatedParam& param) {
  return param.part() ? param.name().substr(0, param.name().find('[')) : param.name();
}

class ThreadRank final : public Trainer {
 public:
  // Ranks begin with different values on purpose: rank 0's must win.
  ThreadRank(const TrainSetup& setup, Shared& shared, int rank)
      : setup_(setup),
        shared_(shared),
        rank_(rank),
        model_(setup.shape, rank == 0 ? setup.seed : setup.seed + 77 + static_cast<std::uint64_t>(rank)),
        gather_(record(setup, shared.gather, 0, rank)),
        reduce_(record(setup, shared.reduce, 1, rank)),
        replicate_(record(setup, shared.replicate, 2, rank)),
        rest_(make_thread_communicator(shared.rest, rank)),
        runtime_(dedicate(modules_of(model_, setup.cut), {gather_, reduce_, setup.replicas > 1 ? replicate_ : nullptr},
                          dedicate_options(setup))) {
    for (const auto& [name, weight] : model_.rest()) rest_weights_.push_back(weight);
    broadcast_from_first(*rest_, rest_weights_, at::kCPU);
    runtime_->materialize();
    for (const auto& recorder : {gather_, reduce_, replicate_}) recorder->reset();
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
    std::vector<MuonMatrix> matrices;
    for (const auto& param : runtime_->params()) {
      const auto gradient = param->reduced_grad();
      if (!gradient.defined()) continue;
      note_stepped(*param, gradient);
      if (!setup_.muon) sgd(param->registered(), gradient);
      auto& momentum = momenta_[param->name()];
      if (!momentum.defined()) momentum = at::zeros_like(gradient);
      matrices.push_back({param->name(), param->registered(), gradient, momentum});
    }
    if (setup_.muon) static_cast<void>(muon_step(matrices, muon_options()));
    if (setup_.trains_rest) step_rest();
    discard_gradients();
    for (const auto& group : runtime_->groups()) runtime_->publish(group->index());
    if (!setup_.publish_async) runtime_->wait_publishes();
    count_traffic();
    runtime_->check_invariants();
  }

  void hand_over_weights() {
    runtime_->check_replicas();
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    for (const auto& param : runtime_->params()) {
      if (param->is_owner()) hand_over(*param);
    }
    for (const auto& [name, momentum] : momenta_) shared_.trained.momenta[name] = momentum;
    for (const auto& [name, weight] : model_.rest()) {
      const auto place = shared_.trained.weights.emplace(name, weight.detach().clone()).first;
      EXPECT_TRUE(at::equal(place->second, weight)) << name << " differs between ranks";
    }
  }

 private:
  void step_rest() {
    average_gradients(*rest_, rest_weights_);
    for (const auto& weight : rest_weights_) sgd(weight, weight.grad());
  }

  void note_stepped(const DedicatedParam& param, const at::Tensor& gradient) {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    shared_.trained.gradients[static_cast<size_t>(step_)][param.name()] = gradient.clone();
    shared_.trained.stepped[static_cast<size_t>(step_)].insert(whole_name(param));
  }

  void hand_over(const DedicatedParam& param) {
    auto& whole = shared_.trained.weights[whole_name(param)];
    if (!whole.defined()) whole = at::full_like(param.unsharded(), NAN, param.registered().options());
    const auto first = param.part() ? param.part()->first : 0;
    whole.narrow(0, first, param.sizes().front()).copy_(param.registered());
  }

  void count_traffic() {
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    EXPECT_EQ(gather_->stats().reduce_calls + reduce_->stats().broadcast_calls, 0);
    move_stats(*gather_, shared_.trained.traffic[static_cast<size_t>(step_)]);
    move_stats(*reduce_, shared_.trained.traffic[static_cast<size_t>(step_)]);
    move_stats(*replicate_, shared_.trained.replicate_traffic[static_cast<size_t>(step_)]);
  }

  const TrainSetup& setup_;
  Shared& shared_;
  int rank_;
  int step_ = 0;
  ToyModel model_;
  Recorder gather_, reduce_, replicate_;
  CommunicatorPtr rest_;
  RuntimePtr runtime_;
  std::vector<at::Tensor> rest_weights_;
  std::map<std::string, at::Tensor> momenta_;
};

}  // namespace

Trained train_on_threads(const TrainSetup& setup, int steps, const Body& body) {
  Shared shared(setup, steps);
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
