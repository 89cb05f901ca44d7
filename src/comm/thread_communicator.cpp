#include "dmuon/thread_communicator.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>

namespace dmuon {
namespace {

enum class CallKind { kBroadcast, kReduce, kReduceShared, kGather, kScatter, kExchange };

// Memory of one purpose, by rank.
using Shared = std::vector<at::Tensor>;

// What one rank brings to a collective.
struct Deposit {
  std::vector<OwnerSegment> segments;
  std::vector<at::Tensor> received;
  std::vector<std::vector<at::Tensor>> parts;
  std::string text;
  SharedSum how;  // of a reduce_shared
};

// One collective: what every rank deposited, and whether the data has moved.
struct Call {
  CallKind kind = CallKind::kBroadcast;
  std::vector<std::vector<OwnerSegment>> segments;          // [rank]
  std::vector<std::vector<at::Tensor>> received;            // [rank], of a gather
  std::vector<std::vector<std::vector<at::Tensor>>> parts;  // [rank], of a scatter
  std::vector<std::string> texts;                           // [rank]
  std::vector<SharedSum> how;                               // [rank]
  int arrived = 0;
  bool done = false;
  std::string error;
};

at::Tensor piece_of(const at::Tensor& memory, std::int64_t place, std::int64_t numel, at::ScalarType dtype) {
  const auto bytes = numel * static_cast<std::int64_t>(at::elementSize(dtype));
  return memory.narrow(0, place, bytes).view(dtype);
}

// What each rank sent to a sum, out of its shared memory; the root's own part out of its buffer.
void reduce_shared(const Call& call, const Shared& shared) {
  std::vector<SegmentSize> sizes;
  for (const auto& segment : call.segments[0]) sizes.push_back({segment.root, segment.buffer.numel()});
  const auto bytes = static_cast<std::int64_t>(at::elementSize(call.how[0].sent));
  std::vector<OutgoingPlaces> places;
  for (size_t rank = 0; rank < shared.size(); ++rank) {
    places.push_back(outgoing_places(sizes, static_cast<int>(rank), bytes));
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto root = static_cast<size_t>(sizes[i].root);
    const auto& total = call.segments[root][i].buffer;
    const auto part = [&](size_t rank) {
      const auto mine =
          rank == root ? total : piece_of(shared[rank], places[rank].places[i], sizes[i].numel, call.how[0].sent);
      return mine.to(at::promote_types(total.scalar_type(), at::kFloat), false, true);
    };
    auto sum = part(0);
    for (size_t rank = 1; rank < shared.size(); ++rank) sum.add_(part(rank));
    total.copy_(sum.div_(call.how[0].divisor));
  }
}

void move_segment(const Call& call, size_t index, const Shared& shared) {
  const auto kind = call.kind;
  const auto& ranks = call.segments;
  const auto& root = ranks[0][index];
  if (kind == CallKind::kGather) {
    const auto& rows = call.received[static_cast<size_t>(root.root)][index];
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      rows[static_cast<int64_t>(rank)].copy_(ranks[rank][index].buffer);
    return;
  }
  if (kind == CallKind::kScatter) {
    const auto& parts = call.parts[static_cast<size_t>(root.root)][index];
    for (size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank][index].buffer.copy_(parts[rank]);
    return;
  }
  auto total = ranks[static_cast<size_t>(root.root)][index].buffer;
  if (kind == CallKind::kBroadcast && root.place >= 0 && !shared.empty()) {
    total = piece_of(shared[static_cast<size_t>(root.root)], root.place, total.numel(), total.scalar_type());
  }
  if (kind == CallKind::kBroadcast) {
    for (const auto& segments : ranks) {
      if (!segments[index].buffer.is_same(total)) segments[index].buffer.copy_(total);
    }
    return;
  }
  auto sum = ranks[0][index].buffer.clone();
  for (size_t rank = 1; rank < ranks.size(); ++rank) sum.add_(ranks[rank][index].buffer);
  total.copy_(sum);
}

std::string mismatch(const Call& call) {
  const auto& ranks = call.segments;
  for (const auto& segments : ranks) {
    if (segments.size() != ranks[0].size()) return "ranks passed different numbers of segments";
    for (size_t i = 0; i < segments.size(); ++i) {
      const auto& mine = segments[i];
      const auto& first = ranks[0][i];
      const bool same_dtype =
          call.kind == CallKind::kReduceShared || mine.buffer.scalar_type() == first.buffer.scalar_type();
      if (mine.root != first.root || mine.place != first.place || mine.buffer.numel() != first.buffer.numel() ||
          !same_dtype) {
        return "ranks passed segments of different root, size or dtype";
      }
    }
  }
  const bool alike = std::adjacent_find(call.how.begin(), call.how.end(), std::not_equal_to<>()) == call.how.end();
  return alike ? "" : "ranks sent different dtypes, or divide differently";
}

}  // namespace

class ThreadWorld {
 public:
  ThreadWorld(int size, std::chrono::milliseconds timeout) : size_(size), timeout_(timeout) {}

