// Communicator whose ranks are threads of one process: C++ tests and the pure C++ example.
//
// Asynchronous like a real one: a call only deposits its buffers; the data moves when the last rank has made the same
// call, and `Pending::wait` blocks until then.  CPU tensors only.  Sums run in rank order, so results do not depend on
// timing.
#pragma once

#include <chrono>
#include <memory>

#include "dmuon/communicator.h"

namespace dmuon {

class ThreadWorld;

/// What the ranks of one group share; make it once, hand it to every thread.
/// `timeout`: how long a wait may last before it throws (a rank that never calls shows as that, not as a hang).  Calls
/// that do not match throw on every rank.  After either, the world is broken: waits for unfinished calls throw at once.
[[nodiscard]] std::shared_ptr<ThreadWorld> make_thread_world(
    int size, std::chrono::milliseconds timeout = std::chrono::minutes(1));

/// The communicator of `rank`; to be used by that rank's thread only.
/// `shares`, on every rank alike: it gives shared memory, and then takes what a root sends from its place there, and
/// what a rank sends to a sum from its outgoing place, never from a buffer: a wrong place shows as a wrong value.
[[nodiscard]] CommunicatorPtr make_thread_communicator(std::shared_ptr<ThreadWorld> world, int rank,
                                                       bool shares = false);

}  // namespace dmuon
