#include "dmuon/thread_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "comm/thread_ranks.h"
#include "dmuon/recording_communicator.h"

namespace dmuon {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kSegments = 5;

// Segment i of a rank: 3 + i elements whose values name the rank and the segment.
std::vector<OwnerSegment> segments_of(int rank, int ranks, at::ScalarType dtype) {
  std::vector<OwnerSegment> segments;
  for (int i = 0; i < kSegments; ++i) segments.push_back({i % ranks, at::full({3 + i}, 10 * (rank + 1) + i, dtype)});
  return segments;
}

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kLong};

class ThreadCommunicatorSizes : public ::testing::TestWithParam<int> {
 protected:
  const int ranks_ = GetParam();
  const std::shared_ptr<ThreadWorld> world_ = make_thread_world(ranks_, std::chrono::seconds(10));
};

TEST_P(ThreadCommunicatorSizes, BroadcastsEverySegmentFromItsRoot) {
  on_threads(ranks_, [&](int rank) {
    const auto communicator = make_thread_communicator(world_, rank);
    EXPECT_EQ(communicator->rank(), rank);
    EXPECT_EQ(communicator->size(), ranks_);
    for (const auto dtype : kDtypes) {
      const auto segments = segments_of(rank, ranks_, dtype);
      communicator->broadcast(segments).wait();
      for (int i = 0; i < kSegments; ++i) {
        const auto& [root, buffer, place] = segments[static_cast<size_t>(i)];
        EXPECT_TRUE(buffer.eq(10 * (root + 1) + i).all().item<bool>()) << dtype << ", segment " << i;
      }
    }
  });
}

TEST_P(ThreadCommunicatorSizes, ScattersThePartsOfEveryRoot) {
  on_threads(ranks_, [&](int rank) {
    const auto communicator = std::make_shared<RecordingCommunicator>(make_thread_communicator(world_, rank));
    const auto segments = segments_of(rank, ranks_, at::kFloat);
    std::vector<std::vector<at::Tensor>> parts(segments.size());
    for (size_t i = 0; i < segments.size(); ++i) {
      if (segments[i].root != rank) continue;
      for (int other = 0; other < ranks_; ++other) {
        parts[i].push_back(at::full_like(segments[i].buffer, 100 * rank + 10 * static_cast<int>(i) + other));
      }
    }
    communicator->scatter(segments, parts).wait();
    std::int64_t foreign = 0;
    for (int i = 0; i < kSegments; ++i) {
      const auto& [root, buffer, place] = segments[static_cast<size_t>(i)];
      EXPECT_TRUE(buffer.eq(100 * root + 10 * i + rank).all().item<bool>()) << "segment " << i;
      if (root != rank) foreign += static_cast<std::int64_t>(buffer.nbytes());
    }
    EXPECT_EQ(communicator->stats().broadcast_bytes, foreign);
  });
}

TEST_P(ThreadCommunicatorSizes, SumsEverySegmentOntoItsRoot) {
  on_threads(ranks_, [&](int rank) {
    const auto communicator = make_thread_communicator(world_, rank);
    for (const auto dtype : kDtypes) {
      const auto segments = segments_of(rank, ranks_, dtype);
      communicator->reduce(segments).wait();
      for (int i = 0; i < kSegments; ++i) {
        const auto& [root, buffer, place] = segments[static_cast<size_t>(i)];
        const int sum = 10 * ranks_ * (ranks_ + 1) / 2 + i * ranks_;
        EXPECT_TRUE(root != rank || buffer.eq(sum).all().item<bool>()) << dtype << ", segment " << i;
      }
    }
  });
}

TEST_P(ThreadCommunicatorSizes, ExchangesTexts) {
  on_threads(ranks_, [&](int rank) {
    const auto communicator = make_thread_communicator(world_, rank);
    const auto texts = communicator->exchange("rank " + std::to_string(rank));
    ASSERT_EQ(texts.size(), static_cast<size_t>(ranks_));
    for (int peer = 0; peer < ranks_; ++peer) {
      EXPECT_EQ(texts[static_cast<size_t>(peer)], "rank " + std::to_string(peer));
    }
  });
}

