#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread_ranks.h"
#include "dmuon/communicator.h"
#include "dmuon/pending.h"
#include "dmuon/plan.h"
#include "dmuon/thread_communicator.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

struct Input {
  std::string error;
  std::vector<plan::Matrix> matrices;
};

// What every rank is told, inputs by rank.
std::vector<std::string> agree(const std::vector<Input>& inputs) {
  const auto ranks = static_cast<int>(inputs.size());
  const auto world = make_thread_world(ranks, std::chrono::seconds(10));
  return errors_on_threads(ranks, [&](int rank) {
    const auto& input = inputs[static_cast<size_t>(rank)];
    agree_on_inputs(*make_thread_communicator(world, rank), input.error, plan::describe_inputs(input.matrices));
  });
}

const std::vector<plan::Matrix> kMatrices{{"a.weight", 4, 8, ""}, {"b.weight", 8, 4, ""}};

TEST(AgreeOnInputs, AcceptsEqualInputs) {
  EXPECT_THAT(agree({{"", kMatrices}}), Each(""));
  EXPECT_THAT(agree({{"", kMatrices}, {"", kMatrices}, {"", kMatrices}}), Each(""));
}

TEST(AgreeOnInputs, NamesTheFirstDifferenceOnEveryRank) {
  auto other = kMatrices;
  other[1].name = "c.weight";
  EXPECT_THAT(agree({{"", kMatrices}, {"", kMatrices}, {"", other}}),
              Each(AllOf(HasSubstr("c.weight"), HasSubstr("b.weight"), HasSubstr("rank 2"))));
  other = kMatrices;
  other[0].cols = 16;
  EXPECT_THAT(agree({{"", other}, {"", kMatrices}}), Each(AllOf(HasSubstr("a.weight"), HasSubstr("16"))));
}

TEST(AgreeOnInputs, TellsEveryRankOfOneRanksError) {
  EXPECT_THAT(agree({{"", kMatrices}, {"'x.bias' is 1-D", {}}, {"", kMatrices}}),
              Each(HasSubstr("rank 1: 'x.bias' is 1-D")));
}

TEST(AgreeOnInputs, ARankWithAnEmptyListDiffers) {
  EXPECT_THAT(agree({{"", kMatrices}, {"", {}}}), Each(HasSubstr("a.weight")));
  EXPECT_THAT(agree({{"", {}}, {"", kMatrices}}), Each(HasSubstr("a.weight")));
}

TEST(Pending, WaitsOnceAndThenReturnsAtOnce) {
  int waits = 0;
  Pending pending([&] { ++waits; }, {});
  pending.wait();
  pending.wait();
  EXPECT_EQ(waits, 1);
  EXPECT_TRUE(pending.ready());
}

TEST(Pending, AnEmptyOneIsReady) {
  Pending pending;
  EXPECT_TRUE(pending.ready());
  pending.wait();
}

TEST(Pending, DestroyingWaitsBeforeTheBuffersGo) {
  bool alive_while_waiting = false;
  c10::weak_intrusive_ptr<at::TensorImpl> buffer = [&] {
    auto tensor = at::zeros({2});
    const c10::weak_intrusive_ptr<at::TensorImpl> weak(tensor.getIntrusivePtr());
    const Pending pending([&, weak] { alive_while_waiting = !weak.expired(); }, {std::move(tensor)});
    return weak;
  }();
  EXPECT_TRUE(alive_while_waiting);
  EXPECT_TRUE(buffer.expired());
}

TEST(Pending, MovingHandsTheDutyOver) {
  int waits = 0;
  Pending first([&] { ++waits; }, {}, [] { return false; });
  EXPECT_FALSE(first.ready());
  Pending second(std::move(first));
  EXPECT_FALSE(second.ready());
  { const Pending third = std::move(second); }
  EXPECT_EQ(waits, 1);
}

TEST(Pending, AssigningOverOneWaitsForItFirst) {
  std::string order;
  Pending pending([&] { order += "a"; }, {});
  pending = Pending([&] { order += "b"; }, {});
  EXPECT_EQ(order, "a");
  auto& same = pending;
  pending = std::move(same);
  EXPECT_EQ(order, "a");
  pending.wait();
  EXPECT_EQ(order, "ab");
}

TEST(Pending, ThrowsFromWaitAndOnlyWarnsFromTheDestructor) {
  Pending pending([] { throw std::runtime_error("peer lost"); }, {});
  EXPECT_THROW(pending.wait(), std::runtime_error);
  EXPECT_NO_THROW(pending.wait());
  EXPECT_NO_THROW({ const Pending dropped([] { throw std::runtime_error("peer lost"); }, {}); });
}

}  // namespace
}  // namespace dmuon
