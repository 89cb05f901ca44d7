#include "comm/delaying_communicator.h"

#include <memory>
#include <thread>
#include <utility>

namespace dmuon {

DelayingCommunicator::DelayingCommunicator(CommunicatorPtr inner, unsigned seed)
    : inner_(std::move(inner)), random_(seed), slowness_(1 + 3 * static_cast<int>(random_() % 2)) {}

DelayingCommunicator::Microseconds DelayingCommunicator::draw() {
  const auto kind = random_() % 500;
  const auto amount = static_cast<int>(random_() % 400);
  if (kind == 0) return Microseconds(120'000);
  if (kind < 5) return Microseconds(20 * amount);
  return Microseconds(kind < 250 ? 0 : slowness_ * amount);
}

void DelayingCommunicator::stall() { std::this_thread::sleep_for(draw()); }

Pending DelayingCommunicator::arrive_late(Pending pending) {
  const auto due = std::chrono::steady_clock::now() + draw();
  const auto inner = std::make_shared<Pending>(std::move(pending));
  return Pending(
      [inner, due] {
        std::this_thread::sleep_until(due);
        inner->wait();
      },
      {}, [inner, due] { return std::chrono::steady_clock::now() >= due && inner->ready(); });
}

Pending DelayingCommunicator::broadcast(std::span<const OwnerSegment> segments) {
  stall();
  return arrive_late(inner_->broadcast(segments));
}

Pending DelayingCommunicator::reduce(std::span<const OwnerSegment> segments) {
  stall();
  return arrive_late(inner_->reduce(segments));
}

Pending DelayingCommunicator::reduce_shared(std::span<const OwnerSegment> segments, const SharedSum& how) {
  stall();
  return arrive_late(inner_->reduce_shared(segments, how));
}

Pending DelayingCommunicator::gather(std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received) {
  stall();
  return arrive_late(inner_->gather(segments, received));
}

Pending DelayingCommunicator::scatter(std::span<const OwnerSegment> segments,
                                      const std::vector<std::vector<at::Tensor>>& parts) {
  stall();
  return arrive_late(inner_->scatter(segments, parts));
}

std::vector<std::string> DelayingCommunicator::exchange(const std::string& text) {
  stall();
  return inner_->exchange(text);
}

std::vector<std::string> DelayingCommunicator::meet(const std::string& text) {
  stall();
  return inner_->meet(text);
}

}  // namespace dmuon