TEST_P(ThreadCommunicatorSizes, MeetsApartFromTheOrderOfOtherCalls) {
  on_threads(ranks_, [&](int rank) {
    const auto communicator = make_thread_communicator(world_, rank);
    const auto segments = segments_of(rank, ranks_, at::kFloat);
    Pending before;
    if (rank % 2 == 0) before = communicator->broadcast(segments);
    for (int meeting = 0; meeting < 3; ++meeting) {
      const auto texts = communicator->meet(c10::str("rank ", rank, ", meeting ", meeting));
      ASSERT_EQ(texts.size(), static_cast<size_t>(ranks_));
      for (int peer = 0; peer < ranks_; ++peer) {
        EXPECT_EQ(texts[static_cast<size_t>(peer)], c10::str("rank ", peer, ", meeting ", meeting));
      }
    }
    if (rank % 2 == 1) communicator->broadcast(segments).wait();
    before.wait();
    EXPECT_EQ(segments[0].buffer[0].item<float>(), 10.0F);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadCommunicatorSizes, ::testing::Values(1, 2, 3, 4));

TEST(ThreadCommunicator, CallsDepositAndOnlyWaitBlocks) {
  const auto world = make_thread_world(2, std::chrono::seconds(10));
  std::atomic<bool> first_waits{false};
  on_threads(2, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    const std::vector<OwnerSegment> one{{0, at::full({4}, rank + 1, at::kFloat)}};
    const std::vector<OwnerSegment> two{{1, at::full({2}, rank + 1, at::kFloat)}};
    if (rank == 0) {
      auto first = communicator->broadcast(one);
      auto second = communicator->reduce(two);  // rank 1 has issued nothing yet
      EXPECT_FALSE(first.ready());
      EXPECT_FALSE(second.ready());
      first_waits = true;
      second.wait();
      EXPECT_TRUE(first.ready());
      return;
    }
    while (!first_waits) std::this_thread::yield();
    auto first = communicator->broadcast(one);
    EXPECT_TRUE(first.ready());
    communicator->reduce(two).wait();
    EXPECT_TRUE(one[0].buffer.eq(1).all().item<bool>());
    EXPECT_TRUE(two[0].buffer.eq(3).all().item<bool>());
  });
}

TEST(ThreadCommunicator, SumsInRankOrderWhateverTheTiming) {
  const auto expected = ((at::full({8}, 1.0F) + 1e-8F) + 1e8F) + -1e8F;
  for (int slow = 0; slow < 4; ++slow) {
    const auto world = make_thread_world(4, std::chrono::seconds(10));
    on_threads(4, [&](int rank) {
      const float values[] = {1.0F, 1e-8F, 1e8F, -1e8F};
      const auto communicator = make_thread_communicator(world, rank);
      if (rank == slow) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::vector<OwnerSegment> segments{{2, at::full({8}, values[rank])}};
      communicator->reduce(segments).wait();
      EXPECT_TRUE(rank != 2 || at::equal(segments[0].buffer, expected));
    });
  }
}

// What each rank of two is told when rank 1 calls `other` where rank 0 broadcasts four floats from rank 0.
std::vector<std::string> errors_of(const std::function<void(Communicator&)>& other) {
  const auto world = make_thread_world(2, std::chrono::milliseconds(300));
  return errors_on_threads(2, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    if (rank == 1) return other(*communicator);
    communicator->broadcast(std::vector<OwnerSegment>{{0, at::zeros({4})}}).wait();
  });
}

