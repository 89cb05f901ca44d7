// Dedicated ownership for a C++ training loop: from named weights to a Runtime, and calls that bracket forwards.
//
// Every rank makes the same calls in the same order.  A weight that is handed over stays the tensor its module computes
// with; the fp32 masters are made here, each on its owner alone, and are what an optimizer steps
// (`runtime->params()[i]->registered()`).
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/runtime.h"

namespace dmuon {

/// A module whose forward triggers the communication of its matrices.
struct HookModule {
  std::string name;  ///< qualified; "outer" encloses "outer.inner", and "" encloses all
  std::vector<std::pair<std::string, at::Tensor>> matrices;  ///< qualified name and weight: floating 2-D leaf
  /// Likewise, of any shape with at least one dimension, for an optimizer like AdamW: a small one is owned whole like a
  /// matrix, a large one is cut by rows, each part one of `runtime->params()` (`embed.weight[0:500]`).
  std::vector<std::pair<std::string, at::Tensor>> elementwise{};
};

struct DedicateOptions {
  RuntimeOptions runtime{};
  plan::PlanOptions plan{};
  std::int64_t cut_elements = plan::kCutElements;  ///< from which on an elementwise weight is large
};

/// Sets `exit_order` from the names of `groups`, which are in module order: a module's forward ends after those of the
/// modules it encloses.
void set_exit_order(std::vector<GroupSpec>& groups);

/// `modules` in the order of their first use; group g of the runtime is modules[g].  Every rank ends with rank 0's
/// values.  Blocks the host.  Throws the same c10::ValueError on every rank, naming the parameter, for a weight that
/// cannot be dedicated or for lists that differ between ranks; nothing has been changed then.
[[nodiscard]] RuntimePtr dedicate(const std::vector<HookModule>& modules, RuntimeComms comms,
                                  const DedicateOptions& options = {});

/// Runs the root's forward between begin_forward and end_forward, also when it throws.
at::Tensor call_root(Runtime& runtime, const std::function<at::Tensor()>& forward);

/// Runs one hook module's forward between pre_forward and post_forward, also when it throws.
at::Tensor call_module(Runtime& runtime, int group, const at::Tensor& input,
                       const std::function<at::Tensor(const at::Tensor&)>& forward);

/// For the parameters that are not dedicated: `.grad` becomes the mean over the ranks.  A missing gradient counts as
/// zeros.  Sums on rank 0 and broadcasts.
void average_gradients(Communicator& communicator, const std::vector<at::Tensor>& parameters);

}  // namespace dmuon
