#include "dmuon/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace dmuon {

Event Event::record(c10::Device device) {
  Event event;
  if (device.is_cpu()) return event;
  event.event_ = std::make_shared<c10::Event>(device.type());
  event.device_ = device;
  event.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

void Event::block_current_stream() const {
  if (!event_) return;
  event_->block(c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
}

bool Event::reached() const { return !event_ || event_->query(); }

Stream::Stream(c10::Device device, StreamPriority priority) {
  if (device.is_cpu()) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type())
                .getStreamFromGlobalPool(device, /*isHighPriority=*/priority == StreamPriority::kHigh);
}

void Stream::wait_current() const {
  if (!stream_) return;
  Stream current;
  current.stream_ = c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
  wait_for(current);
}

void Stream::wait_for(const Stream& other) const {
  if (!stream_ || !other.stream_) return;
  c10::Event event(stream_->device_type());
  event.record(*other.stream_);
  event.block(*stream_);
}

}  // namespace dmuon
