#include "runtime/progress.h"

#include "dmuon/runtime.h"
#include "runtime/passes.h"

namespace dmuon {

std::string Runtime::progress() const {
  std::string text = c10::str("rank (shard ", rank_.shard, ", replicate ", rank_.replicate, ") ");
  if (const char* what = waiting_->what) {
    text += c10::str("waits for ", what, " of '", groups_[static_cast<size_t>(waiting_->group)]->name(), "'");
  } else {
    text += "waits for nothing of dmuon's";
  }
  text += "; groups in order:";
  for (const auto& group : groups_) {
    text += c10::str(" '", group->name(), "' ", to_string(group->state()), group->publishing() ? " (publishing)" : "");
  }
  if (!forwards_.empty()) text += c10::str("; forward: ", forwards_.back().next_gather, " gathers issued");
  if (const auto pass = backward_.lock()) {
    text += c10::str("; backward: ", pass->next_gather, " gathers and ", pass->next_reduction,
                     " reductions issued, in reverse order");
  }
  return text;
}

}  // namespace dmuon
