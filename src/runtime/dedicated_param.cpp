#include "dmuon/dedicated_param.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace dmuon {
namespace {

void run_post_accumulate_hooks(const at::Tensor& param) {
  if (!torch::autograd::impl::get_autograd_meta(param)) return;
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(param);
  if (hook) (*hook)(param);
}

}  // namespace

DedicatedParam::DedicatedParam(ParamSpec spec, std::optional<plan::Part> part, plan::Slot owner, plan::Slot rank)
    : spec_(std::move(spec)), part_(part), owner_(owner), rank_(rank) {
  TORCH_CHECK(spec_.registered.defined() && spec_.registered.sizes() == at::IntArrayRef(spec_.sizes),
              "[dmuon.runtime] parameter '", spec_.name, "': the registered tensor must have the matrix's shape");
  TORCH_CHECK(spec_.unsharded.defined() && spec_.unsharded.is_leaf(), "[dmuon.runtime] parameter '", spec_.name,
              "': the unsharded tensor must be a leaf");
}

at::Tensor DedicatedParam::reduced_grad() const { return is_owner() ? shown().grad() : at::Tensor(); }

at::Tensor& DedicatedParam::open_gradient() {
  const bool inside = spec_.sharded.defined() && spec_.sharded.grad().defined();
  if (inside) run_post_accumulate_hooks(spec_.registered);
  return spec_.registered.mutable_grad();
}

void DedicatedParam::close_gradient() {
  run_post_accumulate_hooks(spec_.registered);
  if (spec_.sharded.defined()) run_post_accumulate_hooks(spec_.sharded);
}

std::int64_t DedicatedParam::gradient_bytes() const {
  return is_owner() && shown().grad().defined() ? static_cast<std::int64_t>(spec_.registered.nbytes()) : 0;
}

void DedicatedParam::follow_requires_grad() {
  if (spec_.unsharded.requires_grad() != trainable()) spec_.unsharded.set_requires_grad(trainable());
}

}  // namespace dmuon
