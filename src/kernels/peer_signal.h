// Ranks of one host tell each other, in stream order and without the host, how far they have come: each writes the
// number of its call into the others' memory, and waits until theirs have arrived in its own.
//
// Raw pointers and a stream: no torch and no CUDA header.
#pragma once

#include <cstdint>

struct CUstream_st;
using cudaStream_t = CUstream_st*;  // as CUDA declares it

namespace dmuon::kernels {

inline constexpr int kMaxPeers = 32;  ///< a lane of a warp each

/// What a rank tells: its data may be read; it has read the others'.
enum class Moment { kReady, kDone };
inline constexpr int kMoments = 2;

/// The pad of one rank: a slot a moment and peer, at first zero.
inline constexpr std::int64_t kPadBytes = std::int64_t{kMoments} * kMaxPeers * 8;

/// `pads[r]`: the pad of rank r, in device memory that this device can write; [rank] is its own.
struct PeerPads {
  std::uint64_t* pads[kMaxPeers] = {};
  int ranks = 0;
  int rank = 0;
};

/// Low 32 bits: the number of the call, from 1 on, the same on every rank; it may wrap.  High 32 bits: what call it is,
/// so that ranks that make different calls find out.
[[nodiscard]] constexpr std::uint64_t mark_of(std::uint32_t call, std::uint32_t description) {
  return std::uint64_t{description} << 32 | call;
}

/// What a wait that failed leaves in host memory before it stops the device for this process.
struct WaitFailure {
  std::int32_t kind;  ///< 0 none, 1 the peer did not come in time, 2 it made another call; written last
  std::int32_t peer;
  std::int32_t moment;
  std::uint32_t call;
};

/// A WaitFailure that kernels can write and the host can read, whatever happens to the device.
class FailureRecord {
 public:
  FailureRecord() = default;
  FailureRecord(const FailureRecord&) = delete;
  FailureRecord& operator=(const FailureRecord&) = delete;
  ~FailureRecord();

  [[nodiscard]] const char* allocate();
  [[nodiscard]] WaitFailure read() const;
  [[nodiscard]] WaitFailure* data() const { return data_; }

 private:
  WaitFailure* data_ = nullptr;
};

/// Loads the kernels of this file: loading one later may wait for a kernel that waits for a peer.  nullptr, or CUDA's
/// text.
[[nodiscard]] const char* load_signals();

struct SignalArgs {
  PeerPads pads;
  Moment moment = Moment::kReady;
  std::uint64_t mark = 0;
  std::uint64_t nanoseconds = 0;   ///< of the longest wait
  WaitFailure* failure = nullptr;  ///< of a FailureRecord
};

/// Queues: writes `mark` to every peer's pad.  What `stream` did before is visible to a peer that has seen it.
[[nodiscard]] const char* signal(const SignalArgs& args, cudaStream_t stream);

/// Queues: `stream` goes on when every peer has signalled `mark`.  After `nanoseconds`, or if a peer's mark is another
/// one, writes `failure` and traps: every later CUDA call of this process fails.
[[nodiscard]] const char* wait(const SignalArgs& args, cudaStream_t stream);

/// Both in one launch.
[[nodiscard]] const char* signal_and_wait(const SignalArgs& args, cudaStream_t stream);

}  // namespace dmuon::kernels
