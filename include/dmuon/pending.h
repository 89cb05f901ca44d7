// The result of an asynchronous communication: owns its buffers until it has been waited for.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace dmuon {

/// Move-only.  `wait` may be called any number of times; the first call waits, the rest return at once.
/// On CUDA the current stream waits and the host does not; on CPU the host blocks until the data is there.
/// Destroying a Pending waits too, so a buffer is never handed back while it is still being written.
class Pending {
 public:
  Pending() = default;  ///< nothing to wait for
  /// `ready`: whether the data is there; empty means that it is.
  Pending(std::function<void()> wait, std::vector<at::Tensor> keep_alive, std::function<bool()> ready = {});
  /// What the current stream of `device` holds now; nothing to wait for on CPU.
  static Pending on_current_stream(c10::Device device, std::vector<at::Tensor> keep_alive);
  Pending(Pending&& other) noexcept;
  Pending& operator=(Pending&& other) noexcept;
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  ~Pending();

  /// Throws what the backend throws (a timeout, a lost peer); the buffers are let go either way.
  void wait();
  /// Whether nobody has waited for it yet.
  [[nodiscard]] bool outstanding() const { return static_cast<bool>(wait_); }
  /// Whether the data is there: neither the host (CPU) nor the current stream (CUDA) would stop at `wait`.
  [[nodiscard]] bool ready() const { return !wait_ || !ready_ || ready_(); }

 private:
  void wait_quietly() noexcept;

  std::function<void()> wait_;
  std::vector<at::Tensor> keep_alive_;
  std::function<bool()> ready_;
};

}  // namespace dmuon
