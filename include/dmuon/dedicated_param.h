// One matrix, one elementwise parameter, or one part of an elementwise parameter that is cut by rows, on this rank: who
// owns it, the parameter that is registered outside compute, and the one used in compute.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

#include "dmuon/plan.h"

namespace dmuon {

/// What the caller hands over for one matrix.
///
/// registered: leaf of the matrix's shape in the master dtype.  On the owner it holds the initial values and becomes a
///   view of the packed master; elsewhere it is a meta tensor (or, before materialisation, meta everywhere).
/// unsharded: leaf that modules compute with; its data is replaced by a view of the group's buffers and its identity
///   never changes.  The parts of a parameter that is cut by rows have one together, of the whole shape.
/// sharded: of a part, what users see in the place of `registered`: a DTensor whose local rows are `registered` where
///   this rank owns the part.  Undefined: users see `registered`.  Its requires_grad, `.grad` and hooks count.  Because
///   only its maker can look inside, he gives `registered` one post-accumulate-grad hook.  Called with `.grad`
///   undefined it sets that to the local rows of `sharded.grad()`; with `.grad` defined it moves it into `sharded`.  On
///   a rank that owns no row the first part has one, which gives `sharded` a gradient without rows.
struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> sizes;
  at::Tensor registered;
  at::Tensor unsharded;
  at::Tensor sharded{};
};

class DedicatedParam : public torch::CustomClassHolder {
 public:
  DedicatedParam(ParamSpec spec, std::optional<plan::Part> part, plan::Slot owner, plan::Slot rank);

  [[nodiscard]] const std::string& name() const { return spec_.name; }
  [[nodiscard]] const std::vector<std::int64_t>& sizes() const { return spec_.sizes; }
  /// Which rows of `unsharded` these are; unset: all.
  [[nodiscard]] const std::optional<plan::Part>& part() const { return part_; }
  /// The first of the parts, or no part at all.
  [[nodiscard]] bool leads() const { return !part_ || part_->first == 0; }
  [[nodiscard]] plan::Slot owner() const { return owner_; }
  /// This rank holds the fp32 master and the optimizer state (I1).
  [[nodiscard]] bool is_owner() const { return owner_ == rank_; }
  /// This rank sends the matrix inside its shard group: the owner, or its peer in another replicate row.
  [[nodiscard]] bool is_row_owner() const { return owner_.shard == rank_.shard; }

  [[nodiscard]] const at::Tensor& registered() const { return spec_.registered; }
  [[nodiscard]] const at::Tensor& unsharded() const { return spec_.unsharded; }
  [[nodiscard]] bool trainable() const { return shown().requires_grad(); }
  /// The unsharded leaf takes over `requires_grad` of the registered parameter, which users freeze and unfreeze.
  void follow_requires_grad();
  /// A new registered leaf (after `to_empty` or `to` replaced the module's parameter); not yet part of the master.
  void replace_registered(at::Tensor registered) { spec_.registered = std::move(registered); }
  /// Likewise for what users see of a part.
  void replace_sharded(at::Tensor sharded) { spec_.sharded = std::move(sharded); }

  /// The owned parameter's `.grad` as users left it, to add to.
  [[nodiscard]] at::Tensor& open_gradient();
  /// It has its new value: users see it, and their post-accumulate-grad hooks run.
  void close_gradient();
  /// Bytes of the owned parameter's `.grad`.
  [[nodiscard]] std::int64_t gradient_bytes() const;

  /// The compute-dtype copy that is sent (the master itself when the dtypes are equal); undefined off the column (I2).
  [[nodiscard]] at::Tensor owned_data() const { return published_; }
  /// The mean gradient after backward; undefined on every rank but the owner (I3).
  [[nodiscard]] at::Tensor reduced_grad() const;
  /// Called by the group's buffers when they are (re)made.
  void set_published(at::Tensor view) { published_ = std::move(view); }

 private:
  [[nodiscard]] const at::Tensor& shown() const { return spec_.sharded.defined() ? spec_.sharded : spec_.registered; }

  ParamSpec spec_;
  std::optional<plan::Part> part_;
  plan::Slot owner_;
  plan::Slot rank_;
  at::Tensor published_;
};

using DedicatedParamPtr = c10::intrusive_ptr<DedicatedParam>;

}  // namespace dmuon
