// The pieces of the one TORCH_LIBRARY, one function a room.
#pragma once

#include <torch/library.h>

namespace dmuon::bindings {

void register_plan(torch::Library& library);
void register_comm(torch::Library& library);
void register_runtime(torch::Library& library);
void register_optim(torch::Library& library);
void register_checkpoint(torch::Library& library);

}  // namespace dmuon::bindings