  int size() const { return size_; }

  std::shared_ptr<Call> arrive(int64_t sequence, int rank, CallKind kind, Deposit deposit) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& slot = calls_[sequence];
    if (!slot) {
      slot = std::make_shared<Call>();
      slot->kind = kind;
      slot->segments.resize(static_cast<size_t>(size_));
      slot->received.resize(static_cast<size_t>(size_));
      slot->parts.resize(static_cast<size_t>(size_));
      slot->texts.resize(static_cast<size_t>(size_));
      slot->how.resize(static_cast<size_t>(size_), deposit.how);
    }
    const auto call = slot;
    if (call->kind != kind) call->error = "ranks issued different collectives at the same place in the order";
    call->segments[static_cast<size_t>(rank)] = std::move(deposit.segments);
    call->received[static_cast<size_t>(rank)] = std::move(deposit.received);
    call->parts[static_cast<size_t>(rank)] = std::move(deposit.parts);
    call->texts[static_cast<size_t>(rank)] = std::move(deposit.text);
    call->how[static_cast<size_t>(rank)] = deposit.how;
    if (++call->arrived == size_) {
      complete(*call);
      calls_.erase(sequence);
    }
    return call;
  }

  // Once a purpose and rank.
  void share(Sharing purpose, int rank, at::Tensor memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& shared = shared_[purpose];
    shared.resize(static_cast<size_t>(size_));
    shared[static_cast<size_t>(rank)] = std::move(memory);
  }

  bool done(const Call& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return call.done || !broken_.empty();
  }

  void wait(const Call& call) {
    std::unique_lock<std::mutex> lock(mutex_);
    moved_.wait_for(lock, timeout_, [&] { return call.done || !broken_.empty(); });
    if (!call.done && broken_.empty()) {
      give_up(c10::str("a thread rank waited ", timeout_.count(), " ms for its peers: they never made the same call"));
    }
    const auto& error = call.done ? call.error : broken_;
    TORCH_CHECK(error.empty(), "[dmuon.comm] ", error);
  }

 private:
  void complete(Call& call) {
    const at::NoGradGuard no_grad;
    if (call.error.empty()) call.error = mismatch(call);
    if (call.error.empty()) move(call);
    call.segments.clear();
    call.received.clear();
    call.parts.clear();
    call.done = true;
    if (!call.error.empty()) broken_ = call.error;
    moved_.notify_all();
  }

  void move(const Call& call) {
    if (call.kind == CallKind::kReduceShared) return reduce_shared(call, shared_.at(Sharing::kReduce));
    const auto shared = shared_.find(Sharing::kBroadcast);
    for (size_t i = 0; i < call.segments[0].size(); ++i) {
      move_segment(call, i, shared == shared_.end() ? Shared() : shared->second);
    }
  }

