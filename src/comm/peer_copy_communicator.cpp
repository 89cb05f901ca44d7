#include "dmuon/peer_copy_communicator.h"

#include "dmuon/stream.h"

#ifdef DMUON_HAVE_KERNELS

#include <c10/core/DeviceGuard.h>

#include <bit>
#include <map>

#include "comm/current_stream.h"
#include "comm/peer_links.h"
#include "kernels/peer_sum.h"

namespace dmuon {
namespace {

using kernels::Moment;

std::optional<kernels::Scalar> to_scalar(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::Scalar::kFloat;
    case at::kHalf:
      return kernels::Scalar::kHalf;
    case at::kBFloat16:
      return kernels::Scalar::kBFloat16;
    default:
      return std::nullopt;
  }
}

std::int64_t bytes_of(at::ScalarType dtype) { return static_cast<std::int64_t>(at::elementSize(dtype)); }

// FNV-1a of what must be the same on all ranks.
class Description {
 public:
  Description& add(std::int64_t value) {
    for (int byte = 0; byte < 8; ++byte) hash_ = (hash_ ^ ((value >> (8 * byte)) & 255)) * 16777619U;
    return *this;
  }
  [[nodiscard]] std::uint32_t value() const { return hash_; }

 private:
  std::uint32_t hash_ = 2166136261U;
};

class PeerCopyCommunicator final : public Communicator {
 public:
  PeerCopyCommunicator(CommunicatorPtr inner, c10::Device device, std::shared_ptr<PeerLinks> links)
      : inner_(std::move(inner)), device_(device), links_(std::move(links)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::vector<std::string> exchange(const std::string& text) override { return inner_->exchange(text); }
  std::vector<std::string> meet(const std::string& text) override { return inner_->meet(text); }
  Pending reduce(std::span<const OwnerSegment> segments) override { return inner_->reduce(segments); }
  Pending gather(std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received) override {
    return inner_->gather(segments, received);
  }
  Pending scatter(std::span<const OwnerSegment> segments, const std::vector<std::vector<at::Tensor>>& parts) override {
    return inner_->scatter(segments, parts);
  }
  void check() const override { links_->check(); }

  at::Tensor share(Sharing purpose, std::int64_t bytes) override {
    if (!memory_.emplace(purpose, PeerMemory()).second) return {};
    auto& memory = memory_.at(purpose);
    const auto problem = agree(*inner_, memory.map(*inner_, device_, static_cast<std::size_t>(bytes)));
    TORCH_CHECK(problem.empty(), "[dmuon.comm] ", problem, ". Use less memory, or comm=\"nccl\".");
    return memory.own(device_, bytes);
  }

  bool sums_shared(at::ScalarType sent, at::ScalarType sum) const override { return to_scalar(sent) && to_scalar(sum); }

  Pending broadcast(std::span<const OwnerSegment> segments) override {
    if (!is_placed(segments)) return inner_->broadcast(segments);
    const c10::DeviceGuard guard(device_);
    const auto& memory = memory_.at(Sharing::kBroadcast);
    check_own(segments, memory);
    begin("gather", describe(segments, std::nullopt));
    links_->signal_and_wait(Moment::kReady);
    for (int step = 1; step < size(); ++step) {
      const int root = (rank() + step) % size();
      for (const auto& segment : segments) {
        if (segment.root == root) {
          pull(segment.buffer.data_ptr(), memory.of(root) + segment.place, segment.buffer.nbytes());
        }
      }
    }
    links_->signal_and_wait(Moment::kDone);
    return finish(keep_alive(segments));
  }

  Pending reduce_shared(std::span<const OwnerSegment> segments, const SharedSum& how) override {
    TORCH_CHECK(memory_.count(Sharing::kReduce) != 0, "[dmuon.comm] reduce_shared needs memory from share");
    const c10::DeviceGuard guard(device_);
    const auto sent = how.sent;
    const auto places = find_outgoing(segments, sent);
    begin("reduction", describe(segments, how));
    auto parts = Parts(*this, segments, sent);
    links_->signal_and_wait(Moment::kReady);
    pull_parts(segments, places, parts);
    links_->signal(Moment::kDone);
    add_up(segments, how, parts);
    links_->wait(Moment::kDone);
    auto tensors = keep_alive(segments);
    tensors.push_back(parts.memory);
    return finish(std::move(tensors));
  }

 private:
  // Where the others' parts of this rank's segments go: [own segment][other rank], in rank order.
  struct Parts {
    Parts(const PeerCopyCommunicator& self, std::span<const OwnerSegment> segments, at::ScalarType sent) {
      std::int64_t end = 0;
      for (const auto& segment : segments) {
        bytes.push_back(segment.buffer.numel() * bytes_of(sent));
        strides.push_back(align_place(bytes.back()));
        offsets.push_back(end);
        if (segment.root == self.rank()) end += strides.back() * (self.size() - 1);
      }
      memory = at::empty({end}, at::TensorOptions().dtype(at::kByte).device(self.device_));
    }
    [[nodiscard]] std::uint8_t* at_segment(size_t index) const {
      return static_cast<std::uint8_t*>(memory.data_ptr()) + offsets[index];
    }
    std::vector<std::int64_t> bytes;    // [segments] of one rank
    std::vector<std::int64_t> strides;  // [segments] from rank to rank, in bytes
    std::vector<std::int64_t> offsets;  // [segments] in bytes
    at::Tensor memory;                  // of the current stream
  };

  [[nodiscard]] bool is_placed(std::span<const OwnerSegment> segments) const {
    return memory_.count(Sharing::kBroadcast) != 0 && !segments.empty() &&
           std::all_of(segments.begin(), segments.end(), [](const auto& segment) { return segment.place >= 0; });
  }

  void check_own(std::span<const OwnerSegment> segments, const PeerMemory& memory) const {
    for (const auto& segment : segments) {
      if (segment.buffer.numel() == 0) continue;  // lies nowhere
      TORCH_CHECK(segment.root != rank() || segment.buffer.data_ptr() == memory.of(rank()) + segment.place,
                  "[dmuon.comm] what this rank sends does not lie at place ", segment.place, " of its shared memory");
    }
  }

  // [ranks] places of what each sends; checks this rank's.
  [[nodiscard]] std::vector<OutgoingPlaces> find_outgoing(std::span<const OwnerSegment> segments,
                                                          at::ScalarType sent) const {
    std::vector<SegmentSize> sizes;
    for (const auto& segment : segments) sizes.push_back({segment.root, segment.buffer.numel()});
    std::vector<OutgoingPlaces> places;
    for (int sender = 0; sender < size(); ++sender) places.push_back(outgoing_places(sizes, sender, bytes_of(sent)));
    const auto* base = memory_.at(Sharing::kReduce).of(rank());
    for (size_t i = 0; i < segments.size(); ++i) {
      const auto& [root, buffer, unused] = segments[i];
      if (buffer.numel() == 0) continue;  // lies nowhere
      TORCH_CHECK(root == rank() || (buffer.scalar_type() == sent &&
                                     buffer.data_ptr() == base + places[static_cast<size_t>(rank())].places[i]),
                  "[dmuon.comm] what this rank sends to a sum does not lie at its outgoing place");
    }
    return places;
  }

  void pull_parts(std::span<const OwnerSegment> segments, const std::vector<OutgoingPlaces>& places,
                  const Parts& parts) const {
    const auto& memory = memory_.at(Sharing::kReduce);
    for (int step = 1; step < size(); ++step) {
      const int sender = (rank() + step) % size();
      const int row = sender < rank() ? sender : sender - 1;
      for (size_t i = 0; i < segments.size(); ++i) {
        if (segments[i].root != rank()) continue;
        const auto* from = memory.of(sender) + places[static_cast<size_t>(sender)].places[i];
        pull(parts.at_segment(i) + row * parts.strides[i], from, static_cast<std::size_t>(parts.bytes[i]));
      }
    }
  }

  void add_up(std::span<const OwnerSegment> segments, const SharedSum& how, const Parts& parts) const {
    std::map<at::ScalarType, std::vector<kernels::SumSegment>> own;  // by dtype of the sum; one, as a rule
    for (size_t i = 0; i < segments.size(); ++i) {
      const auto& [root, buffer, unused] = segments[i];
      if (root != rank()) continue;
      own[buffer.scalar_type()].push_back(
          {buffer.data_ptr(), parts.at_segment(i), parts.strides[i] / bytes_of(how.sent), buffer.numel()});
    }
    for (const auto& [dtype, sums] : own) {
      TORCH_CHECK(sums_shared(how.sent, dtype), "[dmuon.comm] cannot add up ", how.sent, " in ", dtype);
      const kernels::SumArgs args{
          sums, *to_scalar(dtype), *to_scalar(how.sent), size(), rank(), 1.0F / static_cast<float>(how.divisor)};
      const char* problem = kernels::sum_parts(args, current_stream(device_));
      TORCH_CHECK(problem == nullptr, "[dmuon.comm] a sum could not be queued: ", problem);
    }
  }

  void pull(void* to, const void* from, std::size_t bytes) const {
    if (bytes == 0) return;
    const char* problem = kernels::pull(to, from, bytes, current_stream(device_));
    TORCH_CHECK(problem == nullptr, "[dmuon.comm] a copy from a peer could not be queued: ", problem);
  }

  // `sum`: of a reduce_shared.
  [[nodiscard]] static std::uint32_t describe(std::span<const OwnerSegment> segments,
                                              const std::optional<SharedSum>& sum) {
    Description description;
    description.add(sum ? std::bit_cast<std::int64_t>(sum->divisor) : 0);
    for (const auto& [root, buffer, place] : segments) {
      description.add(root).add(buffer.numel()).add(place);
      description.add(static_cast<std::int64_t>(sum ? sum->sent : buffer.scalar_type()));
    }
    return description.value();
  }

  // The pads hold one call at a time.
  void begin(const char* name, std::uint32_t description) {
    links_->guarded([&] { last_.block_current_stream(); });
    links_->begin(name, description);
  }

  static std::vector<at::Tensor> keep_alive(std::span<const OwnerSegment> segments) {
    std::vector<at::Tensor> tensors;
    for (const auto& segment : segments) tensors.push_back(segment.buffer);
    return tensors;
  }

  Pending finish(std::vector<at::Tensor> keep_alive) {
    last_ = links_->guarded([this] { return Event::record(device_); });
    return Pending([links = links_, event = last_] { links->guarded([&] { event.block_current_stream(); }); },
                   std::move(keep_alive),
                   [links = links_, event = last_] { return links->guarded([&] { return event.reached(); }); });
  }

  CommunicatorPtr inner_;
  c10::Device device_;
  std::shared_ptr<PeerLinks> links_;
  std::map<Sharing, PeerMemory> memory_;
  Event last_;  ///< the end of the last call
};

}  // namespace

PeerCopy make_peer_copy_communicator(CommunicatorPtr inner, c10::Device device, std::chrono::milliseconds timeout) {
  if (!device.is_cuda()) return {nullptr, c10::str("the mesh is on ", device.type(), ", not on CUDA")};
  auto links = std::make_shared<PeerLinks>(inner->rank(), inner->size(), device, timeout);
  auto problem = links->connect(*inner);
  if (!problem.empty()) return {nullptr, std::move(problem)};
  return {std::make_shared<PeerCopyCommunicator>(std::move(inner), device, std::move(links)), ""};
}

}  // namespace dmuon

#else

namespace dmuon {

PeerCopy make_peer_copy_communicator(CommunicatorPtr /*inner*/, c10::Device device,
                                     std::chrono::milliseconds /*timeout*/) {
  if (!device.is_cuda()) return {nullptr, c10::str("the mesh is on ", device.type(), ", not on CUDA")};
  return {nullptr, "this build of dmuon has no CUDA kernels"};
}

}  // namespace dmuon

#endif
