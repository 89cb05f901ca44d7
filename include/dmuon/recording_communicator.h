// A decorator that counts calls and payload bytes: how tests and reports know what went over the wire.
#pragma once

#include <cstdint>

#include "dmuon/communicator.h"

namespace dmuon {

/// Bytes are this rank's share: received in broadcasts and scatters (segments of other roots; both count as
/// broadcasts), sent in reductions and gathers to a root (likewise; both count as reductions).
/// Summed over the ranks of a group of N, a gather of P bytes counts (N-1) P, a reduction as much.
struct CommStats {
  std::int64_t broadcast_calls = 0;
  std::int64_t broadcast_bytes = 0;
  std::int64_t reduce_calls = 0;
  std::int64_t reduce_bytes = 0;
};

class RecordingCommunicator final : public Communicator {
 public:
  explicit RecordingCommunicator(CommunicatorPtr inner) : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  Pending broadcast(std::span<const OwnerSegment> segments) override;
  Pending reduce(std::span<const OwnerSegment> segments) override;
  Pending reduce_shared(std::span<const OwnerSegment> segments, const SharedSum& how) override;
  at::Tensor share(Sharing purpose, std::int64_t bytes) override { return inner_->share(purpose, bytes); }
  bool sums_shared(at::ScalarType sent, at::ScalarType sum) const override { return inner_->sums_shared(sent, sum); }
  void check() const override { inner_->check(); }
  Pending gather(std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received) override;
  Pending scatter(std::span<const OwnerSegment> segments, const std::vector<std::vector<at::Tensor>>& parts) override;
  std::vector<std::string> exchange(const std::string& text) override { return inner_->exchange(text); }
  std::vector<std::string> meet(const std::string& text) override { return inner_->meet(text); }

  [[nodiscard]] const CommStats& stats() const { return stats_; }
  void reset() { stats_ = {}; }

 private:
  [[nodiscard]] std::int64_t foreign_bytes(std::span<const OwnerSegment> segments) const;

  CommunicatorPtr inner_;
  CommStats stats_;
};

}  // namespace dmuon
