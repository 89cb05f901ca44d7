// What the host is waiting for, noted so that another thread can tell when a rank hangs.
#pragma once

#include <atomic>

#include "dmuon/dedicated_param_group.h"

namespace dmuon {

struct Waiting {
  std::atomic<const char*> what = nullptr;  ///< a literal; null when the host does not wait
  std::atomic<int> group = 0;
};

/// Set for a scope.
class WaitNote {
 public:
  WaitNote(Waiting& waiting, const char* what, const DedicatedParamGroup& group) : waiting_(waiting) {
    waiting_.group = group.index();
    waiting_.what = what;
  }
  ~WaitNote() { waiting_.what = nullptr; }
  WaitNote(const WaitNote&) = delete;
  WaitNote& operator=(const WaitNote&) = delete;

 private:
  Waiting& waiting_;
};

}  // namespace dmuon
