#include "dmuon/pending.h"

#include <gtest/gtest.h>

namespace dmuon {
namespace {

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