  void give_up(std::string why) {
    broken_ = std::move(why);
    moved_.notify_all();
  }

  int size_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable moved_;
  std::map<int64_t, std::shared_ptr<Call>> calls_;  // by sequence number
  std::map<Sharing, Shared> shared_;
  std::string broken_;  // why no unfinished call will ever finish
};

namespace {

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadWorld> world, int rank, bool shares)
      : world_(std::move(world)), rank_(rank), shares_(shares) {}

  int rank() const override { return rank_; }
  int size() const override { return world_->size(); }
  Pending broadcast(std::span<const OwnerSegment> segments) override {
    return issue(CallKind::kBroadcast, segments, {}, {});
  }
  Pending reduce(std::span<const OwnerSegment> segments) override { return issue(CallKind::kReduce, segments, {}, {}); }

  at::Tensor share(Sharing purpose, std::int64_t bytes) override {
    if (!shares_ || !shared_.insert(purpose).second) return {};
    const auto memory = at::zeros({bytes}, at::kByte);
    world_->share(purpose, rank_, memory);
    static_cast<void>(exchange(""));
    return memory;
  }
  bool sums_shared(at::ScalarType sent, at::ScalarType sum) const override {
    return shares_ && at::isFloatingType(sent) && at::isFloatingType(sum);
  }
  Pending reduce_shared(std::span<const OwnerSegment> segments, const SharedSum& how) override {
    return issue(CallKind::kReduceShared, segments, {}, {}, how);
  }

  Pending gather(std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received) override {
    return issue(CallKind::kGather, segments, received, {});
  }
  Pending scatter(std::span<const OwnerSegment> segments, const std::vector<std::vector<at::Tensor>>& parts) override {
    return issue(CallKind::kScatter, segments, {}, parts);
  }

  std::vector<std::string> exchange(const std::string& text) override { return exchange_at(sequence_++, text); }
  // Numbered apart from all other calls, below zero.
  std::vector<std::string> meet(const std::string& text) override { return exchange_at(--meetings_, text); }

 private:
  std::vector<std::string> exchange_at(int64_t sequence, const std::string& text) {
    const auto call = world_->arrive(sequence, rank_, CallKind::kExchange, {{}, {}, {}, text, {}});
    world_->wait(*call);
    return call->texts;
  }

  Pending issue(CallKind kind, std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received,
                const std::vector<std::vector<at::Tensor>>& parts, const SharedSum& how = {}) {
    Deposit deposit{{}, received, parts, "", how};
    std::vector<at::Tensor> keep_alive = received;
    for (const auto& tensors : parts) keep_alive.insert(keep_alive.end(), tensors.begin(), tensors.end());
    for (const auto& segment : segments) {
      deposit.segments.push_back({segment.root, segment.buffer.variable_data(), segment.place});
      keep_alive.push_back(segment.buffer);
    }
    auto call = world_->arrive(sequence_++, rank_, kind, std::move(deposit));
    return Pending([world = world_, call] { world->wait(*call); }, std::move(keep_alive),
                   [world = world_, call] { return world->done(*call); });
  }

  std::shared_ptr<ThreadWorld> world_;
  int rank_;
  bool shares_;
  std::set<Sharing> shared_;
  int64_t sequence_ = 0;
  int64_t meetings_ = 0;
};

}  // namespace

std::shared_ptr<ThreadWorld> make_thread_world(int size, std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(size >= 1, "[dmuon.comm] a thread world needs at least one rank, got ", size);
  return std::make_shared<ThreadWorld>(size, timeout);
}

CommunicatorPtr make_thread_communicator(std::shared_ptr<ThreadWorld> world, int rank, bool shares) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < world->size(), "[dmuon.comm] rank ", rank, " is outside a world of ",
                    world->size());
  return std::make_shared<ThreadCommunicator>(std::move(world), rank, shares);
}

}  // namespace dmuon
