// Which steps of Newton-Schulz form a segment: X is formed afresh at its start.  Plain C++: no torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

namespace dmuon {

/// The first step after the segment that starts at `begin`: the next restart, or `steps`.  Restarts come in any order.
[[nodiscard]] inline std::size_t segment_end(std::span<const int> restarts, std::size_t begin, std::size_t steps) {
  std::size_t end = steps;
  for (const int restart : restarts) {
    if (restart > static_cast<int>(begin)) end = std::min(end, static_cast<std::size_t>(restart));
  }
  return end;
}

}  // namespace dmuon
