// A communicator for the GPUs of one host that leaves their processors alone: copy engines pull segments out of the
// peers' memory, and a root adds up the others' parts itself.
//
// Memory is shared by CUDA IPC: plain device memory, mapped once at set-up.  torch's symmetric memory would do too, but
// may switch NVLink multicast on, and its interface moves between versions of torch.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <string>

#include "dmuon/communicator.h"

namespace dmuon {

/// One of the two is set, on every rank alike.
struct PeerCopy {
  CommunicatorPtr communicator{};
  std::string problem{};  ///< what is missing, naming the rank: not CUDA, another host, no peer access, ...
};

/// Collective over `inner` (its `meet`); blocks the host.  All ranks share memory and read each other's, or none does.
///
/// - `broadcast` of segments that have a place, and `reduce_shared`, run on the current stream without the host: each
///   rank signals that its data is ready, waits until all others' is, pulls, signals, and waits until all have read.
///   Nothing is read or written after the Pending.  Calls may come from different streams; they run one after another.
/// - Every other call goes to `inner`.
/// - `sums_shared`: fp32, fp16 and bf16, in any combination; added in fp32.
///
/// A peer that does not come within `timeout`, or that makes another call, is an error that names it: the device stops
/// (all later CUDA calls of this process fail), and the next call of this communicator, of `check`, or of a Pending
/// throws c10::Error.  Never throws when it is destroyed; then no call may be under way on any rank.
[[nodiscard]] PeerCopy make_peer_copy_communicator(CommunicatorPtr inner, c10::Device device,
                                                   std::chrono::milliseconds timeout);

}  // namespace dmuon
