#include "runtime/autograd_hooks.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace dmuon {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct PostBackward : torch::autograd::Function<PostBackward> {
  static variable_list forward(AutogradContext* context, const RuntimePtr& runtime,
                               const c10::intrusive_ptr<GroupUse>& use, at::TensorList inputs) {
    context->saved_data["runtime"] = c10::IValue::make_capsule(runtime);
    context->saved_data["use"] = c10::IValue::make_capsule(use);
    context->set_materialize_grads(false);
    return inputs.vec();
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto runtime = context->saved_data["runtime"].toCapsule();
    const auto use = context->saved_data["use"].toCapsule();
    static_cast<Runtime&>(*runtime).post_backward(static_cast<GroupUse&>(*use));
    variable_list result(2);  // runtime and use have no gradient
    result.insert(result.end(), gradients.begin(), gradients.end());
    return result;
  }
};

template <typename Hook>
void hook_each(const std::vector<at::Tensor>& outputs, const Hook& hook) {
  for (const auto& output : outputs) {
    if (output.requires_grad() && !output.is_leaf()) output.register_hook(hook);
  }
}

}  // namespace

bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

std::vector<at::Tensor> watch_inputs(const RuntimePtr& runtime, const c10::intrusive_ptr<GroupUse>& use,
                                     const std::vector<at::Tensor>& inputs) {
  return PostBackward::apply(runtime, use, at::TensorList(inputs));
}

void watch_outputs(const RuntimePtr& runtime, const c10::intrusive_ptr<GroupUse>& use,
                   const std::vector<at::Tensor>& outputs) {
  hook_each(outputs, [runtime, use](const at::Tensor&) { runtime->pre_backward(*use); });
}

void watch_root_outputs(const RuntimePtr& runtime, const std::vector<at::Tensor>& outputs) {
  hook_each(outputs, [runtime](const at::Tensor&) { runtime->on_root_gradient(); });
}

}  // namespace dmuon
