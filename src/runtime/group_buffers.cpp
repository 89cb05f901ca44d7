#include "runtime/group_buffers.h"

#include "runtime/shared_memory.h"
#include "runtime/storage.h"

namespace dmuon {
namespace {

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

// The copy that is sent, in shared memory if there is some.
at::Tensor make_sent(const BufferPlacement& placement, std::int64_t place, std::int64_t numel, at::ScalarType dtype) {
  if (placement.shared.defined()) return view_shared(placement.shared, place, numel, dtype);
  return at::zeros({numel}, at::TensorOptions().dtype(dtype).device(placement.device));
}

std::vector<std::int64_t> whole_sizes(const DedicatedParam& param) {
  auto sizes = param.sizes();
  if (param.part()) sizes.front() = param.part()->total;
  return sizes;
}

}  // namespace

GroupBuffers::GroupBuffers(const plan::GroupLayout& layout, const std::vector<DedicatedParamPtr>& members,
                           const BufferPlacement& placement, MemoryLedger& ledger)
    : ledger_(ledger) {
  const at::NoGradGuard no_grad;
  const auto places = plan::gather_places(layout, placement.rank.shard);
  gather_ = at::empty({places.numel}, at::TensorOptions().dtype(placement.compute_dtype).device(placement.device));
  for (const auto& segment : layout.segments) {
    segments_.push_back(make_segment(segment, places.offsets[segments_.size()], members, placement));
    const auto& buffers = segments_.back();
    if (buffers.column && !buffers.compute.is_same(buffers.master)) resident_bytes_ += bytes_of(buffers.compute);
    resident_bytes_ += bytes_of(buffers.master);
  }
  gather_bytes_ = bytes_of(gather_);
  resize_storage(gather_, 0);
  ledger_.add(resident_bytes_);
  refresh_published();
}

GroupBuffers::~GroupBuffers() {
  ledger_.add(-resident_bytes_);
  if (gather_.storage().nbytes() != 0) ledger_.add(-gather_bytes_);
}

SegmentBuffers GroupBuffers::make_segment(const plan::Segment& segment, std::int64_t offset,
                                          const std::vector<DedicatedParamPtr>& members,
                                          const BufferPlacement& placement) {
  SegmentBuffers buffers;
  buffers.owner = segment.owner;
  buffers.owned = segment.owner == placement.rank;
  buffers.column = segment.owner.shard == placement.rank.shard;
  if (placement.shared.defined()) buffers.place = placement.places.at(segments_.size());
  if (buffers.owned) place_masters(segment, buffers, members, placement);
  if (!buffers.column) {
    buffers.compute = gather_.narrow(0, offset, segment.part ? segment.payload : segment.numel);
  } else if (buffers.owned && !placement.replicated && buffers.master.scalar_type() == placement.compute_dtype) {
    buffers.compute = buffers.master;
  } else {
    buffers.compute = make_sent(placement, buffers.place, segment.numel, placement.compute_dtype);
  }
  if (segment.part && buffers.column) buffers.slice = gather_.narrow(0, offset, segment.payload);
  link_unsharded(segment, buffers, offset, members);
  return buffers;
}

// Leaves keep their identity; only their data moves.
void GroupBuffers::link_unsharded(const plan::Segment& segment, const SegmentBuffers& buffers, std::int64_t offset,
                                  const std::vector<DedicatedParamPtr>& members) const {
  for (const auto& packed : segment.matrices) {
    const auto& param = members[static_cast<size_t>(packed.matrix)];
    const auto view = buffers.compute.narrow(0, packed.offset, packed.numel).view(param->sizes());
    param->set_published(buffers.column ? view : at::Tensor());
    at::Tensor leaf = param->unsharded();
    if (!segment.part) {
      leaf.set_data(view.variable_data());
    } else if (param->leads()) {
      const auto whole = gather_.narrow(0, offset, segment.part->whole_numel).view(whole_sizes(*param));
      leaf.set_data(whole.variable_data());
    }
  }
}

void GroupBuffers::place_masters(const plan::Segment& segment, SegmentBuffers& buffers,
                                 const std::vector<DedicatedParamPtr>& members, const BufferPlacement& placement) {
  const auto dtype = members[static_cast<size_t>(segment.matrices.front().matrix)]->registered().scalar_type();
  const bool sent = !placement.replicated && dtype == placement.compute_dtype;
  buffers.master = sent ? make_sent(placement, buffers.place, segment.numel, dtype)
                        : at::zeros({segment.numel}, gather_.options().dtype(dtype));
  for (const auto& packed : segment.matrices) {
    const auto& param = members[static_cast<size_t>(packed.matrix)];
    auto view = buffers.master.narrow(0, packed.offset, packed.numel).view(param->sizes());
    const bool there = !param->registered().is_meta() && param->registered().data_ptr() == view.data_ptr();
    if (!there) view.copy_(param->registered());
    at::Tensor leaf = param->registered();
    leaf.set_data(view.variable_data());
    owned_.push_back({param, view, 0});
  }
}

std::vector<OwnerSegment> GroupBuffers::broadcast_segments() const {
  std::vector<OwnerSegment> segments;
  segments.reserve(segments_.size());
  for (const auto& segment : segments_) {
    const auto sent = segment.slice.defined() ? segment.compute.narrow(0, 0, segment.slice.numel()) : segment.compute;
    segments.push_back({segment.owner.shard, sent, segment.place});
  }
  return segments;
}

std::vector<OwnerSegment> GroupBuffers::publish_segments() const {
  std::vector<OwnerSegment> segments;
  for (const auto& segment : segments_) {
    if (segment.column) segments.push_back({segment.owner.replicate, segment.compute});
  }
  return segments;
}

void GroupBuffers::refresh_published() {
  relink_masters();
  for (const auto& segment : segments_) {
    if (segment.owned && !segment.compute.is_same(segment.master)) segment.compute.copy_(segment.master);
  }
  for (auto& owned : owned_) owned.version = static_cast<std::int64_t>(owned.param->registered()._version());
}

void GroupBuffers::check_published() const {
  for (const auto& owned : owned_) {
    const auto& leaf = owned.param->registered();
    TORCH_CHECK(
        leaf.data_ptr() == owned.master.data_ptr() && static_cast<std::int64_t>(leaf._version()) == owned.version,
        "[dmuon.runtime] parameter '", owned.param->name(),
        "' was changed on its owner outside the optimizer, and its replicas do not have the new values: call "
        "dmuon.publish(model) on all ranks after the change.");
  }
}

// `p.data = other` leaves the packed master behind: take the new values and move the parameter back.
void GroupBuffers::relink_masters() {
  for (const auto& owned : owned_) {
    at::Tensor leaf = owned.param->registered();
    if (leaf.data_ptr() == owned.master.data_ptr()) continue;
    owned.master.copy_(leaf.variable_data());
    leaf.set_data(owned.master.variable_data());
  }
}

void GroupBuffers::allocate_gather() {
  if (gather_bytes_ == 0 || gather_.storage().nbytes() != 0) return;
  resize_storage(gather_, gather_bytes_);
  ledger_.add(gather_bytes_);
}

void GroupBuffers::join_parts() const {
  for (const auto& segment : segments_) {
    if (segment.slice.defined()) segment.slice.copy_(segment.compute.narrow(0, 0, segment.slice.numel()));
  }
}

void GroupBuffers::release_gather() {
  if (gather_bytes_ == 0 || gather_.storage().nbytes() == 0) return;
  resize_storage(gather_, 0);
  ledger_.add(-gather_bytes_);
}

}  // namespace dmuon
