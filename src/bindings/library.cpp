#include "bindings/register.h"

TORCH_LIBRARY(dmuon, library) {
  dmuon::bindings::register_plan(library);
  dmuon::bindings::register_comm(library);
  dmuon::bindings::register_runtime(library);
  dmuon::bindings::register_optim(library);
  dmuon::bindings::register_checkpoint(library);
}
