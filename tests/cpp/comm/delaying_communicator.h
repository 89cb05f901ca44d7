// A decorator that makes every collective of one rank late: how tests show that timing decides nothing.
#pragma once

#include <chrono>
#include <random>

#include "dmuon/communicator.h"

namespace dmuon {

/// Sleeps before it issues a call, and lets no call be ready before a later moment; both drawn from `seed`, for each
/// call anew.  Some ranks are slow throughout, and a few calls are later than the runtime's patience with its peers.
class DelayingCommunicator final : public Communicator {
 public:
  DelayingCommunicator(CommunicatorPtr inner, unsigned seed);

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
  std::vector<std::string> exchange(const std::string& text) override;
  std::vector<std::string> meet(const std::string& text) override;

 private:
  using Microseconds = std::chrono::microseconds;
  Microseconds draw();
  void stall();
  Pending arrive_late(Pending pending);

  CommunicatorPtr inner_;
  std::mt19937 random_;
  int slowness_;  ///< factor on ordinary delays
};

}  // namespace dmuon
