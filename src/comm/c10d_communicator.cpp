#include "dmuon/c10d_communicator.h"

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dmuon/stream.h"

namespace dmuon {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Some backends (fake) complete a work's future and never the work.
bool is_completed(c10d::Work& work) {
  if (work.isCompleted()) return true;
  try {
    const auto future = work.getFuture();
    return future && future->completed();
  } catch (const std::exception&) {
    return false;  // no futures in this backend
  }
}

// Communicators of one group, numbered as they are made: the same numbers on all its ranks.
int next_number(const std::string& group_name) {
  static std::mutex mutex;
  static std::map<std::string, int> made;
  const std::lock_guard<std::mutex> lock(mutex);
  return made[group_name]++;
}

class C10dCommunicator final : public Communicator {
 public:
  C10dCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device, bool connects)
      : group_(std::move(group)),
        device_(device),
        meeting_place_(c10::str("dmuon/", next_number(group_->getGroupName()), "/")),
        groups_calls_(group_->getBackend(device.type())->getBackendName() == "nccl") {
    if (connects && groups_calls_ && size() > 1) connect();
  }

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }

  Pending broadcast(std::span<const OwnerSegment> segments) override {
    return issue(segments, [this](std::vector<at::Tensor>& tensors, int root) {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      options.asyncOp = !groups_calls_;
      return group_->broadcast(tensors, options);
    });
  }

  Pending reduce(std::span<const OwnerSegment> segments) override {
    return issue(segments, [this](std::vector<at::Tensor>& tensors, int root) {
      c10d::ReduceOptions options;
      options.reduceOp = c10d::ReduceOp::SUM;
      options.rootRank = root;
      options.asyncOp = !groups_calls_;
      return group_->reduce(tensors, options);
    });
  }

  Pending gather(std::span<const OwnerSegment> segments, const std::vector<at::Tensor>& received) override {
    size_t next = 0;
    return issue(segments, [&](std::vector<at::Tensor>& tensors, int root) {
      const auto& rows = received[next++];
      std::vector<std::vector<at::Tensor>> outputs;
      if (rows.defined()) outputs.push_back(rows.unbind(0));
      c10d::GatherOptions options;
      options.rootRank = root;
      options.asyncOp = !groups_calls_;
      return group_->gather(outputs, tensors, options);
    });
  }

  Pending scatter(std::span<const OwnerSegment> segments, const std::vector<std::vector<at::Tensor>>& parts) override {
    size_t next = 0;
    return issue(segments, [&](std::vector<at::Tensor>& tensors, int root) {
      auto inputs = parts[next++].empty() ? std::vector<std::vector<at::Tensor>>{}
                                          : std::vector<std::vector<at::Tensor>>{parts[next - 1]};
      c10d::ScatterOptions options;
      options.rootRank = root;
      options.asyncOp = !groups_calls_;
      return group_->scatter(tensors, inputs, options);
    });
  }

  std::vector<std::string> exchange(const std::string& text) override {
    const auto bytes = at::TensorOptions().dtype(at::kByte).device(device_);
    const auto length = at::full({1}, static_cast<int64_t>(text.size()), bytes.dtype(at::kLong));
    const auto lengths = all_gather(length);
    int64_t longest = 0;
    for (const auto& entry : lengths) longest = std::max(longest, entry.item<int64_t>());
    auto padded = at::zeros({longest}, at::kByte);
    std::copy(text.begin(), text.end(), padded.data_ptr<uint8_t>());
    if (longest == 0) return std::vector<std::string>(lengths.size());
    std::vector<std::string> texts;
    const auto gathered = all_gather(padded.to(device_));
    for (size_t i = 0; i < gathered.size(); ++i) {
      const auto host = gathered[i].cpu();
      texts.emplace_back(reinterpret_cast<const char*>(host.data_ptr<uint8_t>()), lengths[i].item<int64_t>());
    }
    return texts;
  }

  // Through the group's store, which no collective uses.
  std::vector<std::string> meet(const std::string& text) override {
    const auto store = group_->getStore();
    const auto place = c10::str(meeting_place_, meetings_++, "/");
    store->set(c10::str(place, rank()), std::vector<uint8_t>(text.begin(), text.end()));
    std::vector<std::string> texts;
    for (int i = 0; i < size(); ++i) {
      const auto bytes = store->get(c10::str(place, i));
      texts.emplace_back(bytes.begin(), bytes.end());
    }
    return texts;
  }

 private:
  // A new group may have taken the name of a destroyed one.
  void check_group_lives() const {
    const auto& name = group_->getGroupName();
    bool lives = false;
    try {
      lives = c10d::resolve_process_group(name) == group_;
    } catch (const std::exception&) {
    }
    TORCH_CHECK(lives, "[dmuon.comm] process group '", name,
                "' has been destroyed, and a model dedicated over it cannot communicate any more. Build the model and "
                "call dedicate_params again after init_process_group.");
  }

  void connect() {
    const OwnerSegment one{0, at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device_))};
    broadcast(std::span(&one, 1)).wait();
    reduce(std::span(&one, 1)).wait();
  }

  // NCCL: one group call on the current stream; our own event, never the returned work, says when it is done (some
  // backends return null or an already completed work).  Others: keep every work and wait for all.
  template <typename Call>
  Pending issue(std::span<const OwnerSegment> segments, Call call) {
    check_group_lives();
    std::vector<at::Tensor> keep_alive;
    std::vector<WorkPtr> works;
    if (groups_calls_) group_->startCoalescing(device_.type());
    for (const auto& segment : segments) {
      std::vector<at::Tensor> tensors{segment.buffer.variable_data()};
      works.push_back(call(tensors, segment.root));
      keep_alive.push_back(segment.buffer);
    }
    if (groups_calls_) {
      group_->endCoalescing(device_.type());
      return Pending::on_current_stream(device_, std::move(keep_alive));
    }
    return Pending(
        [works] {
          for (const auto& work : works) work->wait();
        },
        std::move(keep_alive),
        [works] {
          return std::all_of(works.begin(), works.end(), [](const auto& work) { return is_completed(*work); });
        });
  }

  std::vector<at::Tensor> all_gather(const at::Tensor& input) {
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (int i = 0; i < size(); ++i) outputs[0].push_back(at::empty_like(input));
    std::vector<at::Tensor> inputs{input};
    const auto work = group_->allgather(outputs, inputs);
    if (work) work->wait();
    return outputs[0];
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  std::string meeting_place_;  ///< prefix of keys in the group's store
  int meetings_ = 0;
  bool groups_calls_;
};

}  // namespace

CommunicatorPtr make_c10d_communicator(const std::string& group_name, c10::Device device, bool connects) {
  return std::make_shared<C10dCommunicator>(c10d::resolve_process_group(group_name), device, connects);
}

std::chrono::milliseconds c10d_timeout(const std::string& group_name, c10::Device device) {
  try {
    return c10d::resolve_process_group(group_name)->getBackend(device.type())->getBackendOptions()->timeout;
  } catch (const std::exception&) {
    return std::chrono::minutes(10);
  }
}

}  // namespace dmuon
