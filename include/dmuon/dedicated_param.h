// One matrix, or one elementwise parameter, on this rank: who owns it, the parameter that is registered outside
// compute, and the one used in compute.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "dmuon/plan.h"

namespace dmuon {

/// What the caller hands over for one matrix.
///
/// registered: leaf of the matrix's shape in the master dtype.  On the owner it holds the initial values and becomes a
///   view of the packed master; elsewhere it is a meta tensor (or, before materialisation, meta everywhere).
/// unsharded: leaf that modules compute with; its data is replaced by a view of the group's buffers and its identity
///   never changes.
struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> sizes;
  at::Tensor registered;
  at::Tensor unsharded;
};

class DedicatedParam : public torch::CustomClassHolder {
 public:
  DedicatedParam(ParamSpec spec, plan::Slot owner, plan::Slot rank);

  [[nodiscard]] const std::string& name() const { return spec_.name; }
  [[nodiscard]] const std::vector<std::int64_t>& sizes() const { return spec_.sizes; }
  [[nodiscard]] plan::Slot owner() const { return owner_; }
  /// This rank holds the fp32 master and the optimizer state (I1).
  [[nodiscard]] bool is_owner() const { return owner_ == rank_; }
  /// This rank sends the matrix inside its shard group: the owner, or its peer in another replicate row.
  [[nodiscard]] bool is_row_owner() const { return owner_.shard == rank_.shard; }

  [[nodiscard]] const at::Tensor& registered() const { return spec_.registered; }
  [[nodiscard]] const at::Tensor& unsharded() const { return spec_.unsharded; }
  [[nodiscard]] bool trainable() const { return spec_.registered.requires_grad(); }
  /// The unsharded leaf takes over `requires_grad` of the registered parameter, which users freeze and unfreeze.
  void follow_requires_grad();
  /// A new registered leaf (after `to_empty` or `to` replaced the module's parameter); not yet part of the master.
  void replace_registered(at::Tensor registered) { spec_.registered = std::move(registered); }

  /// The compute-dtype copy that is sent (the master itself when the dtypes are equal); undefined off the column (I2).
  [[nodiscard]] at::Tensor owned_data() const { return published_; }
  /// The mean gradient after backward; undefined on every rank but the owner (I3).
  [[nodiscard]] at::Tensor reduced_grad() const;
  /// Called by the group's buffers when they are (re)made.
  void set_published(at::Tensor view) { published_ = std::move(view); }

 private:
  ParamSpec spec_;
  plan::Slot owner_;
  plan::Slot rank_;
  at::Tensor published_;
};

using DedicatedParamPtr = c10::intrusive_ptr<DedicatedParam>;

}  // namespace dmuon
