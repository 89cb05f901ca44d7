#include "dmuon/runtime.h"

#include <numeric>
#include <set>

#include "runtime/autograd_hooks.h"
#include "runtime/group_buffers.h"
#include "runtime/memory_ledger.h"
#include "runtime/passes.h"
#include "runtime/progress.h"
#include "runtime/shared_memory.h"

namespace dmuon {
namespace {

std::vector<int> backward_gather_order(const std::vector<GroupSpec>& groups) {
  std::vector<int> order(groups.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return groups[static_cast<size_t>(a)].exit_order > groups[static_cast<size_t>(b)].exit_order;
  });
  return order;
}

std::vector<int> reverse_order(size_t count) {
  std::vector<int> order(count);
  std::iota(order.rbegin(), order.rend(), 0);
  return order;
}

std::int64_t gradient_bytes(const std::vector<DedicatedParamPtr>& params) {
  std::int64_t bytes = 0;
  for (const auto& param : params) {
    bytes += param->gradient_bytes();
    const auto& unreduced = param->unsharded().grad();
    if (param->leads() && unreduced.defined()) bytes += static_cast<std::int64_t>(unreduced.nbytes());
  }
  return bytes;
}

}  // namespace

Runtime::Runtime(plan::Plan plan, std::vector<ParamSpec> params, std::vector<GroupSpec> groups, RuntimeComms comms,
                 c10::Device device, RuntimeOptions options)
    : plan_(std::move(plan)),
      rank_{comms.gather->rank(), comms.replicate ? comms.replicate->rank() : 0},
      backward_gather_order_(backward_gather_order(groups)),
      reduce_order_(reverse_order(groups.size())),
      comms_(std::move(comms)),
      device_(device),
      options_(options),
      compute_dtype_(options.param_dtype.value_or(params.at(0).unsharded.scalar_type())),
      gather_stream_(device, StreamPriority::kHigh),
      reduce_path_(
          std::make_unique<ReducePath>(ReducePath{comms_.reduce, Stream(device, StreamPriority::kHigh),
                                                  comms_.replicate, Stream(device, StreamPriority::kDefault)})),
      ledger_(std::make_unique<MemoryLedger>([this] { return gradient_bytes(params_); })),
      waiting_(std::make_unique<Waiting>()),
      sync_groups_(groups.size(), true),
      divide_factor_(plan_.mesh.slots()) {
  TORCH_CHECK_VALUE(params.size() == plan_.matrices.size(), "[dmuon.runtime] the plan has ", plan_.matrices.size(),
                    " matrices, but ", params.size(), " parameters were given");
  check_inputs(groups);
  for (size_t i = 0; i < params.size(); ++i) {
    params_.push_back(
        c10::make_intrusive<DedicatedParam>(std::move(params[i]), plan_.matrices[i].part, plan_.owners[i], rank_));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<DedicatedParamPtr> members(params_.size());
    for (const int i : groups[g].members) members[static_cast<size_t>(i)] = params_[static_cast<size_t>(i)];
    groups_.push_back(c10::make_intrusive<DedicatedParamGroup>(
        groups[g].name, static_cast<int>(g), plan::make_group_layout(plan_, groups[g].members), std::move(members)));
    groups_.back()->reshard_after_forward = options_.reshard_after_forward;
  }
  share_memory();
}

Runtime::~Runtime() {
  groups_.clear();  // buffers report to the ledger
}

void Runtime::check_inputs(const std::vector<GroupSpec>& groups) const {
  std::set<int> seen;
  for (const auto& group : groups) {
    TORCH_CHECK_VALUE(!group.members.empty(), "[dmuon.runtime] group '", group.name, "' has no matrix");
    for (const int i : group.members) {
      TORCH_CHECK_VALUE(seen.insert(i).second, "[dmuon.runtime] matrix ", i, " is in more than one group");
    }
  }
  TORCH_CHECK_VALUE(seen.size() == plan_.matrices.size(), "[dmuon.runtime] ", plan_.matrices.size() - seen.size(),
                    " matrices are in no group");
  TORCH_CHECK_VALUE(comms_.gather->size() == plan_.mesh.shard, "[dmuon.runtime] the plan is for ", plan_.mesh.shard,
                    " shard ranks, the communicator has ", comms_.gather->size());
  TORCH_CHECK_VALUE((comms_.replicate ? comms_.replicate->size() : 1) == plan_.mesh.replicate,
                    "[dmuon.runtime] the plan is for ", plan_.mesh.replicate, " replicas");
  TORCH_CHECK_VALUE(
      !options_.reproducible || plan_.mesh.replicate == 1 || (plan_.mesh.shard & (plan_.mesh.shard - 1)) == 0,
      "[dmuon.runtime] reproducible sums across replicas need a shard group of a power of two ranks, got ",
      plan_.mesh.shard, ". Use another mesh, or reproducible=False.");
}

