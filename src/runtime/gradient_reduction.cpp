#include "runtime/gradient_reduction.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <map>

namespace dmuon {
namespace {

bool is_untouched(const at::Tensor& sum) { return (sum.eq(0).logical_and_(at::signbit(sum))).all().item<bool>(); }

void run_post_accumulate_hooks(const at::Tensor& param) {
  const auto& hook = torch::autograd::impl::post_acc_grad_hooks(param);
  if (hook) (*hook)(param);
}

}  // namespace

std::vector<at::Tensor> take_gradients(DedicatedParamGroup& group) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < group.params().size(); ++i) {
    const auto& leaf = group.params()[i]->unsharded();
    at::Tensor gradient = leaf.grad();
    leaf.mutable_grad() = at::Tensor();
    TORCH_CHECK(!gradient.defined() || gradient.layout() == at::kStrided, "[dmuon.reduce] parameter '",
                group.params()[i]->name(), "' has a gradient of layout ", gradient.layout(),
                "; dedicated matrices need a strided one. Leave the parameter out of the predicate.");
    auto& kept = group.accumulated[i];
    if (kept.defined()) {
      if (gradient.defined()) kept.add_(gradient.detach());
      gradient = std::move(kept);
      kept = at::Tensor();
    }
    gradients.push_back(gradient.defined() ? gradient.detach() : gradient);
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

GradientReduction::GradientReduction(DedicatedParamGroup& group, plan::Slot rank, Communicator& communicator,
                                     const Stream& stream, const ReduceOptions& options, MemoryLedger& ledger)
    : peers_(communicator.size() > 1), divide_factor_(options.divide_factor), ledger_(ledger) {
  const at::NoGradGuard no_grad;
  pack(group, rank, options);
  if (!peers_) return;
  stream.wait_current();
  const StreamScope scope(stream);
  pending_ = communicator.reduce(segments_);
}

GradientReduction::~GradientReduction() { ledger_.add(-buffer_bytes_); }

void GradientReduction::pack(DedicatedParamGroup& group, plan::Slot rank, const ReduceOptions& options) {
  auto gradients = take_gradients(group);
  std::map<const DedicatedParam*, at::Tensor> by_param;
  std::int64_t gradient_bytes = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    by_param[group.params()[i].get()] = gradients[i];
    if (gradients[i].defined()) gradient_bytes += static_cast<std::int64_t>(gradients[i].nbytes());
  }
  const auto buffer = at::TensorOptions().dtype(options.dtype).device(group.params()[0]->unsharded().device());

  std::int64_t others_numel = 0;
  for (const auto& segment : group.layout().segments) {
    if (segment.owner != rank) others_numel += segment.numel;
  }
  others_ = at::empty({others_numel}, buffer);
  std::int64_t offset = 0;
  std::vector<at::Tensor> targets;
  std::vector<at::Tensor> sources;
  for (const auto& segment : group.layout().segments) {
    const bool owned = segment.owner == rank;
    auto flat = owned ? at::empty({segment.numel}, buffer) : others_.narrow(0, offset, segment.numel);
    if (owned) own_.push_back(flat);
    if (!owned) offset += segment.numel;
    if (segment.numel != segment.payload) flat.zero_();  // alignment gaps travel too: give them a value
    for (const auto& packed : segment.matrices) {
      const auto& param = group.param_of(packed.matrix);
      auto view = flat.narrow(0, packed.offset, packed.numel).view(param->sizes());
      const auto& gradient = by_param[param.get()];
      if (gradient.defined()) {
        targets.push_back(view);
        sources.push_back(gradient);
      } else {
        view.fill_(-0.0);
      }
      if (owned) shares_.push_back({param, view, gradient.defined()});
    }
    segments_.push_back({segment.owner.shard, flat});
  }
  if (!targets.empty()) at::_foreach_copy_(targets, sources);
  for (const auto& segment : segments_) buffer_bytes_ += static_cast<std::int64_t>(segment.buffer.nbytes());
  ledger_.add(buffer_bytes_ + gradient_bytes);
  ledger_.observe();
  ledger_.add(-gradient_bytes);
}

void GradientReduction::finish() {
  const at::NoGradGuard no_grad;
  pending_.wait();
  segments_.clear();
  others_ = at::Tensor();
  for (const auto& share : shares_) {
    if (!share.param->trainable()) continue;
    if (!share.used && (!peers_ || is_untouched(share.sum))) continue;
    deliver(share);
    run_post_accumulate_hooks(share.param->registered());
  }
}

void GradientReduction::deliver(const Share& share) const {
  const auto& leaf = share.param->registered();
  auto mean = share.sum.to(leaf.scalar_type());
  if (divide_factor_ != 1.0) mean.div_(divide_factor_);
  at::Tensor& grad = leaf.mutable_grad();
  if (grad.defined()) {
    grad.add_(mean);
  } else {
    grad = mean;
  }
}

}  // namespace dmuon
