// The state machine of dedicated ownership: turns "this module is about to run" into gathers, "its gradients are there"
// into reductions, and keeps all of it in one order that is the same on every rank.
//
// Callers (Python hooks, or a C++ training loop) bracket the root with begin_forward/end_forward and every hook module
// with pre_forward/post_forward; backward needs no call: autograd nodes and tensor hooks made in forward drive it.
//
// Order (never hang).  Gathers of a forward go out in module order; gathers of a backward in reverse order of module
// exit; reductions in reverse module order.  A rank that reaches group k first issues every group before k; the end of
// the pass issues the rest, whatever branches the rank took.  Gathers and reductions run on communicators of their own,
// so their relative timing is free; neither may be shared with other traffic.  No order is ever decided by timing or
// data; a host that waits long for a peer only issues the next gathers of the order earlier.
//
// One thread at a time (autograd's device thread and the caller's do not overlap).  CUDA: communication runs on two
// high-priority side streams; no call synchronises the host with the device except as GradientReduction::settle says.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/communicator.h"
#include "dmuon/dedicated_param_group.h"
#include "dmuon/plan.h"
#include "dmuon/stream.h"

namespace dmuon {

struct GroupSpec {
  std::string name;          ///< of the hook module, for messages
  std::vector<int> members;  ///< plan indices, in module order
  int exit_order = 0;        ///< rank of the hook module among all, by when its forward ends (differs when nested)
};

struct RuntimeOptions {
  std::optional<at::ScalarType> param_dtype{};   ///< compute dtype; unset: the dtype of the unsharded leaves
  std::optional<at::ScalarType> reduce_dtype{};  ///< on the wire in backward; unset: the compute dtype
  bool cast_forward_inputs = false;              ///< floating inputs of a hook module are cast to the compute dtype
  bool reshard_after_forward = true;             ///< Z3; false is Z2
  /// Gradients are summed in a fixed binary tree over micro-batches and, inside each, over global data-parallel ranks.
  /// Give the runtime ReproducibleCommunicators as well; with replicas the shard group's size must be a power of two.
  bool reproducible = false;
};

/// Gathers and stage 1 of reductions run in the shard group, on communicators of their own (they may be the same object
/// only if no backward gathers, Z2); stage 2 and publishes run in the replicate group, null without a replicate mesh.
struct RuntimeComms {
  CommunicatorPtr gather{};
  CommunicatorPtr reduce{};
  CommunicatorPtr replicate{};
};

/// One forward of the root in progress.
struct ForwardPass {
  bool grad = true;        ///< grad mode when the root was entered: a backward may follow
  size_t next_gather = 0;  ///< position in module order
};

class BackwardPass;
class GradientReduction;
struct ReducePath;
struct SharedPlaces;
class MemoryLedger;
struct Waiting;

class Runtime : public torch::CustomClassHolder {
 public:
  /// `params`: [plan matrices].  `groups` in module order; together they name every matrix exactly once.
  /// Throws c10::ValueError, naming the parameter, for anything that does not fit; nothing has been changed then.
  /// Collective with communicators that share memory.
  Runtime(plan::Plan plan, std::vector<ParamSpec> params, std::vector<GroupSpec> groups, RuntimeComms comms,
          c10::Device device, RuntimeOptions options);
  ~Runtime() override;

  // Root and hook modules, in forward (also when a forward is recomputed inside backward).
  void begin_forward();
  void end_forward(const std::vector<at::Tensor>& outputs);
  /// Returns the inputs to call the module with, one for one.
  [[nodiscard]] std::vector<at::Tensor> pre_forward(int group, const std::vector<at::Tensor>& inputs);
  /// Call it with no outputs when the forward raised.
  void post_forward(int group, const std::vector<at::Tensor>& outputs);

  /// Allocates buffers once every owned master is real; no-op when that has happened.  Called by every forward.
  void materialize();
  /// The module's registered parameter was replaced (`to_empty`, `to`): takes its values at the next `materialize`.
  void rebind(int matrix, at::Tensor registered);
  /// Likewise for what users see of a parameter that is cut by rows; `matrix`: any of its parts.
  void reshow(int matrix, const at::Tensor& sharded);

  void set_requires_gradient_sync(bool enabled, std::optional<int> group = std::nullopt);
  [[nodiscard]] bool requires_gradient_sync(int group) const { return sync_groups_.at(static_cast<size_t>(group)); }
  void set_reshard_after_forward(bool enabled, std::optional<int> group = std::nullopt);
  /// HSDP: false keeps the shard group's sums on the row owners until a later backward sends them across replicas.
  void set_requires_all_reduce(bool enabled);

  /// HSDP, after the optimizer changed this group's masters: sends them to the replicas, in the background.  Every rank
  /// publishes every group, in module order.  No-op without a replicate mesh.
  void publish(int group);
  /// Waits for all publishes that no gather has consumed.
  void wait_publishes();
  /// Waits for all publishes and gathers, wanted or not: nothing of this model's communication is under way then.
  void settle();
  /// The sum over ranks is divided by `factor` instead of the number of ranks.
  void set_gradient_divide_factor(double factor);
  /// Drops gradients that no_sync kept back (part of zero_grad).
  void clear_accumulated();

  /// I1-I3 at this moment; throws naming parameter, rank and slot.  Cheap: no communication, no synchronisation.
  void check_invariants() const;
  /// I4: every replica holds the same published bytes.  Collective over the replicate group; reads all of them.
  void check_replicas();
  /// For a hang: what this rank's host waits for, and how far each pass has come.  From any thread; the numbers may be
  /// of different moments.
  [[nodiscard]] std::string progress() const;
  [[nodiscard]] std::int64_t live_bytes() const;
  [[nodiscard]] std::int64_t peak_bytes() const;
  void track_memory();