// What is sent, and the dtypes it is sent in, follow from the plan and the options: every rank shares or none does.
void Runtime::share_memory() {
  if (comms_.gather->size() == 1) return;
  const auto bytes_of = [](at::ScalarType dtype) { return static_cast<std::int64_t>(at::elementSize(dtype)); };
  shared_places_ = std::make_unique<SharedPlaces>(shared_places(groups_, bytes_of(compute_dtype_)));
  shared_ = comms_.gather->share(Sharing::kBroadcast, shared_places_->bytes);
  const auto sum = reduce_dtype();
  const auto sent = bytes_of(compute_dtype_) < bytes_of(sum) ? compute_dtype_ : sum;
  if (!comms_.reduce->sums_shared(sent, sum) || !comms_.reduce->sums_shared(sum, sum)) return;
  const auto bytes = outgoing_capacity(groups_, comms_.reduce->size(), bytes_of(sum));
  reduce_path_->outgoing = comms_.reduce->share(Sharing::kReduce, bytes);
  reduce_path_->sent = sent;
  ledger_->add(outgoing_bytes());
}

std::int64_t Runtime::outgoing_bytes() const {
  return reduce_path_->outgoing.defined() ? reduce_path_->outgoing.numel() : 0;
}

std::int64_t Runtime::received_bytes() const {
  if (!reduce_path_->outgoing.defined()) return 0;
  return static_cast<std::int64_t>(at::elementSize(reduce_path_->sent)) * (comms_.reduce->size() - 1);
}

void Runtime::check_peers() const {
  for (const auto& communicator : {comms_.gather, comms_.reduce, comms_.replicate}) {
    if (communicator) communicator->check();
  }
}

void Runtime::materialize() {
  if (materialized_) return;
  for (const auto& param : params_) {
    TORCH_CHECK(!param->is_owner() || !param->registered().is_meta(), "[dmuon.runtime] parameter '", param->name(),
                "' is still on the meta device on its owner (shard ", param->owner().shard,
                "): call model.to_empty(device=...) and initialise the model before the first forward or step.");
  }
  BufferPlacement placement{rank_, device_, compute_dtype_, comms_.replicate != nullptr, shared_};
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (shared_.defined()) placement.places = shared_places_->places[g];
    groups_[g]->materialize(placement, *ledger_);
  }
  materialized_ = true;
  for (const auto& group : groups_) publish(group->index());
  wait_publishes();
}

void Runtime::rebind(int matrix, at::Tensor registered) {
  auto& param = *params_.at(static_cast<size_t>(matrix));
  TORCH_CHECK(registered.scalar_type() == param.registered().scalar_type(), "[dmuon.runtime] parameter '", param.name(),
              "': the master's dtype is ", param.registered().scalar_type(), " and cannot become ",
              registered.scalar_type(), ". Choose the compute dtype with mp_policy instead.");
  param.replace_registered(std::move(registered));
  materialized_ = false;
}

void Runtime::reshow(int matrix, const at::Tensor& sharded) {
  const auto& whole = params_.at(static_cast<size_t>(matrix))->unsharded();
  for (const auto& param : params_) {
    if (param->unsharded().is_same(whole)) param->replace_sharded(sharded);
  }
}

// ---- forward ----------------------------------------------------------------------------------------------------

void Runtime::begin_forward() {
  if (in_backward()) return;
  check_peers();
  materialize();
  recover();
  if (forwards_.empty()) {
    for (const auto& group : groups_) {
      group->compute_depth = 0;
      group->entered.clear();
    }
  }
  forwards_.push_back({at::GradMode::is_enabled(), 0});
}

void Runtime::end_forward(const std::vector<at::Tensor>& outputs) {
  if (at::GradMode::is_enabled()) watch_root_outputs(RuntimePtr::unsafe_reclaim_from_nonowning(this), outputs);
  if (in_backward() || forwards_.empty()) return;
  while (issue_next_forward_gather()) {
  }
  for (const auto& group : groups_) {
    if (keeps_after_forward(*group)) {
      group->kept_for_backward = true;
    } else if (!group->kept_for_backward && group->compute_depth == 0) {
      group->release();
    }
  }
  forwards_.pop_back();
}

