// Where autograd calls the runtime: an identity node behind a hook module's inputs, hooks on its outputs and on the
// root's.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "dmuon/runtime.h"

namespace dmuon {

/// True inside a backward (of any thread's graph task).
[[nodiscard]] bool in_backward();

/// Passes `inputs` (all requiring grad) through one identity node whose backward calls runtime->post_backward(use).
/// The node is older than everything the module records, so it runs after the module's gradients are accumulated.
[[nodiscard]] std::vector<at::Tensor> watch_inputs(const RuntimePtr& runtime, const c10::intrusive_ptr<GroupUse>& use,
                                                   const std::vector<at::Tensor>& inputs);

/// Hooks every non-leaf output that requires grad: the first gradient to arrive calls runtime->pre_backward(use).
void watch_outputs(const RuntimePtr& runtime, const c10::intrusive_ptr<GroupUse>& use,
                   const std::vector<at::Tensor>& outputs);

/// Hooks the root's outputs, so that the final callback belongs to the outermost graph task.
void watch_root_outputs(const RuntimePtr& runtime, const std::vector<at::Tensor>& outputs);

}  // namespace dmuon
