// Communicators that share memory change where bytes lie and what dtype gradients travel in, and nothing else.
#include "runtime/shared_memory.h"

#include <gtest/gtest.h>

#include "comm/thread_ranks.h"
#include "dmuon/thread_communicator.h"
#include "runtime/trainer.h"

namespace dmuon {
namespace {

const Route kAll{0, 1, 2};

void expect_same_as_without(TrainSetup setup, const Body& body) {
  const auto apart = train_on_threads(setup, 3, body);
  setup.shares = true;
  expect_same_bits(train_on_threads(setup, 3, body), apart);
}

void branches(Trainer& trainer, int step) {
  trainer.backward(trainer.loss(trainer.rank() == step % 2 ? Route{0, 2} : Route{1}));
}

// In Z2 a backward under no_sync communicates nothing, so a rank may leave it out.
void left_out_by_one_rank(Trainer& trainer, int) {
  trainer.set_sync(false);
  const auto loss = trainer.loss(kAll, 0);
  if (trainer.rank() != 1) trainer.backward(loss);
  trainer.set_sync(true);
  trainer.backward(trainer.loss(kAll, 1));
}

TEST(SharedMemory, GivesTheSameBits) {
  for (const auto dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16), std::optional(at::kHalf)}) {
    for (const bool reshard : {true, false}) {
      for (const int replicas : {1, 2}) {
        SCOPED_TRACE(c10::str(dtype ? at::toString(*dtype) : "Float", reshard ? " Z3 " : " Z2 ", replicas));
        TrainSetup setup;
        setup.ranks = replicas * 3;
        setup.replicas = replicas;
        setup.param_dtype = dtype;
        setup.reshard_after_forward = reshard;
        expect_same_as_without(setup, [](Trainer& trainer, int) { trainer.backward(trainer.loss(kAll)); });
        expect_same_as_without(setup, branches);
      }
    }
  }
}

TEST(SharedMemory, SendsWhatNoSyncKeptBackInTheReduceDtype) {
  TrainSetup setup;
  setup.ranks = 3;
  setup.param_dtype = at::kBFloat16;
  setup.reshard_after_forward = false;
  expect_same_as_without(setup, left_out_by_one_rank);
  const auto keeps_back = [](Trainer& trainer, int) {
    trainer.set_sync(false);
    trainer.backward(trainer.loss(kAll, 0));
    trainer.set_sync(true);
    trainer.backward(trainer.loss(kAll, 1));
    trainer.backward(trainer.loss(kAll, 2));
  };
  expect_same_as_without(setup, keeps_back);
  setup.shares = true;
  const std::int64_t elements = setup.shape.blocks * 2 * setup.shape.width * setup.shape.hidden;
  for (const auto& step : train_on_threads(setup, 2, keeps_back).traffic) {
    EXPECT_EQ(step.reduce_bytes, (setup.ranks - 1) * elements * (4 + 2)) << "the sums wide, and the next as they come";
  }
}

// Of a runtime on one rank of `ranks`, all of whose weights are full of the rank's number.
struct Rank {
  Rank(const std::shared_ptr<ThreadWorld>& gathers, const std::shared_ptr<ThreadWorld>& sums, int rank)
      : gather(make_thread_communicator(gathers, rank, true)),
        first(at::full({6, 4}, rank + 1.0F).requires_grad_()),
        second(at::full({4, 10}, rank + 11.0F).requires_grad_()),
        runtime(dedicate({{"a", {{"a.weight", first}}}, {"b", {{"b.weight", second}}}},
                         {gather, make_thread_communicator(sums, rank, true), nullptr})) {}
  CommunicatorPtr gather;
  at::Tensor first, second;
  RuntimePtr runtime;
};

TEST(SharedMemory, BuffersMadeAgainKeepTheValuesAndThePlaces) {
  const auto gathers = make_thread_world(2, std::chrono::seconds(10));
  const auto sums = make_thread_world(2, std::chrono::seconds(10));
  on_threads(2, [&](int index) {
    Rank rank(gathers, sums, index);
    auto& runtime = *rank.runtime;
    runtime.materialize();
    const auto owned = [&](int matrix) { return runtime.params()[static_cast<size_t>(matrix)]->is_owner(); };
    std::vector<const void*> before;
    for (const auto& param : runtime.params()) {
      before.push_back(param->is_owner() ? param->registered().data_ptr() : nullptr);
    }
    const auto live = runtime.live_bytes();
    auto replaced =
        owned(0) ? at::full({6, 4}, 7.0F) : at::empty({6, 4}, at::TensorOptions(at::kMeta).dtype(at::kFloat));
    runtime.rebind(0, replaced.requires_grad_());
    runtime.begin_forward();
    static_cast<void>(runtime.pre_forward(0, {}));
    static_cast<void>(runtime.pre_forward(1, {}));
    EXPECT_TRUE(rank.first.eq(7.0F).all().item<bool>());
    EXPECT_TRUE(rank.second.eq(11.0F).all().item<bool>());
    for (size_t i = 0; i < before.size(); ++i) {
      const auto& registered = runtime.params()[i]->registered();
      EXPECT_EQ(owned(static_cast<int>(i)) ? registered.data_ptr() : nullptr, before[i]);
    }
    runtime.post_forward(1, {});
    runtime.post_forward(0, {});
    runtime.end_forward({});
    for (const auto& group : runtime.groups()) group->release();
    EXPECT_EQ(runtime.live_bytes(), live);
  });
}

TEST(SharedMemory, WhatIsSavedIsOneSegmentAndNotAllOfIt) {
  const auto memory = at::arange(64, at::kByte);
  const auto view = view_shared(memory, 16, 4, at::kFloat);
  EXPECT_EQ(view.storage().nbytes(), 16U);
  EXPECT_EQ(view.data_ptr(), static_cast<std::uint8_t*>(memory.data_ptr()) + 16);
  EXPECT_THROW((void)view_shared(memory, 56, 4, at::kFloat), std::exception);
}

TEST(SharedMemory, ASecondRuntimeOverTheSameCommunicatorsDoesWithout) {
  const auto gathers = make_thread_world(2, std::chrono::seconds(10));
  on_threads(2, [&](int index) {
    const auto communicator = make_thread_communicator(gathers, index, true);
    for (int runtime = 0; runtime < 2; ++runtime) {
      const auto weight = at::full({4, 4}, index + 1.0F).requires_grad_();
      const auto made = dedicate({{"a", {{"a.weight", weight}}}}, {communicator, communicator, nullptr});
      EXPECT_EQ(made->outgoing_bytes() > 0, runtime == 0);
      made->begin_forward();
      static_cast<void>(made->pre_forward(0, {}));
      EXPECT_TRUE(weight.eq(1.0F).all().item<bool>());
      made->post_forward(0, {});
      made->end_forward({});
    }
  });
}

}  // namespace
}  // namespace dmuon
