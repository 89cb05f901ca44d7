#include "bindings/handles.h"
#include "bindings/register.h"
#include "dmuon/c10d_communicator.h"
#include "dmuon/runtime.h"

namespace dmuon::bindings {
namespace {

CommunicatorHandlePtr make_communicator(const std::string& group_name, c10::Device device, bool reproducible) {
  return c10::make_intrusive<CommunicatorHandle>(make_c10d_communicator(group_name, device), reproducible);
}

std::tuple<int64_t, int64_t, int64_t, int64_t> stats(const CommunicatorHandlePtr& self) {
  const auto& counted = self->recorder->stats();
  return {counted.broadcast_calls, counted.broadcast_bytes, counted.reduce_calls, counted.reduce_bytes};
}

void agree(const CommunicatorHandlePtr& self, const std::optional<CommunicatorHandlePtr>& replicate,
           const std::string& error, const std::string& description) {
  std::vector<Communicator*> communicators{self->communicator.get()};
  if (replicate) communicators.push_back((*replicate)->communicator.get());
  agree_on_inputs(communicators, error, description);
}

void broadcast_values(const CommunicatorHandlePtr& self, const std::vector<at::Tensor>& tensors, c10::Device device) {
  broadcast_from_first(*self->communicator, tensors, device);
}

}  // namespace

void register_comm(torch::Library& library) {
  library.class_<CommunicatorHandle>("Communicator")
      .def(torch::init(&make_communicator))
      .def("rank", [](const CommunicatorHandlePtr& self) { return static_cast<int64_t>(self->communicator->rank()); })
      .def("size", [](const CommunicatorHandlePtr& self) { return static_cast<int64_t>(self->communicator->size()); })
      .def("stats", &stats)
      .def("reset_stats", [](const CommunicatorHandlePtr& self) { self->recorder->reset(); })
      .def("agree", &agree)
      .def("broadcast_from_first", &broadcast_values);
}

}  // namespace dmuon::bindings
