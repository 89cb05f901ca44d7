#include "dmuon/dedicated_param_group.h"

#include "runtime/group_buffers.h"

namespace dmuon {

const char* to_string(GroupState state) {
  switch (state) {
    case GroupState::kSharded:
      return "sharded";
    case GroupState::kUnsharding:
      return "unsharding";
    case GroupState::kUnsharded:
      return "unsharded";
  }
  return "unknown";
}

DedicatedParamGroup::DedicatedParamGroup(std::string name, int index, plan::GroupLayout layout,
                                         std::vector<DedicatedParamPtr> members)
    : name_(std::move(name)), index_(index), layout_(std::move(layout)), members_(std::move(members)) {
  for (const auto& param : members_) {
    if (param) params_.push_back(param);
  }
  accumulated.resize(params_.size());
}

DedicatedParamGroup::~DedicatedParamGroup() = default;

bool DedicatedParamGroup::trainable() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param->trainable(); });
}

void DedicatedParamGroup::materialize(plan::Slot rank, c10::Device device, at::ScalarType compute_dtype,
                                      MemoryLedger& ledger) {
  gather_.wait();
  state_ = GroupState::kSharded;
  buffers_ = std::make_unique<GroupBuffers>(layout_, members_, rank, device, compute_dtype, ledger);
}

void DedicatedParamGroup::begin_gather(Communicator& communicator, const Stream& stream, bool refresh) {
  const at::NoGradGuard no_grad;
  gather_.wait();
  if (refresh) buffers_->refresh_published();
  buffers_->allocate_gather();
  state_ = GroupState::kUnsharding;
  if (communicator.size() == 1) return;
  stream.wait_current();
  const StreamScope scope(stream);
  gather_ = communicator.broadcast(buffers_->broadcast_segments());
}

void DedicatedParamGroup::wait_gather() {
  gather_.wait();
  if (state_ == GroupState::kUnsharding) state_ = GroupState::kUnsharded;
}

void DedicatedParamGroup::release() {
  gather_.wait();
  buffers_->release_gather();
  state_ = GroupState::kSharded;
}

}  // namespace dmuon
