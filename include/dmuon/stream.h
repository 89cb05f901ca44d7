// Streams and events for any device: thin values over c10's, no-ops on CPU (whose c10 events throw).
//
// Used by the communicators and the runtime.  A side stream is taken once from torch's pool and kept.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace dmuon {

/// A point on a stream.  Empty on CPU.
class Event {
 public:
  Event() = default;
  /// Marks the work enqueued so far on the current stream of `device`.
  static Event record(c10::Device device);
  /// The current stream of the event's device waits for it; the host does not.
  void block_current_stream() const;
  /// Whether the device has reached it; the host does not wait.
  [[nodiscard]] bool reached() const;

 private:
  std::shared_ptr<c10::Event> event_;
  std::optional<c10::Device> device_;
};

enum class StreamPriority { kDefault, kHigh };

/// A side stream of `device`; nothing on CPU.
class Stream {
 public:
  Stream() = default;
  Stream(c10::Device device, StreamPriority priority);
  /// Work enqueued on this stream from now on waits for what the current stream holds now.
  void wait_current() const;
  /// Likewise for what `other` holds now.
  void wait_for(const Stream& other) const;

 private:
  friend class StreamScope;
  std::optional<c10::Stream> stream_;
};

/// Makes a Stream the current one for a scope.
class StreamScope {
 public:
  explicit StreamScope(const Stream& stream) : guard_(stream.stream_) {}

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace dmuon
