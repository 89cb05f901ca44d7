// Communicator over a torch process group (NCCL, Gloo, or any other c10d backend).
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <string>

#include "dmuon/communicator.h"

namespace dmuon {

/// `group_name`: `ProcessGroup.group_name` in Python; the group must be registered in this process.
/// `device`: where the segments live.  NCCL calls are grouped and run on the current stream; other backends issue one
/// call per segment.  Throws c10::Error for an unknown name.
/// Collective with NCCL: it connects lazily, and the first call of each kind blocks the host until all ranks make it,
/// so both kinds are made here, where every rank is at the same place; `connects` false leaves that, and the memory it
/// takes, to the first call: for groups that only `meet`, which needs no connection.
[[nodiscard]] CommunicatorPtr make_c10d_communicator(const std::string& group_name, c10::Device device,
                                                     bool connects = true);

/// How long a collective of the group may take; ten minutes from a backend that does not say.
[[nodiscard]] std::chrono::milliseconds c10d_timeout(const std::string& group_name, c10::Device device);

}  // namespace dmuon
