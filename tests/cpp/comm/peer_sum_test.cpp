// The kernel that adds up what peers have sent, on one GPU: random segments against the same sum on the CPU.
#ifdef DMUON_HAVE_KERNELS

#include "kernels/peer_sum.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "gpu.h"

namespace dmuon {
namespace {

class PeerSumOnGpu : public testing::OnGpu {};

struct Type {
  at::ScalarType tensor;
  kernels::Scalar kernel;
};
constexpr Type kTypes[] = {{at::kFloat, kernels::Scalar::kFloat},
                           {at::kHalf, kernels::Scalar::kHalf},
                           {at::kBFloat16, kernels::Scalar::kBFloat16}};

// One rank's view of a segment: its own part and the others', in rank order.
struct Segment {
  at::Tensor total;  // [numel], on the GPU
  at::Tensor parts;  // [ranks - 1, stride], on the GPU
  at::Tensor expected;
};

class Segments {
 public:
  Segments(std::uint64_t seed, int ranks, int rank, const Type& sum, const Type& sent)
      : generator_(at::detail::createCPUGenerator(seed)), ranks_(ranks), rank_(rank), sum_(sum), sent_(sent) {}

  /// `shift`: elements from an aligned address; `gap`: from the end of a part to the next one.
  Segment make(std::int64_t numel, std::int64_t shift, std::int64_t gap, float factor) {
    const at::Tensor own = at::randn({shift + numel}, generator_, at::kFloat).to(sum_.tensor);
    const at::Tensor parts = at::randn({ranks_ - 1, numel + gap}, generator_, at::kFloat).to(sent_.tensor);
    at::Tensor expected;
    for (int r = 0; r < ranks_; ++r) {
      const at::Tensor part =
          r == rank_ ? own.narrow(0, shift, numel) : parts[r < rank_ ? r : r - 1].narrow(0, 0, numel);
      expected = expected.defined() ? expected + part.to(at::kFloat) : part.to(at::kFloat);
    }
    return {own.to(at::kCUDA).narrow(0, shift, numel), parts.to(at::kCUDA), (expected * factor).to(sum_.tensor)};
  }

 private:
  at::Generator generator_;
  int ranks_;
  int rank_;
  Type sum_;
  Type sent_;
};

// Less than a vector, tails, more than a chunk of a thread block, nothing; aligned and not; up to five ranks.
TEST_F(PeerSumOnGpu, IsTheSumInRankOrder) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 60; ++round) {
    const Type& sum = kTypes[random() % 3];
    const Type& sent = kTypes[random() % 3];
    const int ranks = 2 + static_cast<int>(random() % 4);
    const int rank = static_cast<int>(random() % static_cast<std::uint64_t>(ranks));
    const float factor = round % 3 == 0 ? 1.0F : 1.0F / static_cast<float>(ranks);
    Segments make(random(), ranks, rank, sum, sent);
    std::vector<Segment> segments;
    std::vector<kernels::SumSegment> list;
    for (std::uint64_t i = 0; i < (round % 10 == 0 ? 70 : 1 + random() % 4); ++i) {
      const auto numel = static_cast<std::int64_t>(random() % (random() % 2 == 0 ? 20 : 20000));
      const bool aligned = random() % 2 == 0;
      const auto gap = aligned ? (4 - numel % 4) % 4 : static_cast<std::int64_t>(random() % 5);
      const Segment& made = segments.emplace_back(make.make(numel, aligned ? 0 : 1, gap, factor));
      list.push_back({made.total.data_ptr(), made.parts.data_ptr(), numel + gap, numel});
    }
    const char* problem = kernels::sum_parts({list, sum.kernel, sent.kernel, ranks, rank, factor}, nullptr);
    ASSERT_EQ(problem, nullptr) << problem;
    for (const Segment& segment : segments) {
      EXPECT_TRUE(segment.total.cpu().equal(segment.expected))
          << "round " << round << ", " << segment.expected.numel() << " elements, rank " << rank << " of " << ranks;
    }
  }
}

}  // namespace
}  // namespace dmuon

#endif
