#include "dmuon/dedicate.h"

namespace dmuon {
namespace {

struct Selection {
  plan::MeshShape mesh;
  std::int64_t cut_elements = plan::kCutElements;
  std::vector<plan::Matrix> matrices{};  // and parts of parameters, which have their weight together
  std::vector<at::Tensor> weights{};
  std::vector<GroupSpec> groups{};
};

// What is wrong with a weight, or "".
std::string problem_of(const std::string& name, const at::Tensor& weight, plan::Kind kind) {
  if (!weight.defined()) return c10::str("parameter '", name, "' is undefined");
  const bool matrix = kind == plan::Kind::kMatrix;
  const bool fits = matrix ? weight.dim() == 2 : weight.dim() >= 1;
  if (!fits || !weight.is_floating_point() || !weight.is_leaf()) {
    return c10::str("parameter '", name, "' is a ", weight.is_leaf() ? "leaf" : "non-leaf", " of shape ",
                    weight.sizes(), " and dtype ", weight.scalar_type(), "; expected a floating leaf ",
                    matrix ? "[rows, cols]" : "of at least one dimension");
  }
  return "";
}

std::string add(const HookModule& module, plan::Kind kind, Selection& selection) {
  for (const auto& [name, weight] : kind == plan::Kind::kMatrix ? module.matrices : module.elementwise) {
    if (const auto problem = problem_of(name, weight, kind); !problem.empty()) return problem;
    const auto rows = weight.size(0);
    const plan::Matrix whole{name, rows, rows == 0 ? 0 : weight.numel() / rows, module.name, kind};
    for (auto& part : plan::cut_by_rows(whole, selection.mesh, selection.cut_elements)) {
      selection.groups.back().members.push_back(static_cast<int>(selection.matrices.size()));
      selection.matrices.push_back(std::move(part));
      selection.weights.push_back(weight);
    }
  }
  return "";
}

std::string select(const std::vector<HookModule>& modules, Selection& selection) {
  for (const auto& module : modules) {
    selection.groups.emplace_back().name = module.name;
    for (const auto kind : {plan::Kind::kMatrix, plan::Kind::kElementwise}) {
      if (auto problem = add(module, kind, selection); !problem.empty()) return problem;
    }
  }
  return "";
}

bool encloses(const std::string& outer, const std::string& inner) {
  return outer.empty() || inner.compare(0, outer.size() + 1, outer + ".") == 0;
}

// All ranks agree on the plan or throw together.
plan::Plan agreed_plan(const Selection& selection, std::string problem, const std::vector<Communicator*>& axes,
                       const plan::PlanOptions& options) {
  plan::Plan plan;
  try {
    if (problem.empty()) {
      plan = plan::compute_balanced_assignment(selection.matrices, selection.mesh, options);
    }
  } catch (const std::invalid_argument& error) {
    problem = error.what();
  }
  agree_on_inputs(axes, problem, plan::describe_inputs(selection.matrices));
  return plan;
}

// Each weight once: parts follow each other.
std::vector<at::Tensor> different_weights(const Selection& selection) {
  std::vector<at::Tensor> weights;
  for (const auto& weight : selection.weights) {
    if (weights.empty() || !weights.back().is_same(weight)) weights.push_back(weight);
  }
  return weights;
}

ParamSpec make_spec(const plan::Matrix& matrix, const at::Tensor& weight, bool owned) {
  const auto master = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto values = weight.detach().narrow(0, matrix.part ? matrix.part->first : 0, matrix.rows);
  auto registered = owned ? values.to(master, /*non_blocking=*/false, /*copy=*/true)
                          : at::empty(values.sizes(), at::TensorOptions().dtype(master).device(at::kMeta));
  registered.set_requires_grad(weight.requires_grad());
  return {matrix.name, values.sizes().vec(), std::move(registered), weight};
}

// After a forward that raised: what it raised is what the caller must see, whatever ending it runs into.
void end_quietly(const std::function<void()>& end) {
  try {
    end();
  } catch (const std::exception& error) {
    TORCH_WARN("[dmuon.runtime] ending a forward that had failed: ", error.what());
  }
}

}  // namespace

void set_exit_order(std::vector<GroupSpec>& groups) {
  std::vector<GroupSpec*> open;
  int next = 0;
  const auto close_all_but_enclosing = [&](const std::string* name) {
    while (!open.empty() && !(name && encloses(open.back()->name, *name))) {
      open.back()->exit_order = next++;
      open.pop_back();
    }
  };
  for (auto& group : groups) {
    close_all_but_enclosing(&group.name);
    open.push_back(&group);
  }
  close_all_but_enclosing(nullptr);
}

RuntimePtr dedicate(const std::vector<HookModule>& modules, RuntimeComms comms, const DedicateOptions& options) {
  std::vector<Communicator*> axes{comms.gather.get()};
  if (comms.replicate) axes.push_back(comms.replicate.get());
  Selection selection{.mesh = {.shard = axes.front()->size(), .replicate = axes.size() > 1 ? axes.back()->size() : 1},
                      .cut_elements = options.cut_elements};
  const auto problem = select(modules, selection);
  auto plan = agreed_plan(selection, problem, axes, options.plan);
  set_exit_order(selection.groups);
  const auto device = selection.weights.front().device();
  for (auto* axis : axes) broadcast_from_first(*axis, different_weights(selection), device);

  const plan::Slot here{.shard = comms.gather->rank(), .replicate = comms.replicate ? comms.replicate->rank() : 0};
  std::vector<ParamSpec> specs;
  for (size_t i = 0; i < selection.weights.size(); ++i) {
    specs.push_back(make_spec(plan.matrices[i], selection.weights[i], plan.owners[i] == here));
  }
  return c10::make_intrusive<Runtime>(std::move(plan), std::move(specs), std::move(selection.groups), std::move(comms),
                                      device, options.runtime);
}

at::Tensor call_root(Runtime& runtime, const std::function<at::Tensor()>& forward) {
  runtime.begin_forward();
  at::Tensor output;
  try {
    output = forward();
  } catch (...) {
    end_quietly([&] { runtime.end_forward({}); });
    throw;
  }
  runtime.end_forward({output});
  return output;
}

at::Tensor call_module(Runtime& runtime, int group, const at::Tensor& input,
                       const std::function<at::Tensor(const at::Tensor&)>& forward) {
  const auto inputs = runtime.pre_forward(group, {input});
  at::Tensor output;
  try {
    output = forward(inputs.front());
  } catch (...) {
    end_quietly([&] { runtime.post_forward(group, {}); });
    throw;
  }
  runtime.post_forward(group, {output});
  return output;
}

void average_gradients(Communicator& communicator, const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<OwnerSegment> segments;
  for (const auto& parameter : parameters) {
    auto& grad = parameter.mutable_grad();
    grad = grad.defined() ? grad.contiguous() : at::zeros_like(parameter, at::MemoryFormat::Contiguous);
    segments.push_back({0, grad.view({-1})});
  }
  if (communicator.size() == 1) return;
  communicator.reduce(segments).wait();
  for (const auto& segment : segments) segment.buffer.div_(communicator.size());
  communicator.broadcast(segments).wait();
}

}  // namespace dmuon
