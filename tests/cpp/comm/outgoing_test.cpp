// What ranks know about each other's shared memory without asking.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/peer_identity.h"
#include "comm/thread_ranks.h"
#include "dmuon/recording_communicator.h"
#include "dmuon/thread_communicator.h"

namespace dmuon {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(OutgoingPlaces, LieOneAfterAnotherWithoutTheSendersOwn) {
  const std::vector<SegmentSize> segments{{0, 100}, {1, 1}, {0, 128}, {2, 0}, {1, 3}};
  const auto first = outgoing_places(segments, 0, 2);
  EXPECT_THAT(first.places, ElementsAre(-1, 0, -1, 256, 256));
  EXPECT_EQ(first.bytes, 512);
  const auto third = outgoing_places(segments, 2, 4);
  EXPECT_THAT(third.places, ElementsAre(0, 512, 768, -1, 1280));
  EXPECT_EQ(third.bytes, 1536);
  EXPECT_EQ(outgoing_places({}, 0, 4).bytes, 0);
}

// The segments of a sum as `rank` makes them: its parts of the others in its shared memory, in bf16.
std::vector<OwnerSegment> parts_of(Communicator& communicator, const at::Tensor& memory,
                                   const std::vector<SegmentSize>& sizes, const std::vector<float>& values) {
  const auto places = outgoing_places(sizes, communicator.rank(), 2).places;
  std::vector<OwnerSegment> segments;
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto buffer = places[i] < 0 ? at::empty({sizes[i].numel}, at::kFloat)
                                : memory.narrow(0, places[i], 2 * sizes[i].numel).view(at::kBFloat16);
    buffer.fill_(values[static_cast<size_t>(communicator.rank())]);
    segments.push_back({sizes[i].root, buffer});
  }
  return segments;
}

TEST(ReduceShared, AddsUpInRankOrderInTheDtypeOfTheSum) {
  const std::vector<SegmentSize> sizes{{0, 3}, {2, 200}, {1, 5}, {2, 1}};
  const auto world = make_thread_world(3, std::chrono::seconds(10));
  on_threads(3, [&](int rank) {
    RecordingCommunicator communicator(make_thread_communicator(world, rank, /*shares=*/true));
    ASSERT_TRUE(communicator.sums_shared(at::kBFloat16, at::kFloat));
    const auto memory = communicator.share(Sharing::kReduce, 4096);
    EXPECT_FALSE(communicator.share(Sharing::kReduce, 4096).defined()) << "once a purpose";
    const std::vector<float> values{1.0F, 0x1p-9F, -0x1p-20F};  // lost in bf16 sums, and kept in fp32
    const auto segments = parts_of(communicator, memory, sizes, values);
    communicator.reduce_shared(segments, {.sent = at::kBFloat16, .divisor = 2.0}).wait();
    const float sum = ((values[0] + values[1]) + values[2]) / 2.0F;
    std::int64_t sent = 0;
    for (const auto& segment : segments) {
      EXPECT_TRUE(segment.root != rank || segment.buffer.eq(sum).all().item<bool>());
      if (segment.root != rank) sent += 2 * segment.buffer.numel();
    }
    EXPECT_EQ(communicator.stats().reduce_bytes, sent);
    EXPECT_EQ(communicator.stats().reduce_calls, 1);
  });
}

TEST(ReduceShared, SumsOfNegativeZerosStayNegative) {
  const std::vector<SegmentSize> sizes{{0, 3}, {1, 2}};
  const auto world = make_thread_world(2, std::chrono::seconds(10));
  on_threads(2, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank, /*shares=*/true);
    const auto memory = communicator->share(Sharing::kReduce, 4096);
    const auto segments = parts_of(*communicator, memory, sizes, {-0.0F, -0.0F});
    communicator->reduce_shared(segments, {at::kBFloat16}).wait();
    EXPECT_TRUE(at::signbit(segments[static_cast<size_t>(rank)].buffer).all().item<bool>());
  });
}

TEST(ReduceShared, RanksThatSendDifferentDtypesAreTold) {
  const auto world = make_thread_world(2, std::chrono::seconds(10));
  EXPECT_THAT(errors_on_threads(2,
                                [&](int rank) {
                                  const auto communicator = make_thread_communicator(world, rank, /*shares=*/true);
                                  const auto memory = communicator->share(Sharing::kReduce, 4096);
                                  const auto segments = parts_of(*communicator, memory, {{0, 4}}, {1.0F, 1.0F});
                                  communicator->reduce_shared(segments, {rank == 0 ? at::kBFloat16 : at::kHalf}).wait();
                                }),
              Each(HasSubstr("different dtypes")));
}

TEST(Broadcast, OutOfSharedMemoryTakesWhatLiesAtThePlace) {
  const auto world = make_thread_world(2, std::chrono::seconds(10));
  on_threads(2, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank, /*shares=*/true);
    const auto memory = communicator->share(Sharing::kBroadcast, 1024);
    memory.fill_(rank + 1);
    const std::vector<OwnerSegment> segments{{1, at::zeros({8}, at::kByte), 256}};
    communicator->broadcast(segments).wait();
    EXPECT_TRUE(segments[0].buffer.eq(2).all().item<bool>());
  });
}

TEST(Share, IsNothingForOtherCommunicators) {
  const auto communicator = make_thread_communicator(make_thread_world(1), 0);
  EXPECT_FALSE(communicator->share(Sharing::kBroadcast, 64).defined());
  EXPECT_FALSE(communicator->sums_shared(at::kFloat, at::kFloat));
  EXPECT_THROW((void)communicator->reduce_shared({}, SharedSum{}), std::exception);
  communicator->check();
}

TEST(PeerIdentity, TravelsAsText) {
  const PeerIdentity identity{"boot id", "", "why\nnot", "problem"};
  const auto back = to_identity(to_text(identity));
  EXPECT_EQ(back.host, "boot id");
  EXPECT_EQ(back.gpu, "");
  EXPECT_EQ(back.unreachable, "why not");
  EXPECT_EQ(back.problem, "problem");
  EXPECT_FALSE(host_identity().empty());
}

TEST(Obstacle, NamesTheFirstRankInTheWay) {
  std::vector<PeerIdentity> ranks{{"a", "0", "", ""}, {"a", "1", "", ""}, {"a", "2", "", ""}};
  EXPECT_EQ(obstacle(ranks, 8), "");
  EXPECT_THAT(obstacle(ranks, 2), HasSubstr("3 ranks, more than 2"));
  ranks[2].gpu = "0";
  EXPECT_THAT(obstacle(ranks, 8), HasSubstr("rank 2 uses the same GPU as rank 0"));
  ranks[2].host = "b";
  EXPECT_THAT(obstacle(ranks, 8), HasSubstr("rank 2 runs on another host"));
  ranks[2].unreachable = "no peer access from GPU 0 to GPU 1";
  EXPECT_THAT(obstacle(ranks, 8), HasSubstr("rank 2 cannot reach"));
  ranks[1].problem = "out of memory";
  EXPECT_EQ(obstacle(ranks, 8), "rank 1: out of memory");
}

}  // namespace
}  // namespace dmuon