std::vector<at::Tensor> Runtime::pre_forward(int index, const std::vector<at::Tensor>& inputs) {
  auto& group = *groups_.at(static_cast<size_t>(index));
  check_devices(group, inputs);
  ++group.compute_depth;
  group.touched = true;
  for (const auto& param : group.params()) param->follow_requires_grad();
  if (in_backward()) {
    group.untracked_forwards = std::max(0, group.untracked_forwards - 1);
    gather_for_backward(*begin_backward(), group);
  } else {
    if (!at::GradMode::is_enabled() && !forwards_.empty() && forwards_.back().grad) ++group.untracked_forwards;
    gather_for_forward(group);
  }
  return enter_graph(group, inputs);
}

// Torch would compute with a meta tensor, and give values that mean nothing.
void Runtime::check_devices(const DedicatedParamGroup& group, const std::vector<at::Tensor>& inputs) const {
  for (const auto& input : inputs) {
    TORCH_CHECK(!input.is_meta() || device_.is_meta(), "[dmuon.runtime] an input of module '", group.name(),
                "' is on the meta device, expected ", device_,
                ". It may have been moved to the device of a dedicated parameter, which outside its module is a "
                "placeholder on the ranks that do not own it: move it to a device that is named, or to the input's.");
  }
}

void Runtime::gather(DedicatedParamGroup& group, Source source) {
  const c10::InferenceMode normal(false);
  ++gathers_;
  group.begin_gather(*comms_.gather, gather_stream_, source);
  ledger_->observe();
}

// Outside the canonical order, and so right only if every rank does it here: after as many gathers, or another group's
// weights would arrive in these buffers.
void Runtime::gather_again(DedicatedParamGroup& group, Source source) {
  const auto problem = disagreement(*comms_.gather, c10::str("'", group.name(), "' after ", gathers_, " gathers"));
  TORCH_CHECK(problem.empty(), "[dmuon.runtime] module '", group.name(),
              "' runs again in one pass after its weights were freed, and not on every rank at the same place (",
              problem,
              "). If ranks repeat it differently, keep its weights for the pass: call set_reshard_after_forward(False) "
              "on that module on every rank, or dedicate_params(..., reshard_after_forward=False).");
  gather(group, source);
}

bool Runtime::issue_next_forward_gather() {
  auto& pass = forwards_.back();
  if (pass.next_gather == groups_.size()) return false;
  gather(*groups_[pass.next_gather++], forward_source());
  return true;
}

void Runtime::gather_for_forward(DedicatedParamGroup& group) {
  if (forwards_.empty()) {  // a submodule called on its own: every rank is expected to do the same
    materialize();
    recover();
    if (group.compute_depth == 1) gather(group, forward_source());
    return wait_gather(group);
  }
  const auto position = static_cast<size_t>(group.index());
  while (forwards_.back().next_gather <= position) issue_next_forward_gather();
  if (group.state() == GroupState::kSharded) {  // used before in this pass, and freed
    gather_again(group, forward_source());
    group.repeats = true;
  }
  wait_gather(group);
  const bool prefetched = forwards_.back().next_gather > position + 1;
  if (!prefetched) issue_next_forward_gather();
}

void Runtime::wait_gather(DedicatedParamGroup& group) {
  const WaitNote note(*waiting_, "the gather", group);
  group.wait_gather();
}

std::vector<at::Tensor> Runtime::enter_graph(DedicatedParamGroup& group, std::vector<at::Tensor> inputs) {
  if (options_.cast_forward_inputs) {
    for (auto& input : inputs) {
      if (input.is_floating_point()) input = input.to(compute_dtype_);
    }
  }
  if (!at::GradMode::is_enabled()) return inputs;
  const auto use = c10::make_intrusive<GroupUse>(group.index());
  group.uses.emplace_back(use);
  group.entered.push_back(use);
  std::vector<at::Tensor> watched;
  for (const auto& input : inputs) {
    if (input.requires_grad()) watched.push_back(input);
  }
  if (watched.empty()) return inputs;
  watched = watch_inputs(RuntimePtr::unsafe_reclaim_from_nonowning(this), use, watched);
  size_t next = 0;
  for (auto& input : inputs) {
    if (input.requires_grad()) input = watched[next++];
  }
  return inputs;
}

bool Runtime::keeps_after_forward(const DedicatedParamGroup& group) const {
  const bool grad = forwards_.empty() ? at::GradMode::is_enabled() : forwards_.back().grad;
  return grad && !group.reshard_after_forward;
}

