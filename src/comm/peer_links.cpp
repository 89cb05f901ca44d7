#ifdef DMUON_HAVE_KERNELS

#include "comm/peer_links.h"

#include <c10/core/DeviceGuard.h>

#include "comm/current_stream.h"
#include "comm/peer_identity.h"
#include "kernels/peer_sum.h"

namespace dmuon {
namespace {

constexpr std::size_t kTrialOffset = kernels::kPadBytes;  // where each rank leaves a number for the others to read

std::string to_string(const char* problem) { return problem == nullptr ? "" : problem; }

std::uint64_t trial_number(int rank) { return 0x646d756f6e000000ULL + static_cast<std::uint64_t>(rank); }

void check_launch(const char* problem) {
  TORCH_CHECK(problem == nullptr, "[dmuon.comm] a signal to the peers could not be queued: ", problem);
}

PeerIdentity identify(const std::string& problem) {
  PeerIdentity mine{host_identity(), {}, {}, problem};
  if (mine.problem.empty()) mine.problem = to_string(kernels::device_uuid(mine.gpu));
  return mine;
}

std::vector<PeerIdentity> exchange(Communicator& inner, const PeerIdentity& mine) {
  std::vector<PeerIdentity> ranks;
  for (const auto& text : inner.meet(to_text(mine))) ranks.push_back(to_identity(text));
  return ranks;
}

}  // namespace

std::string PeerMemory::map(Communicator& inner, c10::Device device, std::size_t bytes) {
  const c10::DeviceGuard guard(device);
  own_ = std::make_shared<kernels::ExportedMemory>();
  std::string mine;
  auto problem = to_string(own_->allocate(bytes));
  if (problem.empty()) problem = to_string(own_->handle(mine));
  const auto handles = inner.meet(mine);
  peers_.resize(handles.size());
  std::vector<std::uint8_t*> bases;
  for (size_t rank = 0; rank < handles.size(); ++rank) {
    const bool here = static_cast<int>(rank) == inner.rank();
    if (!here && problem.empty() && !handles[rank].empty()) problem = to_string(peers_[rank].open(handles[rank]));
    bases.push_back(static_cast<std::uint8_t*>(here ? own_->data() : peers_[rank].data()));
  }
  if (problem.empty()) bases_ = std::move(bases);
  return problem.empty() ? "" : c10::str("sharing ", bytes, " bytes failed: ", problem);
}

at::Tensor PeerMemory::own(c10::Device device, std::int64_t bytes) const {
  return at::from_blob(
      own_->data(), {bytes}, [own = own_](void*) {}, at::TensorOptions().dtype(at::kByte).device(device), device);
}

std::string agree(Communicator& inner, const std::string& problem) {
  const auto problems = inner.meet(problem);
  for (size_t rank = 0; rank < problems.size(); ++rank) {
    if (!problems[rank].empty()) return c10::str("rank ", rank, ": ", problems[rank]);
  }
  return "";
}

PeerLinks::PeerLinks(int rank, int ranks, c10::Device device, std::chrono::milliseconds timeout)
    : device_(device), timeout_(timeout) {
  pointers_.rank = rank;
  pointers_.ranks = ranks;
}

PeerLinks::~PeerLinks() {
  try {
    const auto text = failure();
    if (!text.empty() && !told_) TORCH_WARN(text);
  } catch (const std::exception&) {
  }
}

// Three rounds, and every rank takes part in each as long as none has found an obstacle: who is there, who can reach
// whom, and whether the memory opens and reads as it should.
std::string PeerLinks::connect(Communicator& inner) {
  const c10::DeviceGuard guard(device_);
  auto problem = to_string(record_.allocate());
  if (problem.empty()) problem = to_string(kernels::load_signals());
  if (problem.empty()) problem = to_string(kernels::load_sums());
  auto mine = identify(problem);
  auto ranks = exchange(inner, mine);
  if (auto found = obstacle(ranks, kernels::kMaxPeers); !found.empty()) return found;
  for (size_t rank = 0; rank < ranks.size() && mine.unreachable.empty(); ++rank) {
    if (static_cast<int>(rank) != inner.rank()) mine.unreachable = kernels::unreachable(ranks[rank].gpu);
  }
  ranks = exchange(inner, mine);
  if (auto found = obstacle(ranks, kernels::kMaxPeers); !found.empty()) return found;
  return agree(inner, try_peers(inner));
}

std::string PeerLinks::try_peers(Communicator& inner) {
  const auto problem = pads_.map(inner, device_, kTrialOffset + sizeof(std::uint64_t));
  const auto number = trial_number(inner.rank());
  std::string wrote = problem;
  if (wrote.empty()) wrote = to_string(kernels::write_bytes(pads_.of(inner.rank()) + kTrialOffset, &number, 8));
  const auto everybody = agree(inner, wrote);
  if (!everybody.empty()) return everybody;
  for (int rank = 0; rank < pointers_.ranks; ++rank) {
    pointers_.pads[rank] = reinterpret_cast<std::uint64_t*>(pads_.of(rank));
  }
  return read_back();
}

// Some machines map a peer's memory and then read something else (an IOMMU in the way).
std::string PeerLinks::read_back() const {
  for (int rank = 0; rank < pointers_.ranks; ++rank) {
    if (rank == pointers_.rank) continue;
    std::uint64_t found = 0;
    const auto problem = to_string(kernels::read_bytes(&found, pads_.of(rank) + kTrialOffset, sizeof(found)));
    if (!problem.empty()) return c10::str("reading memory of rank ", rank, " failed: ", problem);
    if (found != trial_number(rank)) return c10::str("memory of rank ", rank, " does not read as it was written");
  }
  return "";
}

void PeerLinks::begin(const char* name, std::uint32_t description) {
  ++call_;
  description_ = description;
  names_[call_ % names_.size()] = name;
}

kernels::SignalArgs PeerLinks::args(kernels::Moment moment) const {
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout_).count();
  return {pointers_, moment, kernels::mark_of(call_, description_), static_cast<std::uint64_t>(nanoseconds),
          record_.data()};
}

void PeerLinks::signal(kernels::Moment moment) const {
  check_launch(kernels::signal(args(moment), current_stream(device_)));
}

void PeerLinks::wait(kernels::Moment moment) const {
  check_launch(kernels::wait(args(moment), current_stream(device_)));
}

void PeerLinks::signal_and_wait(kernels::Moment moment) const {
  check_launch(kernels::signal_and_wait(args(moment), current_stream(device_)));
}

std::string PeerLinks::failure() const {
  const auto failure = record_.read();
  if (failure.kind == 0) return "";
  const auto* name = names_[failure.call % names_.size()];
  const auto call = c10::str(name == nullptr ? "call" : name, " (call ", failure.call, ')');
  const auto seconds = std::chrono::duration<double>(timeout_).count();
  if (failure.kind == 1) {
    return c10::str("[dmuon.comm] rank ", pointers_.rank, " waited ", seconds, " s for rank ", failure.peer, " to ",
                    failure.moment == 0 ? "join" : "finish", " the ", call,
                    ": it is hung, dead or runs another program. This process cannot use its GPU any more; restart "
                    "the job, and see what rank ",
                    failure.peer, " says.");
  }
  return c10::str("[dmuon.comm] rank ", pointers_.rank, " and rank ", failure.peer, " made different calls where rank ",
                  pointers_.rank, " made the ", call,
                  ": ranks must make the same calls in the same order. This process cannot use its GPU any more.");
}

void PeerLinks::check() const {
  if (record_.read().kind == 0) return;
  told_ = true;
  TORCH_CHECK(false, failure());
}

}  // namespace dmuon

#endif
