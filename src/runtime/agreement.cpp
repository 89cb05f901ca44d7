#include "dmuon/plan.h"
#include "dmuon/runtime.h"

namespace dmuon {

void agree_on_inputs(Communicator& communicator, const std::string& error, const std::string& description) {
  const auto errors = communicator.exchange(error);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    TORCH_CHECK_VALUE(errors[rank].empty(), "[dmuon.dedicate_params] rank ", rank, ": ", errors[rank]);
  }
  const auto difference = plan::first_difference(communicator.exchange(description));
  TORCH_CHECK_VALUE(difference.empty(),
                    "[dmuon.dedicate_params] the ranks did not select the same parameters: ", difference,
                    ". The predicate and the model must not depend on the rank.");
}

}  // namespace dmuon