void Runtime::post_forward(int index, const std::vector<at::Tensor>& outputs) {
  auto& group = *groups_.at(static_cast<size_t>(index));
  group.compute_depth = std::max(0, group.compute_depth - 1);
  if (at::GradMode::is_enabled() && !group.entered.empty()) {
    watch_outputs(RuntimePtr::unsafe_reclaim_from_nonowning(this), group.entered.back(), outputs);
    group.entered.pop_back();
  }
  if (in_backward() || group.compute_depth > 0 || group.kept_for_backward) return;
  // Z2, and modules that repeat: one gather a pass; end_forward frees it or keeps it.
  if (!forwards_.empty() && (!group.reshard_after_forward || group.repeats)) return;
  if (keeps_after_forward(group)) {
    group.kept_for_backward = true;
  } else {
    group.release();
  }
}

// ---- controls and diagnostics -----------------------------------------------------------------------------------

void Runtime::set_requires_gradient_sync(bool enabled, std::optional<int> group) {
  if (group) static_cast<void>(sync_groups_.at(static_cast<size_t>(*group)));
  for (const auto& each : groups_) {
    if (group && *group != each->index()) continue;
    sync_groups_[static_cast<size_t>(each->index())] = enabled;
    each->kept_back = each->kept_back || !enabled;  // here, and not in a backward, which a rank may leave out
  }
}

void Runtime::set_reshard_after_forward(bool enabled, std::optional<int> group) {
  for (const auto& each : groups_) {
    if (!group || *group == each->index()) each->reshard_after_forward = enabled;
  }
}

void Runtime::set_requires_all_reduce(bool enabled) { across_replicas_ = enabled; }

void Runtime::publish(int index) {
  if (!comms_.replicate) return;
  groups_.at(static_cast<size_t>(index))->begin_publish(*comms_.replicate, reduce_path_->replicate_stream);
}

void Runtime::wait_publishes() {
  for (const auto& group : groups_) group->wait_publish();
}

void Runtime::settle() {
  wait_publishes();
  for (const auto& group : groups_) group->wait_gather();
}

void Runtime::set_gradient_divide_factor(double factor) {
  TORCH_CHECK_VALUE(factor > 0.0, "[dmuon.runtime] the gradient divide factor must be positive, got ", factor);
  divide_factor_ = factor;
}

void Runtime::clear_accumulated() {
  for (const auto& group : groups_) {
    group->accumulated.assign(group->params().size(), at::Tensor());
    group->partial.clear();
  }
}

void Runtime::check_invariants() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = *params_[i];
    const auto where = [&] {
      return c10::str("parameter '", param.name(), "' on rank (shard ", rank_.shard, ", replicate ", rank_.replicate,
                      "), owner (shard ", param.owner().shard, ", replicate ", param.owner().replicate, "): ");
    };
    TORCH_CHECK(param.owner() == plan_.owners[i] && param.is_owner() == (plan_.owners[i] == rank_),
                "[dmuon] I1: ", where(), "is_owner disagrees with the plan");
    TORCH_CHECK(param.is_owner() || param.registered().is_meta(), "[dmuon] I1: ", where(),
                "a rank that is not the owner holds the master's memory");
    TORCH_CHECK(!materialized_ || param.is_row_owner() == param.owned_data().defined(), "[dmuon] I2: ", where(),
                "_owned_data must exist on the owner's column and nowhere else");
    TORCH_CHECK(param.is_owner() || !param.registered().grad().defined(), "[dmuon] I3: ", where(),
                "only the owner may hold a reduced gradient");
  }
}

// A module that ends after one that began after it encloses it.
std::vector<int> Runtime::last_inside() const {
  const auto count = static_cast<int>(groups_.size());
  std::vector<int> ends(groups_.size());  // places in the order of exits, the last one first
  for (int place = 0; place < count; ++place) {
    ends[static_cast<size_t>(backward_gather_order_[static_cast<size_t>(place)])] = place;
  }
  std::vector<int> result(groups_.size());
  for (int g = 0; g < count; ++g) {
    int last = g;
    while (last + 1 < count && ends[static_cast<size_t>(last + 1)] > ends[static_cast<size_t>(g)]) ++last;
    result[static_cast<size_t>(g)] = last;
  }
  return result;
}

std::int64_t Runtime::live_bytes() const { return ledger_->live(); }
std::int64_t Runtime::peak_bytes() const { return ledger_->peak(); }
void Runtime::track_memory() { ledger_->enable(); }

}  // namespace dmuon
