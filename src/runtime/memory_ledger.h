// Live bytes of dmuon's own buffers and their peak.  Off unless somebody measures: an observation walks over all
// gradients.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>

namespace dmuon {

class MemoryLedger {
 public:
  /// `gradients`: bytes of gradients that are live outside the counted buffers, asked at every observation.
  explicit MemoryLedger(std::function<std::int64_t()> gradients) : gradients_(std::move(gradients)) {}

  void add(std::int64_t bytes) { buffers_ += bytes; }
  [[nodiscard]] std::int64_t live() const { return buffers_ + gradients_(); }
  /// Called where memory is at a local maximum.
  void observe() {
    if (enabled_) peak_ = std::max(peak_, live());
  }
  [[nodiscard]] std::int64_t peak() const { return peak_; }
  /// Starts a new peak.
  void enable() {
    enabled_ = true;
    peak_ = live();
  }

 private:
  std::function<std::int64_t()> gradients_;
  std::int64_t buffers_ = 0;
  std::int64_t peak_ = 0;
  bool enabled_ = false;
};

}  // namespace dmuon
