#include "dmuon/runtime.h"

namespace dmuon {

void broadcast_from_first(Communicator& communicator, const std::vector<at::Tensor>& tensors, c10::Device device) {
  const at::NoGradGuard no_grad;
  if (communicator.size() == 1) return;
  for (const auto& tensor : tensors) {
    const auto values = tensor.detach().to(device).contiguous().view({-1});
    const auto bytes = values.view(at::kByte);
    const std::vector<OwnerSegment> segments{{0, bytes}};
    communicator.broadcast(segments).wait();
    if (communicator.rank() != 0) tensor.variable_data().copy_(values.view(tensor.sizes()));
  }
}

}  // namespace dmuon
