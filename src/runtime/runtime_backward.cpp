// Runtime's backward half: when gathers and reductions of a backward pass go out, and how a pass ends.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>
#include <future>
#include <thread>

#include "dmuon/runtime.h"
#include "runtime/autograd_hooks.h"
#include "runtime/memory_ledger.h"
#include "runtime/passes.h"
#include "runtime/progress.h"

namespace dmuon {
namespace {

// How long a host waits for a reduction before it offers its peers the next gather (wait_for_peers).
constexpr auto kPatience = std::chrono::milliseconds(100);
constexpr auto kShortestPause = std::chrono::microseconds(50);
constexpr auto kLongestPause = std::chrono::microseconds(200);

void forget_dead(std::vector<c10::weak_intrusive_ptr<GroupUse>>& uses) {
  std::erase_if(uses, [](const auto& use) { return use.expired(); });
}

}  // namespace

std::shared_ptr<BackwardPass> Runtime::begin_backward() {
  if (auto pass = backward_.lock()) return pass;
  recover();
  auto pass = std::make_shared<BackwardPass>(++pass_count_, groups_.size());
  const auto self = RuntimePtr::unsafe_reclaim_from_nonowning(this);
  torch::autograd::Engine::get_default_engine().queue_callback([self, pass] { self->finish_backward(*pass); });
  backward_ = pass;
  backward_open_ = true;
  return pass;
}

void Runtime::pre_backward(GroupUse& use) {
  TORCH_CHECK(!at::GradMode::is_enabled(), "[dmuon.runtime] backward(create_graph=True) through group '",
              groups_[static_cast<size_t>(use.group)]->name(),
              "': gradients of gradients of dedicated matrices are not supported. Leave them out of the predicate.");
  const auto pass = begin_backward();
  gather_for_backward(*pass, *groups_[static_cast<size_t>(use.group)]);
}

void Runtime::post_backward(GroupUse& use) {
  const auto pass = begin_backward();
  use.finished_pass = pass->id;
  use.closed = !torch::autograd::get_current_graph_task_keep_graph();
  const auto& group = *groups_[static_cast<size_t>(use.group)];
  if (!complete(group, pass->id)) return;
  pass->ready[static_cast<size_t>(use.group)] = true;
  advance_reductions(*pass, /*all=*/false);
}

bool Runtime::issue_next_backward_gather(BackwardPass& pass) {
  while (pass.next_gather < backward_gather_order_.size()) {
    auto& group = *groups_[static_cast<size_t>(backward_gather_order_[pass.next_gather++])];
    if (group.kept_for_backward) continue;
    gather(group, Source::kSameAsForward);
    return true;
  }
  return false;
}

void Runtime::gather_for_backward(BackwardPass& pass, DedicatedParamGroup& group) {
  const auto is_it = [&](int index) { return index == group.index(); };
  const auto position =
      static_cast<size_t>(std::find_if(backward_gather_order_.begin(), backward_gather_order_.end(), is_it) -
                          backward_gather_order_.begin());
  while (pass.next_gather <= position && issue_next_backward_gather(pass)) {
  }
  if (group.state() == GroupState::kSharded) gather_again(group, Source::kSameAsForward);  // used before, and freed
  wait_gather(group);
  const bool prefetched = pass.next_gather > position + 1;
  if (!prefetched) issue_next_backward_gather(pass);
}

bool Runtime::complete(const DedicatedParamGroup& group, std::int64_t pass) const {
  if (group.untracked_forwards > 0) return false;
  return std::none_of(group.uses.begin(), group.uses.end(), [&](const auto& weak) {
    const auto use = weak.lock();
    return use && use->open(pass);
  });
}

bool Runtime::skippable(const DedicatedParamGroup& group) {
  return !group.touched &&
         std::all_of(group.uses.begin(), group.uses.end(), [](const auto& use) { return use.expired(); });
}

void Runtime::advance_reductions(BackwardPass& pass, bool all) {
  while (pass.next_reduction < reduce_order_.size()) {
    const auto index = static_cast<size_t>(reduce_order_[pass.next_reduction]);
    auto& group = *groups_[index];
    if (!all && !pass.ready[index] && !skippable(group)) return;
    ++pass.next_reduction;
    pass.reduced[index] = true;
    reduce(pass, group);
  }
}

void Runtime::reduce(BackwardPass& pass, DedicatedParamGroup& group) {
  if (group.follow_trainable()) {
    const WaitNote note(*waiting_, "the agreement on requires_grad", group);
    // In a thread of its own, because peers may need gathers of this rank before they come to it.
    auto agreed = std::async(std::launch::async, [&] { agree_on_trainable(group); });
    wait_for_peers(pass, [&] { return agreed.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
    agreed.get();
  }
  if (!group.reduce_layout().segments.empty()) {
    if (sync_groups_[static_cast<size_t>(group.index())]) {
      drain_shard_stage(pass);
      const ReduceOptions options{reduce_dtype(), divide_factor_, pre_divide_factor(), options_.reproducible,
                                  across_replicas_};
      pass.in_shard = std::make_unique<GradientReduction>(group, rank_, *reduce_path_, options, *ledger_);
    } else {
      accumulate_gradients(group, reduce_dtype());
    }
  }
  if (group.state() == GroupState::kUnsharded && group.compute_depth == 0) group.release();
}

// As FSDP2: a share of the division that leaves both the addends and the sum away from fp16's limits.
double Runtime::pre_divide_factor() const {
  if (reduce_dtype() != at::kHalf) return 1.0;
  int factor = 1;
  while (plan_.mesh.slots() % factor == 0 && plan_.mesh.slots() / factor > factor) factor *= 2;
  return factor;
}

// What is reduced follows from requires_grad, so a change must be the same on every rank.
void Runtime::agree_on_trainable(const DedicatedParamGroup& group) {
  const auto text = c10::str(group.name(), ' ', group.trainable_mask());
  for (const auto& communicator : {comms_.reduce, comms_.replicate}) {
    const auto problem = communicator ? disagreement(*communicator, text) : "";
    TORCH_CHECK(problem.empty(), "[dmuon.runtime] requires_grad of matrices of group '", group.name(),
                "' was changed, and not in the same way on every rank (", problem,
                "): freeze and unfreeze between the same two steps on all ranks.");
  }
}

// The host waits here, on CUDA too: a stream that waited for a reduction would hold up the gathers behind it, and a
// peer in another branch may need one of those before it can take part.  Gathers have a communicator and a fixed order
// of their own, so offering the next one early is always right.  Once all are out, a stream may wait.
void Runtime::wait_for_peers(BackwardPass& pass, const std::function<bool()>& ready) {
  auto deadline = std::chrono::steady_clock::now() + kPatience;
  auto pause = kShortestPause;
  while (pass.next_gather < backward_gather_order_.size() && !ready()) {
    if (std::chrono::steady_clock::now() > deadline) {
      issue_next_backward_gather(pass);
      deadline = std::chrono::steady_clock::now() + kPatience;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

void Runtime::drain_shard_stage(BackwardPass& pass) {
  if (!pass.in_shard) return;
  const WaitNote note(*waiting_, "the reduction (stage 1)", pass.in_shard->group());
  wait_for_peers(pass, [&] { return pass.in_shard->shard_ready(); });
  ledger_->observe();
  pass.in_shard->finish_shard();
  drain_replicate_stage(pass);
  pass.in_replicate = std::move(pass.in_shard);
  if (!comms_.replicate) drain_replicate_stage(pass);
}

void Runtime::drain_replicate_stage(BackwardPass& pass) {
  if (!pass.in_replicate) return;
  const WaitNote note(*waiting_, "the reduction (last stage)", pass.in_replicate->group());
  wait_for_peers(pass, [&] { return pass.in_replicate->ready(); });
  pass.in_replicate->finish();
  if (!pass.in_replicate->settled()) pass.unsettled.push_back(std::move(pass.in_replicate));
  pass.in_replicate.reset();
}

void Runtime::finish_backward(BackwardPass& pass) {
  const at::NoGradGuard no_grad;
  while (issue_next_backward_gather(pass)) {
  }
  check_no_late_gradient(pass);
  advance_reductions(pass, /*all=*/true);
  drain_shard_stage(pass);
  drain_replicate_stage(pass);
  for (const auto& reduction : pass.unsettled) reduction->settle();
  pass.unsettled.clear();
  for (const auto& group : groups_) {
    group->kept_for_backward = false;
    group->touched = false;
    group->untracked_forwards = 0;
    forget_dead(group->uses);
    if (group->compute_depth == 0) group->release();
  }
  backward_.reset();
  backward_open_ = false;
}

void Runtime::check_no_late_gradient(const BackwardPass& pass) const {
  for (const auto& group : groups_) {
    if (!pass.reduced[static_cast<size_t>(group->index())]) continue;
    for (const auto& param : group->params()) {
      TORCH_CHECK(
          !param->unsharded().grad().defined(), "[dmuon.runtime] parameter '", param->name(),
          "' got a gradient after its group '", group->name(),
          "' had been reduced in this backward: the module was used in a way dmuon did not see. Call it through "
          "its hook module, or choose another hook boundary.");
    }
  }
}

// After an exception in a backward: forget its gradients, as a failed backward leaves none, and free what it held.
void Runtime::recover() {
  if (!backward_open_ || backward_.lock()) return;
  for (const auto& group : groups_) {
    for (const auto& param : group->params()) param->unsharded().mutable_grad() = at::Tensor();
    group->kept_for_backward = false;
    group->touched = false;
    group->untracked_forwards = 0;
    group->compute_depth = 0;
    group->entered.clear();
    forget_dead(group->uses);
    group->release();
  }
  backward_open_ = false;
}

}  // namespace dmuon
