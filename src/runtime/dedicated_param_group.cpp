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
    if (param) params_.push_back(param);
  }
  accumulated.resize(params_.size());
}

DedicatedParamGroup::~DedicatedParamGroup() = default;

bool DedicatedParamGroup::trainable() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param->trainable(); });
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
