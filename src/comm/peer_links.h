// What a PeerCopyCommunicator holds of its peers: mapped memory, the pads of the signals, and the record of a wait that
// failed.  Needs the kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "dmuon/communicator.h"
#include "kernels/peer_memory.h"
#include "kernels/peer_signal.h"

namespace dmuon {

/// As much memory on every rank, mapped on all.
class PeerMemory {
 public:
  /// Collective; blocks the host.  What went wrong on this rank, or "": every rank must learn of it (`agree`).
  [[nodiscard]] std::string map(Communicator& inner, c10::Device device, std::size_t bytes);

  [[nodiscard]] std::uint8_t* of(int rank) const { return bases_.at(static_cast<size_t>(rank)); }
  /// This rank's part, [bytes], alive for as long as the tensor.
  [[nodiscard]] at::Tensor own(c10::Device device, std::int64_t bytes) const;

 private:
  std::shared_ptr<kernels::ExportedMemory> own_;
  std::vector<kernels::ImportedMemory> peers_;
  std::vector<std::uint8_t*> bases_;  ///< [ranks]
};

/// The first problem any rank reports, with its rank, the same on all; "" when there is none.  Collective.
[[nodiscard]] std::string agree(Communicator& inner, const std::string& problem);

/// Signals between the ranks, by call.
class PeerLinks {
 public:
  PeerLinks(int rank, int ranks, c10::Device device, std::chrono::milliseconds timeout);
  ~PeerLinks();  ///< says on stderr what nobody has been told
  PeerLinks(const PeerLinks&) = delete;
  PeerLinks& operator=(const PeerLinks&) = delete;

  /// Collective; blocks the host.  Why these ranks cannot share memory, the same on every rank; or "".
  [[nodiscard]] std::string connect(Communicator& inner);

  /// The next call: `name` for messages, a literal; `description`: equal when ranks make the same call.
  void begin(const char* name, std::uint32_t description);
  void signal(kernels::Moment moment) const;
  void wait(kernels::Moment moment) const;
  void signal_and_wait(kernels::Moment moment) const;

  /// Throws if a wait has failed, naming the peer.
  void check() const;
  /// Runs `work`; what it throws because a wait has failed becomes `check`'s error.
  template <class Work>
  auto guarded(Work work) const {
    check();
    try {
      return work();
    } catch (const std::exception&) {
      check();
      throw;
    }
  }

 private:
  std::string try_peers(Communicator& inner);
  [[nodiscard]] std::string read_back() const;
  [[nodiscard]] kernels::SignalArgs args(kernels::Moment moment) const;
  [[nodiscard]] std::string failure() const;

  c10::Device device_;
  std::chrono::milliseconds timeout_;
  PeerMemory pads_;
  kernels::PeerPads pointers_;
  kernels::FailureRecord record_;
  std::uint32_t call_ = 0;
  std::uint32_t description_ = 0;
  std::array<const char*, 1024> names_{};  ///< of the last calls, by number
  mutable bool told_ = false;
};

}  // namespace dmuon
