#include "dmuon/dedicated_param.h"

namespace dmuon {

DedicatedParam::DedicatedParam(ParamSpec spec, plan::Slot owner, plan::Slot rank)
    : spec_(std::move(spec)), owner_(owner), rank_(rank) {
  TORCH_CHECK(spec_.registered.defined() && spec_.registered.sizes() == at::IntArrayRef(spec_.sizes),
              "[dmuon.runtime] parameter '", spec_.name, "': the registered tensor must have the matrix's shape");
  TORCH_CHECK(spec_.unsharded.defined() && spec_.unsharded.is_leaf(), "[dmuon.runtime] parameter '", spec_.name,
              "': the unsharded tensor must be a leaf");
}

at::Tensor DedicatedParam::reduced_grad() const { return is_owner() ? spec_.registered.grad() : at::Tensor(); }

void DedicatedParam::follow_requires_grad() {
  if (spec_.unsharded.requires_grad() != trainable()) spec_.unsharded.set_requires_grad(trainable());
}

}  // namespace dmuon
