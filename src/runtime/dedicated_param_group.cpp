#include "dmuon/dedicated_param_group.h"

#include "runtime/group_buffers.h"

namespace dmuon {
namespace {

c10::Device device_of(const DedicatedParamGroup& group) { return group.params().front()->unsharded().device(); }

}  // namespace

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
    positions_.push_back(params_.size());
    if (param) params_.push_back(param);
  }
  accumulated.resize(params_.size());
  trainable_.resize(members_.size(), false);
  follow_trainable();
}

DedicatedParamGroup::~DedicatedParamGroup() = default;

bool DedicatedParamGroup::follow_trainable() {
  bool changed = false;
  for (size_t i = 0; i < members_.size(); ++i) {
    const bool now = members_[i] && members_[i]->trainable();
    changed = changed || now != trainable_[i];
    trainable_[i] = now;
  }
  if (changed) reduce_layout_ = plan::make_sub_layout(layout_, trainable_);
  return changed;
}

std::string DedicatedParamGroup::trainable_mask() const {
  std::string mask;
  for (size_t i = 0; i < members_.size(); ++i) {
    if (members_[i]) mask += trainable_[i] ? '1' : '0';
  }
  return mask;
}

void DedicatedParamGroup::materialize(const BufferPlacement& placement, MemoryLedger& ledger) {
  gather_.wait();
  publish_.wait();
  state_ = GroupState::kSharded;
  buffers_ = std::make_unique<GroupBuffers>(layout_, members_, placement, ledger);
}

void DedicatedParamGroup::begin_publish(Communicator& replicate, const Stream& stream) {
  const at::NoGradGuard no_grad;
  publish_.wait();
  buffers_->refresh_published();
  stream.wait_current();
  const StreamScope scope(stream);
  publish_ = replicate.broadcast(buffers_->publish_segments());
}

void DedicatedParamGroup::begin_gather(Communicator& communicator, const Stream& stream, Source source) {
  const at::NoGradGuard no_grad;
  gather_.wait();
  if (source == Source::kMasters) buffers_->refresh_published();
  if (source == Source::kPublished) buffers_->check_published();
  buffers_->allocate_gather();
  state_ = GroupState::kUnsharding;
  stream.wait_current();
  const StreamScope scope(stream);
  publish_.wait();
  buffers_->join_parts();
  gather_ = communicator.size() > 1 ? communicator.broadcast(buffers_->broadcast_segments())
                                    : Pending::on_current_stream(device_of(*this), {});
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
