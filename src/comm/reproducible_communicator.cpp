#include "dmuon/reproducible_communicator.h"

#include <bit>

#include "dmuon/stream.h"

namespace dmuon {

at::Tensor tree_sum(const at::Tensor& rows) {
  const auto count = rows.size(0);
  if (count == 1) return rows[0];
  const auto left = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(count - 1)));
  return tree_sum(rows.narrow(0, 0, left)).add(tree_sum(rows.narrow(0, left, count - left)));
}

Pending ReproducibleCommunicator::reduce(std::span<const OwnerSegment> segments) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> received;
  std::vector<at::Tensor> sums;  // where the rows of received[i] go
  for (const auto& segment : segments) {
    const bool root = segment.root == rank();
    received.push_back(root ? at::empty({size(), segment.buffer.numel()}, segment.buffer.options()) : at::Tensor());
    sums.push_back(segment.buffer);
  }
  const auto add_up = [received, sums] {
    const at::NoGradGuard no_autograd;
    for (size_t i = 0; i < sums.size(); ++i) {
      if (received[i].defined()) sums[i].copy_(tree_sum(received[i]));
    }
  };
  auto pending = std::make_shared<Pending>(inner_->gather(segments, received));
  if (segments.empty() || segments.front().buffer.is_cpu()) {
    return Pending(
        [pending, add_up] {
          pending->wait();
          add_up();
        },
        sums, [pending] { return pending->ready(); });
  }
  pending->wait();
  add_up();  // on the stream that communicated
  auto keep_alive = sums;
  keep_alive.insert(keep_alive.end(), received.begin(), received.end());
  return Pending::on_current_stream(segments.front().buffer.device(), std::move(keep_alive));
}

}  // namespace dmuon
