#include "bindings/handles.h"
#include "bindings/register.h"
#include "dmuon/c10d_communicator.h"
#include "dmuon/peer_copy_communicator.h"
#include "dmuon/runtime.h"

namespace dmuon::bindings {
namespace {

// group, the mesh's group, whose timeout holds, "auto", "peer" or "nccl", as in dedicate_params, and whether it will be
// asked for nothing but sums: with peers these need no connection of the backend.
using Choice = std::tuple<std::string, std::string, std::string, bool>;

CommunicatorPtr choose_communicator(const Choice& choice, c10::Device device) {
  const auto& [group_name, mesh_group, comm, only_sums] = choice;
  auto plain = make_c10d_communicator(group_name, device, /*connects=*/!only_sums || comm == "nccl");
  if (comm == "nccl" || (device.is_cuda() && plain->size() == 1)) return plain;
  auto peers = make_peer_copy_communicator(plain, device, c10d_timeout(mesh_group, device));
  if (peers.communicator) return peers.communicator;
  TORCH_CHECK_VALUE(comm != "peer", "[dmuon.dedicate_params] comm=\"peer\" is not possible here: ", peers.problem,
                    ". Pass comm=\"auto\" to have it where it is, or comm=\"nccl\".");
  return only_sums ? make_c10d_communicator(group_name, device) : plain;
}

CommunicatorHandlePtr make_communicator(const Choice& choice, c10::Device device, bool reproducible) {
  return c10::make_intrusive<CommunicatorHandle>(choose_communicator(choice, device), reproducible);
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

std::vector<OwnerSegment> to_segments(const std::vector<int64_t>& roots, const std::vector<at::Tensor>& buffers) {
  TORCH_CHECK_VALUE(roots.size() == buffers.size(), "[dmuon.comm] ", roots.size(), " roots, ", buffers.size(),
                    " buffers");
  std::vector<OwnerSegment> segments;
  for (size_t i = 0; i < roots.size(); ++i) segments.push_back({static_cast<int>(roots[i]), buffers[i]});
  return segments;
}

// The calls themselves, for benchmarks and tests; the current stream waits for each.
void broadcast(const CommunicatorHandlePtr& self, const std::vector<int64_t>& roots,
               const std::vector<at::Tensor>& buffers, const std::vector<int64_t>& places) {
  auto segments = to_segments(roots, buffers);
  for (size_t i = 0; i < places.size(); ++i) segments.at(i).place = places[i];
  self->communicator->broadcast(segments).wait();
}

void reduce(const CommunicatorHandlePtr& self, const std::vector<int64_t>& roots,
            const std::vector<at::Tensor>& buffers) {
  self->communicator->reduce(to_segments(roots, buffers)).wait();
}

void reduce_shared(const CommunicatorHandlePtr& self, const std::vector<int64_t>& roots,
                   const std::vector<at::Tensor>& buffers, at::ScalarType sent, double divisor) {
  self->communicator->reduce_shared(to_segments(roots, buffers), {sent, divisor}).wait();
}

std::optional<at::Tensor> share(const CommunicatorHandlePtr& self, bool for_sums, int64_t bytes) {
  const auto memory = self->communicator->share(for_sums ? Sharing::kReduce : Sharing::kBroadcast, bytes);
  return memory.defined() ? std::optional(memory) : std::nullopt;
}

std::vector<int64_t> places_of(const CommunicatorHandlePtr& self, const std::vector<int64_t>& roots,
                               const std::vector<int64_t>& numels, int64_t element_bytes) {
  std::vector<SegmentSize> sizes;
  for (size_t i = 0; i < roots.size(); ++i) sizes.push_back({static_cast<int>(roots[i]), numels.at(i)});
  return outgoing_places(sizes, self->communicator->rank(), element_bytes).places;
}

}  // namespace

void register_comm(torch::Library& library) {
  library.class_<CommunicatorHandle>("Communicator")
      .def(torch::init(&make_communicator))
      .def("copies_from_peers",
           [](const CommunicatorHandlePtr& self) { return self->communicator->sums_shared(at::kFloat, at::kFloat); })
      .def("rank", [](const CommunicatorHandlePtr& self) { return static_cast<int64_t>(self->communicator->rank()); })
      .def("size", [](const CommunicatorHandlePtr& self) { return static_cast<int64_t>(self->communicator->size()); })
      .def("stats", &stats)
      .def("reset_stats", [](const CommunicatorHandlePtr& self) { self->recorder->reset(); })
      .def("share", &share)
      .def("broadcast", &broadcast)
      .def("reduce", &reduce)
      .def("reduce_shared", &reduce_shared)
      .def("outgoing_places", &places_of)
      .def("check", [](const CommunicatorHandlePtr& self) { self->communicator->check(); })
      .def("agree", &agree)
      .def("broadcast_from_first", &broadcast_values);
}

}  // namespace dmuon::bindings
