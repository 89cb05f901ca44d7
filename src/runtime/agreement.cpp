#include "dmuon/plan.h"
#include "dmuon/runtime.h"

namespace dmuon {
namespace {

std::string first_problem(const std::vector<std::string>& errors, const char* axis) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (!errors[rank].empty()) return c10::str(axis, rank, ": ", errors[rank]);
  }
  return "";
}

}  // namespace

// Nobody throws before every rank has taken part in every exchange: the others would wait for it.
void agree_on_inputs(const std::vector<Communicator*>& communicators, const std::string& error,
                     const std::string& description) {
  std::string problem = error;
  for (size_t axis = 0; axis < communicators.size(); ++axis) {
    auto& communicator = *communicators[axis];
    problem = first_problem(communicator.exchange(problem), axis == 0 ? "rank " : "replica ");
    const auto difference = plan::first_difference(communicator.exchange(description));
    if (problem.empty() && !difference.empty()) {
      problem = c10::str("the ranks did not select the same parameters: ", difference,
                         ". The predicate and the model must not depend on the rank");
    }
  }
  TORCH_CHECK_VALUE(problem.empty(), "[dmuon.dedicate_params] ", problem);
}

std::string disagreement(Communicator& communicator, const std::string& text) {
  if (communicator.size() == 1) return "";
  try {
    const auto texts = communicator.meet(text);
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank] != text) return c10::str("rank ", rank, " says '", texts[rank], "', this rank '", text, "'");
    }
  } catch (const std::exception& error) {
    return c10::str("this rank says '", text, "', and not all others came: ", error.what());
  }
  return "";
}

}  // namespace dmuon