TEST(ThreadCommunicator, TellsAllRanksOfAMismatch) {
  const std::vector<OwnerSegment> same{{0, at::zeros({4})}};
  const auto broadcast = [](std::vector<OwnerSegment> segments) {
    return [segments = std::move(segments)](Communicator& communicator) { communicator.broadcast(segments).wait(); };
  };
  EXPECT_THAT(errors_of(broadcast(same)), Each(""));
  EXPECT_THAT(errors_of([&](Communicator& communicator) { communicator.reduce(same).wait(); }),
              Each(HasSubstr("different collectives")));
  EXPECT_THAT(errors_of([](Communicator& communicator) { (void)communicator.exchange("text"); }),
              Each(HasSubstr("different collectives")));
  EXPECT_THAT(errors_of(broadcast({})), Each(HasSubstr("different numbers of segments")));
  EXPECT_THAT(errors_of(broadcast({{1, at::zeros({4})}})), Each(HasSubstr("different root, size or dtype")));
  EXPECT_THAT(errors_of(broadcast({{0, at::zeros({5})}})), Each(HasSubstr("different root, size or dtype")));
  EXPECT_THAT(errors_of(broadcast({{0, at::zeros({4}, at::kDouble)}})),
              Each(HasSubstr("different root, size or dtype")));
}

TEST(ThreadCommunicator, ThrowsWhenAPeerNeverCalls) {
  const auto errors = errors_of([](Communicator&) {});
  EXPECT_THAT(errors[0], HasSubstr("waited 300 ms for its peers"));
  EXPECT_EQ(errors[1], "");
}

TEST(ThreadCommunicator, ThrowsWhenAPeerNeverComesToMeet) {
  const auto world = make_thread_world(2, std::chrono::milliseconds(300));
  const auto errors = errors_on_threads(2, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    const std::vector<OwnerSegment> segments{{0, at::full({4}, rank + 1, at::kFloat)}};
    if (rank == 0) (void)communicator->meet("alone");
    communicator->broadcast(segments).wait();
  });
  EXPECT_THAT(errors, Each(HasSubstr("waited 300 ms for its peers")));
}

TEST(ThreadCommunicator, IsBrokenAfterAnError) {
  const auto world = make_thread_world(2, std::chrono::seconds(10));
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_on_threads(2, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    auto mismatched = communicator->broadcast(std::vector<OwnerSegment>{{rank, at::zeros({4})}});
    if (rank == 1) communicator->broadcast(std::vector<OwnerSegment>{{0, at::zeros({4})}}).wait();
    mismatched.wait();
  });
  EXPECT_THAT(errors, Each(HasSubstr("different root, size or dtype")));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(ThreadCommunicator, RefusesImpossibleRanks) {
  EXPECT_THROW((void)make_thread_world(0), c10::ValueError);
  EXPECT_THROW((void)make_thread_communicator(make_thread_world(2), 2), c10::ValueError);
  EXPECT_THROW((void)make_thread_communicator(make_thread_world(2), -1), c10::ValueError);
}

TEST(RecordingCommunicator, CountsCallsAndTheBytesOfOtherRoots) {
  const auto world = make_thread_world(3, std::chrono::seconds(10));
  on_threads(3, [&](int rank) {
    RecordingCommunicator recorder(make_thread_communicator(world, rank));
    EXPECT_EQ(recorder.rank(), rank);
    EXPECT_EQ(recorder.size(), 3);
    const std::vector<OwnerSegment> segments{{0, at::zeros({4})}, {2, at::zeros({3}, at::kBFloat16)}};
    recorder.broadcast(segments).wait();
    recorder.reduce(segments).wait();
    recorder.reduce(segments).wait();
    EXPECT_EQ(recorder.exchange("x").size(), 3U);
    const std::int64_t bytes[] = {6, 16 + 6, 16};  // without the rank's own segment
    EXPECT_EQ(recorder.stats().broadcast_calls, 1);
    EXPECT_EQ(recorder.stats().broadcast_bytes, bytes[rank]);
    EXPECT_EQ(recorder.stats().reduce_calls, 2);
    EXPECT_EQ(recorder.stats().reduce_bytes, 2 * bytes[rank]);
    recorder.reset();
    EXPECT_EQ(recorder.stats().broadcast_bytes + recorder.stats().reduce_calls, 0);
  });
}

}  // namespace
}  // namespace dmuon
