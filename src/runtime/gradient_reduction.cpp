#include "runtime/gradient_reduction.h"

#include <c10/util/strides.h>

#include <map>
#include <set>

#include "runtime/shared_memory.h"

namespace dmuon {
namespace {

bool is_untouched(const at::Tensor& sum) { return (sum.eq(0).logical_and_(at::signbit(sum))).all().item<bool>(); }

std::int64_t total_bytes(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) bytes += static_cast<std::int64_t>(tensor.nbytes());
  }
  return bytes;
}

// Empties the unsharded leaves: [params] gradients, of a part its rows.
std::vector<at::Tensor> empty_leaves(const std::vector<DedicatedParamPtr>& params) {
  std::map<const c10::TensorImpl*, at::Tensor> wholes;  // of leaves that parts have together
  std::vector<at::Tensor> gradients;
  for (const auto& param : params) {
    const auto& leaf = param->unsharded();
    at::Tensor gradient = std::exchange(leaf.mutable_grad(), at::Tensor());
    TORCH_CHECK(!gradient.defined() || gradient.layout() == at::kStrided, "[dmuon.reduce] parameter '", param->name(),
                "' has a gradient of layout ", gradient.layout(),
                "; dedicated matrices need a strided one. Leave the parameter out of the predicate.");
    if (param->part()) {
      const auto whole = wholes.try_emplace(leaf.unsafeGetTensorImpl(), gradient).first->second;
      gradient = whole.defined() ? whole.narrow(0, param->part()->first, param->sizes().front()) : whole;
    }
    gradients.push_back(std::move(gradient));
  }
  return gradients;
}

}  // namespace

std::vector<at::Tensor> take_gradients(DedicatedParamGroup& group) {
  auto gradients = empty_leaves(group.params());
  for (size_t i = 0; i < gradients.size(); ++i) {
    auto& gradient = gradients[i];
    auto& kept = group.accumulated[i];
    if (kept.defined()) {
      if (gradient.defined()) kept.add_(gradient.detach());
      gradient = std::move(kept);
      kept = at::Tensor();
    }
    if (gradient.defined()) gradient = gradient.detach();
  }
  return gradients;
}

void accumulate_gradients(DedicatedParamGroup& group, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const auto gradients = take_gradients(group);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) group.accumulated[i] = gradients[i].to(dtype);
  }
}

GradientReduction::GradientReduction(DedicatedParamGroup& group, plan::Slot rank, const ReducePath& path,
                                     const ReduceOptions& options, MemoryLedger& ledger)
    : group_(group),
      path_(path),
      options_(options),
      ledger_(ledger),
      divisor_(options.divide_factor / options.pre_divide_factor),
      sent_(path.outgoing.defined() && !group.kept_back ? path.sent : options.dtype) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // nothing here is differentiated: cheaper calls
  auto gradients = take_gradients(group);
  group.kept_back = false;
  const auto device = group.params().front()->unsharded().device();
  wait_for_outgoing(device);
  allocate(group.reduce_layout(), rank, at::TensorOptions().dtype(options.dtype).device(device));
  place(gradients, rank);
  note_rowless(gradients, rank);

  const auto gradient_bytes = total_bytes(gradients);
  ledger_.add(gradient_bytes);
  ledger_.observe();
  ledger_.add(-gradient_bytes);
  if (path_.shard->size() > 1) {
    path_.shard_stream.wait_current();
    const StreamScope scope(path_.shard_stream);
    shard_ = path_.outgoing.defined() ? path_.shard->reduce_shared(segments_, {sent_, divide_early()})
                                      : path_.shard->reduce(segments_);
  }
  if (!device.is_cpu()) begin_replicate();
}

GradientReduction::~GradientReduction() { ledger_.add(-others_bytes_ - column_bytes_); }

// Who adds up all ranks' parts in a kernel of his own divides there too.
double GradientReduction::divide_early() { return path_.replicate ? 1.0 : std::exchange(divisor_, 1.0); }

// The outgoing memory is one for all reductions: this one's gradients follow when its last reader is done.
void GradientReduction::wait_for_outgoing(c10::Device device) const {
  if (!path_.outgoing.defined() || device.is_cpu()) return;
  Event last;
  {
    const StreamScope scope(path_.shard_stream);
    last = Event::record(device);
  }
  last.block_current_stream();
}

// Where the communicator puts what this column's peers send.
std::int64_t GradientReduction::received_bytes() const {
  std::int64_t numel = 0;
  for (const auto& segment : column_) numel += segment.buffer.numel();
  return numel * static_cast<std::int64_t>(at::elementSize(sent_)) * (path_.shard->size() - 1);
}

// [segments] undefined for those of this column.
std::vector<at::Tensor> GradientReduction::foreign_buffers(const plan::GroupLayout& layout, plan::Slot rank,
                                                           const at::TensorOptions& buffer) {
  const bool shared = path_.outgoing.defined();
  const auto bytes = static_cast<std::int64_t>(at::elementSize(sent_));
  const auto outgoing = outgoing_places(segment_sizes(layout), rank.shard, bytes);
  std::int64_t others_numel = 0;
  for (const auto& segment : layout.segments) {
    if (segment.owner.shard != rank.shard) others_numel += segment.numel;
  }
  others_ = at::empty({shared ? 0 : others_numel}, buffer);
  std::vector<at::Tensor> buffers(layout.segments.size());
  std::int64_t offset = 0;
  for (size_t s = 0; s < buffers.size(); ++s) {
    const auto numel = layout.segments[s].numel;
    if (layout.segments[s].owner.shard == rank.shard) continue;
    buffers[s] = shared ? view_shared(path_.outgoing, outgoing.places[s], numel, sent_)
                        : others_.narrow(0, std::exchange(offset, offset + numel), numel);
  }
  return buffers;
}

