#include "dmuon/pending.h"

#include <c10/util/Exception.h>

#include <utility>

#include "dmuon/stream.h"

namespace dmuon {

Pending::Pending(std::function<void()> wait, std::vector<at::Tensor> keep_alive, std::function<bool()> ready)
    : wait_(std::move(wait)), keep_alive_(std::move(keep_alive)), ready_(std::move(ready)) {}

Pending Pending::on_current_stream(c10::Device device, std::vector<at::Tensor> keep_alive) {
  const auto event = Event::record(device);
  return Pending([event] { event.block_current_stream(); }, std::move(keep_alive), [event] { return event.reached(); });
}

Pending::Pending(Pending&& other) noexcept
    : wait_(std::exchange(other.wait_, nullptr)),
      keep_alive_(std::move(other.keep_alive_)),
      ready_(std::move(other.ready_)) {}

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this == &other) return *this;
  wait_quietly();
  wait_ = std::exchange(other.wait_, nullptr);
  keep_alive_ = std::move(other.keep_alive_);
  ready_ = std::move(other.ready_);
  return *this;
}

Pending::~Pending() { wait_quietly(); }

void Pending::wait() {
  if (!wait_) return;
  const auto wait = std::exchange(wait_, nullptr);
  const auto buffers = std::exchange(keep_alive_, {});
  wait();
}

void Pending::wait_quietly() noexcept {
  try {
    wait();
  } catch (const std::exception& error) {
    TORCH_WARN("[dmuon.comm] a communication that nobody waited for failed: ", error.what());
  }
}

}  // namespace dmuon
