// What one backward pass remembers.  A BackwardPass is held by autograd's final callback alone: when a
// backward fails, the callback dies with its graph task, and so does everything the pass had in flight.
#pragma once

#include <memory>
#include <vector>

#include "runtime/gradient_reduction.h"

namespace dmuon {

class BackwardPass {
 public:
  BackwardPass(std::int64_t pass_id, size_t groups) : id(pass_id), ready(groups, false), reduced(groups, false) {}

  const std::int64_t id;
  size_t next_gather = 0;                                     ///< position in the backward gather order
  size_t next_reduction = 0;                                  ///< position in the reduce order
  std::vector<bool> ready;                                    ///< [groups] all gradients of this pass are there
  std::vector<bool> reduced;                                  ///< [groups]
  std::unique_ptr<GradientReduction> in_shard;                ///< stage 1 in flight
  std::unique_ptr<GradientReduction> in_replicate;            ///< stage 2 in flight: of the group reduced before
  std::vector<std::unique_ptr<GradientReduction>> unsettled;  ///< own matrices this rank did not use
};

}  // namespace dmuon