// Segments of this column are buffers of their own, because the owner's lives on as `.grad`; all others share one.
void GradientReduction::allocate(const plan::GroupLayout& layout, plan::Slot rank, const at::TensorOptions& buffer) {
  auto foreign = foreign_buffers(layout, rank, buffer);
  size_t next = 0;
  for (const auto& segment : layout.segments) {
    auto& other = foreign[next++];
    if (segment.owner.shard == rank.shard) {
      column_.push_back({segment.owner.replicate, at::empty({segment.numel}, buffer)});
      column_bytes_ += static_cast<std::int64_t>(column_.back().buffer.nbytes());
      segments_.push_back({segment.owner.shard, column_.back().buffer});
    } else {
      segments_.push_back({segment.owner.shard, std::move(other)});
    }
    auto& flat = segments_.back().buffer;
    if (segment.numel != segment.payload) flat.zero_();  // alignment gaps travel too: give them a value
  }
  others_bytes_ = path_.outgoing.defined() ? received_bytes() : static_cast<std::int64_t>(others_.nbytes());
  ledger_.add(others_bytes_ + column_bytes_);
}

void GradientReduction::pack(const Copies& copies) const {
  if (copies.first.empty()) return;
  at::_foreach_copy_(copies.first, copies.second);
  if (options_.pre_divide_factor != 1.0) at::_foreach_mul_(copies.first, 1.0 / options_.pre_divide_factor);
}

void GradientReduction::place(const std::vector<at::Tensor>& gradients, plan::Slot rank) {
  Copies outgoing;  // apart: one call copies into one dtype
  Copies staying;
  for (size_t s = 0; s < segments_.size(); ++s) {
    const auto& segment = group_.reduce_layout().segments[s];
    auto& copies = segment.owner.shard != rank.shard && sent_ != options_.dtype ? outgoing : staying;
    for (const auto& packed : segment.matrices) {
      const auto position = group_.position_of(packed.matrix);
      const auto& param = group_.params()[position];
      const auto view = segments_[s].buffer.as_strided(param->sizes(), c10::contiguous_strides(param->sizes()),
                                                       segments_[s].buffer.storage_offset() + packed.offset);
      const auto& gradient = gradients[position];
      if (gradient.defined()) {
        copies.first.push_back(view);
        copies.second.push_back(gradient);
      } else {
        view.fill_(-0.0);
      }
      if (segment.owner == rank) shares_.push_back({param, view, gradient.defined()});
    }
  }
  pack(outgoing);
  pack(staying);
}

// Users expect a gradient without rows there, as everywhere else.
void GradientReduction::note_rowless(const std::vector<at::Tensor>& gradients, plan::Slot rank) {
  std::set<int> has_rows;
  const auto& segments = group_.reduce_layout().segments;
  for (const auto& segment : segments) {
    if (segment.part && segment.owner == rank) has_rows.insert(segment.part->parameter);
  }
  for (const auto& segment : segments) {
    if (!segment.part || segment.part->start != 0 || has_rows.contains(segment.part->parameter)) continue;
    const auto position = group_.position_of(segment.part->parameter);
    if (gradients[position].defined()) rowless_.push_back(group_.params()[position]);
  }
}

// Runs on the replicate stream, after stage 1's stream (CUDA) or after stage 1 itself (CPU).
void GradientReduction::begin_replicate() {
  if (replicating_) return;
  replicating_ = true;
  if (!path_.replicate) return;
  const at::NoGradGuard no_grad;
  path_.replicate_stream.wait_current();
  path_.replicate_stream.wait_for(path_.shard_stream);
  const StreamScope scope(path_.replicate_stream);
  merged_ = std::exchange(group_.partial, {});
  TORCH_CHECK(
      merged_.empty() || merged_.size() == column_.size(), "[dmuon.reduce] group '", group_.name(),
      "': requires_grad of its matrices changed while gradients wait for set_requires_all_reduce(True). Change it "
      "between optimizer steps.");
  for (size_t i = 0; i < merged_.size(); ++i) column_[i].buffer.add_(merged_[i]);
  if (options_.across_replicas) {
    replicate_ = path_.replicate->reduce(column_);
  } else {
    for (const auto& segment : column_) group_.partial.push_back(segment.buffer);
  }
}

void GradientReduction::finish_shard() {
  shard_.wait();
  segments_.clear();
  others_ = at::Tensor();
  ledger_.add(-std::exchange(others_bytes_, 0));
  begin_replicate();
}

void GradientReduction::finish() {
  const at::NoGradGuard no_grad;
  finish_shard();
  replicate_.wait();
  merged_.clear();
  if (path_.replicate && !options_.across_replicas) return shares_.clear();  // a later backward delivers
  std::erase_if(shares_, [this](const Share& share) {
    if (share.used) deliver(share);
    return share.used || !peers();
  });
  for (const auto& param : std::exchange(rowless_, {})) param->close_gradient();
}

void GradientReduction::settle() {
  const at::NoGradGuard no_grad;
  for (const auto& share : shares_) {
    if (!is_untouched(share.sum)) deliver(share);
  }
  shares_.clear();
}

void GradientReduction::deliver(const Share& share) const {
  if (!share.param->trainable()) return;  // frozen since the reduction began
  at::Tensor& grad = share.param->open_gradient();
  auto mean = share.sum.to(share.param->registered().scalar_type());
  if (divisor_ != 1.0) mean.div_(divisor_);
  if (options_.reproducible) {
    grad = group_.trees[share.param->name()].add_to(grad, mean);
  } else {
    grad = grad.defined() ? grad.add_(mean) : mean;
  }
  share.param->close_gradient();
}

}  // namespace dmuon