  /// Memory that peers read gradients from, for as long as this lives; 0 without.
  [[nodiscard]] std::int64_t outgoing_bytes() const;
  /// With it, what a column receives of its peers' gradients in a reduction, bytes per element.
  [[nodiscard]] std::int64_t received_bytes() const;

  /// Backward passes begun so far.
  [[nodiscard]] std::int64_t backward_count() const { return pass_count_; }

  [[nodiscard]] const plan::Plan& plan() const { return plan_; }
  [[nodiscard]] plan::Slot rank() const { return rank_; }
  [[nodiscard]] const std::vector<DedicatedParamPtr>& params() const { return params_; }
  [[nodiscard]] const std::vector<DedicatedParamGroupPtr>& groups() const { return groups_; }
  /// [groups] the last one whose module lies inside this one's.
  [[nodiscard]] std::vector<int> last_inside() const;
  [[nodiscard]] at::ScalarType compute_dtype() const { return compute_dtype_; }
  [[nodiscard]] at::ScalarType reduce_dtype() const { return options_.reduce_dtype.value_or(compute_dtype_); }

  // Called by autograd (autograd_hooks.h).
  void on_root_gradient() { static_cast<void>(begin_backward()); }
  void pre_backward(GroupUse& use);
  void post_backward(GroupUse& use);

 private:
  void check_inputs(const std::vector<GroupSpec>& groups) const;
  void share_memory();
  void check_peers() const;
  void check_devices(const DedicatedParamGroup& group, const std::vector<at::Tensor>& inputs) const;
  void gather(DedicatedParamGroup& group, Source source);
  void gather_again(DedicatedParamGroup& group, Source source);
  bool issue_next_forward_gather();
  void gather_for_forward(DedicatedParamGroup& group);
  void wait_gather(DedicatedParamGroup& group);
  void gather_for_backward(BackwardPass& pass, DedicatedParamGroup& group);
  bool issue_next_backward_gather(BackwardPass& pass);
  [[nodiscard]] Source forward_source() const { return comms_.replicate ? Source::kPublished : Source::kMasters; }
  std::vector<at::Tensor> enter_graph(DedicatedParamGroup& group, std::vector<at::Tensor> inputs);
  [[nodiscard]] bool keeps_after_forward(const DedicatedParamGroup& group) const;

  std::shared_ptr<BackwardPass> begin_backward();
  void finish_backward(BackwardPass& pass);
  void advance_reductions(BackwardPass& pass, bool all);
  void reduce(BackwardPass& pass, DedicatedParamGroup& group);
  void agree_on_trainable(const DedicatedParamGroup& group);
  [[nodiscard]] double pre_divide_factor() const;
  void drain_shard_stage(BackwardPass& pass);
  void drain_replicate_stage(BackwardPass& pass);
  void wait_for_peers(BackwardPass& pass, const std::function<bool()>& ready);
  [[nodiscard]] bool complete(const DedicatedParamGroup& group, std::int64_t pass) const;
  [[nodiscard]] static bool skippable(const DedicatedParamGroup& group);
  void check_no_late_gradient(const BackwardPass& pass) const;
  void recover();

  plan::Plan plan_;
  plan::Slot rank_;
  std::vector<DedicatedParamPtr> params_;
  std::vector<DedicatedParamGroupPtr> groups_;
  std::vector<int> backward_gather_order_;  ///< group indices
  std::vector<int> reduce_order_;           ///< group indices
  RuntimeComms comms_;
  c10::Device device_;
  RuntimeOptions options_;
  at::ScalarType compute_dtype_;
  Stream gather_stream_;
  std::unique_ptr<ReducePath> reduce_path_;
  std::unique_ptr<MemoryLedger> ledger_;
  std::unique_ptr<Waiting> waiting_;
  at::Tensor shared_;  ///< that the shard group reads published copies from; or undefined
  std::unique_ptr<SharedPlaces> shared_places_;
  std::vector<bool> sync_groups_;
  bool across_replicas_ = true;
  double divide_factor_;
  bool materialized_ = false;
  std::vector<ForwardPass> forwards_;  ///< roots in progress, innermost last
  std::weak_ptr<BackwardPass> backward_;
  bool backward_open_ = false;  ///< a backward began and has not finished: after an exception, recover() cleans up
  std::int64_t pass_count_ = 0;
  std::int64_t gathers_ = 0;  ///< issued so far: the place in the order that all ranks share
};

using RuntimePtr = c10::intrusive_ptr<Runtime>;

/// All ranks of all `communicators` (shard group, then replicate group if there is one) report their set-up error (or
/// "") and a description of their input, one line per matrix.  Throws the same kind of c10::ValueError on every rank if
/// any rank has an error or the descriptions differ; names the rank and the parameter.
void agree_on_inputs(const std::vector<Communicator*>& communicators, const std::string& error,
                     const std::string& description);

/// All ranks of `communicator` come here with the same `text`, or this says why not ("" when they did): a text that
/// differs, or a rank that did not come within the group's time limit.  Blocks the host.
[[nodiscard]] std::string disagreement(Communicator& communicator, const std::string& text);

/// Every tensor takes rank 0's values (set-up; blocks the host).  Tensors of any device and layout.
void broadcast_from_first(Communicator& communicator, const std::vector<at::Tensor>& tensors, c10::Device device);

}  // namespace dmuon
