#include "bindings/handles.h"
#include "bindings/register.h"
#include "dmuon/dedicate.h"
#include "dmuon/memory_model.h"
#include "dmuon/runtime.h"

namespace dmuon::bindings {
namespace {

using Groups = std::vector<std::tuple<std::string, std::vector<int64_t>>>;  // hook module, members
// gather, reduce, replicate
using Comms = std::tuple<CommunicatorHandlePtr, CommunicatorHandlePtr, std::optional<CommunicatorHandlePtr>>;
using Dtypes = std::tuple<std::optional<at::ScalarType>, std::optional<at::ScalarType>>;  // param, reduce
using Flags = std::tuple<bool, bool, bool>;  // cast_forward_inputs, reshard_after_forward, reproducible
using Options = std::tuple<Dtypes, Flags>;
// [plan matrices] registered, unsharded, and of parts what users see
using Tensors = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>, std::vector<std::optional<at::Tensor>>>;

std::vector<GroupSpec> to_groups(const Groups& groups) {
  std::vector<GroupSpec> specs;
  for (const auto& [name, members] : groups) {
    specs.push_back({name, std::vector<int>(members.begin(), members.end())});
  }
  set_exit_order(specs);
  return specs;
}

RuntimePtr make_runtime(const PlanPtr& plan, const Tensors& tensors, const Groups& groups, const Comms& comms,
                        c10::Device device, const Options& options) {
  const auto& [registered, unsharded, sharded] = tensors;
  std::vector<ParamSpec> params;
  for (size_t i = 0; i < registered.size(); ++i) {
    params.push_back({plan->plan.matrices.at(i).name, registered[i].sizes().vec(), registered[i], unsharded.at(i),
                      sharded.at(i).value_or(at::Tensor())});
  }
  const auto& [param_dtype, reduce_dtype] = std::get<0>(options);
  const auto& [cast_inputs, reshard, reproducible] = std::get<1>(options);
  const auto& [gather, reduce, replicate] = comms;
  RuntimeComms communicators{gather->communicator, reduce->communicator, nullptr};
  if (replicate) communicators.replicate = (*replicate)->communicator;
  return c10::make_intrusive<Runtime>(plan->plan, std::move(params), to_groups(groups), std::move(communicators),
                                      device,
                                      RuntimeOptions{param_dtype, reduce_dtype, cast_inputs, reshard, reproducible});
}

std::optional<int> to_index(std::optional<int64_t> group) {
  return group ? std::optional<int>(static_cast<int>(*group)) : std::nullopt;
}

std::vector<at::Tensor> pre_forward(const RuntimePtr& self, int64_t group, const std::vector<at::Tensor>& inputs) {
  return self->pre_forward(static_cast<int>(group), inputs);
}

void post_forward(const RuntimePtr& self, int64_t group, const std::vector<at::Tensor>& outputs) {
  self->post_forward(static_cast<int>(group), outputs);
}

// resident, momentum, forward peak, backward peak, in bytes, of this rank.
std::tuple<int64_t, int64_t, int64_t, int64_t> predict_memory(const RuntimePtr& self) {
  const auto master = self->params().front()->registered().scalar_type();
  plan::MemoryOptions options;
  options.master_bytes = static_cast<int64_t>(at::elementSize(master));
  options.compute_bytes = static_cast<int64_t>(at::elementSize(self->compute_dtype()));
  options.reduce_bytes = static_cast<int64_t>(at::elementSize(self->reduce_dtype()));
  options.published_copy = master != self->compute_dtype() || self->plan().mesh.replicate > 1;
  options.grad_aliases_reduce = master == self->reduce_dtype();
  options.reshard_after_forward = self->groups().front()->reshard_after_forward;
  options.outgoing = self->outgoing_bytes();
  options.received_bytes = self->received_bytes();
  options.last_inside = self->last_inside();
  options.replicated = self->plan().mesh.replicate > 1;
  std::vector<plan::GroupLayout> layouts;
  for (const auto& group : self->groups()) layouts.push_back(group->layout());
  const auto estimate = plan::predict_memory(layouts, self->rank(), options);
  return {estimate.resident(), estimate.momentum, estimate.forward_peak, estimate.backward_peak};
}

std::tuple<int64_t, int64_t> owner_of(const DedicatedParamPtr& self) {
  return {self->owner().shard, self->owner().replicate};
}

std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

void register_params(torch::Library& library) {
  library.class_<DedicatedParam>("DedicatedParam")
      .def("name", [](const DedicatedParamPtr& self) { return self->name(); })
      .def("owner", &owner_of)
      .def("is_owner", [](const DedicatedParamPtr& self) { return self->is_owner(); })
      .def("registered", [](const DedicatedParamPtr& self) { return self->registered(); })
      .def("unsharded", [](const DedicatedParamPtr& self) { return self->unsharded(); })
      .def("owned_data", [](const DedicatedParamPtr& self) { return if_defined(self->owned_data()); })
      .def("reduced_grad", [](const DedicatedParamPtr& self) { return if_defined(self->reduced_grad()); });
  library.class_<DedicatedParamGroup>("DedicatedParamGroup")
      .def("name", [](const DedicatedParamGroupPtr& self) { return self->name(); })
      .def("params", [](const DedicatedParamGroupPtr& self) { return self->params(); })
      .def("state", [](const DedicatedParamGroupPtr& self) { return std::string(to_string(self->state())); });
}

}  // namespace

void register_runtime(torch::Library& library) {
  register_params(library);
  library.class_<Runtime>("Runtime")
      .def(torch::init(&make_runtime))
      .def("begin_forward", &Runtime::begin_forward)
      .def("end_forward", &Runtime::end_forward)
      .def("pre_forward", &pre_forward)
      .def("post_forward", &post_forward)
      .def("materialize", &Runtime::materialize)
      .def("rebind", [](const RuntimePtr& self, int64_t matrix,
                        const at::Tensor& registered) { self->rebind(static_cast<int>(matrix), registered); })
      .def("reshow", [](const RuntimePtr& self, int64_t matrix,
                        const at::Tensor& sharded) { self->reshow(static_cast<int>(matrix), sharded); })
      .def("set_requires_gradient_sync",
           [](const RuntimePtr& self, bool enabled, std::optional<int64_t> group) {
             self->set_requires_gradient_sync(enabled, to_index(group));
           })
      .def("requires_gradient_sync",
           [](const RuntimePtr& self, int64_t group) { return self->requires_gradient_sync(static_cast<int>(group)); })
      .def("set_reshard_after_forward",
           [](const RuntimePtr& self, bool enabled, std::optional<int64_t> group) {
             self->set_reshard_after_forward(enabled, to_index(group));
           })
      .def("set_requires_all_reduce", &Runtime::set_requires_all_reduce)
      .def("publish", [](const RuntimePtr& self, int64_t group) { self->publish(static_cast<int>(group)); })
      .def("wait_publishes", &Runtime::wait_publishes)
      .def("check_replicas", &Runtime::check_replicas)
      .def("set_gradient_divide_factor", &Runtime::set_gradient_divide_factor)
      .def("clear_accumulated", &Runtime::clear_accumulated)
      .def("check_invariants", &Runtime::check_invariants)
      .def("backward_count", &Runtime::backward_count)
      .def("progress", &Runtime::progress)
      .def("live_bytes", &Runtime::live_bytes)
      .def("peak_bytes", &Runtime::peak_bytes)
      .def("outgoing_bytes", &Runtime::outgoing_bytes)
      .def("track_memory", &Runtime::track_memory)
      .def("predict_memory", &predict_memory)
      .def("params", [](const RuntimePtr& self) { return self->params(); })
      .def("groups", [](const RuntimePtr& self) { return self->groups(); });
}

}  // namespace dmuon::bindings
