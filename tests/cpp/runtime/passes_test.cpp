// Training loops that are not one forward and one backward over all modules: each must not hang and must train exactly
// as one process would.  Three steps, so that a gradient lost in one, or left over for the next, shows.
#include <gtest/gtest.h>

#include "runtime/trainer.h"

namespace dmuon {
namespace {

const Route kAll{0, 1, 2, 3};

void accumulate_with_sync(Trainer& trainer, int) {
  for (int micro = 0; micro < 3; ++micro) trainer.backward(trainer.loss(kAll, micro));
}

void accumulate_without_sync(Trainer& trainer, int) {
  for (int micro = 0; micro < 3; ++micro) {
    trainer.set_sync(micro == 2);
    trainer.backward(trainer.loss(kAll, micro));
  }
}

void accumulate_different_modules(Trainer& trainer, int) {
  const Route routes[] = {{0, 1 + trainer.rank() % 3}, {3, 1}, {1, 0}};
  for (int micro = 0; micro < 3; ++micro) {
    trainer.set_sync(micro == 2);
    trainer.backward(trainer.loss(routes[micro], micro));
  }
}

void unused_on_all_ranks(Trainer& trainer, int step) {
  trainer.backward(trainer.loss(step == 1 ? Route{} : Route{0, 3}));
}

void unused_on_one_rank(Trainer& trainer, int) {
  trainer.backward(trainer.loss(trainer.rank() == 1 ? Route{0, 2, 3} : kAll));
}

void used_by_one_rank(Trainer& trainer, int step) {
  trainer.backward(trainer.loss(trainer.rank() == step % 2 ? Route{3} : Route{1}));
}

void nothing_used_on_one_rank(Trainer& trainer, int) {
  trainer.backward(trainer.loss(trainer.rank() == 0 ? Route{} : kAll));
}

void different_orders(Trainer& trainer, int step) {
  const Route orders[] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}};
  trainer.backward(trainer.loss(orders[(trainer.rank() + step) % 4]));
}

void used_twice(Trainer& trainer, int) { trainer.backward(trainer.loss({0, 1, 1, 2, 3, 0})); }

void two_forwards_one_backward(Trainer& trainer, int) {
  const auto first = trainer.loss(kAll, 0);
  trainer.backward(first + 0.5 * trainer.loss({1, 2}, 1));
}

void two_forwards_two_backwards(Trainer& trainer, int) {
  const auto first = trainer.loss(kAll, 0);
  const auto second = trainer.loss({3, 0}, 1);
  trainer.backward(first);
  trainer.backward(second);
}

void retain_graph_twice(Trainer& trainer, int) {
  const auto loss = trainer.loss(kAll);
  trainer.backward(loss, true);
  trainer.backward(0.5 * loss, true);
  trainer.backward(0.25 * loss);
}

void evaluation_between(Trainer& trainer, int) {
  const auto loss = trainer.loss(kAll);
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(trainer.loss({2, 0}, 1).requires_grad());
  }
  trainer.backward(loss);
}

void discarded_forward(Trainer& trainer, int) {
  static_cast<void>(trainer.loss({0, 2}, 1));
  trainer.backward(trainer.loss(kAll));
}

void discarded_forward_with_its_graph_alive(Trainer& trainer, int) {
  const auto never = trainer.loss({0, 2}, 1);
  trainer.backward(trainer.loss(kAll));
}

void raises_in_forward(Trainer& trainer, int step) {
  if (step == 1) {
    EXPECT_THROW(static_cast<void>(trainer.loss({1, kRaiseInForward, 2}, 1)), std::runtime_error);
  }
  trainer.backward(trainer.loss(kAll));
}

void raises_in_forward_on_one_rank(Trainer& trainer, int step) {
  if (step == 1) {
    const bool raises = trainer.rank() == 1;
    try {
      static_cast<void>(trainer.loss(raises ? Route{1, kRaiseInForward, 2} : kAll, 1));
      EXPECT_FALSE(raises);
    } catch (const std::runtime_error&) {
      EXPECT_TRUE(raises);
    }
  }
  trainer.backward(trainer.loss(kAll));
}

void raises_in_backward(Trainer& trainer, int step) {
  if (step == 1) {
    const auto loss = trainer.loss({0, 1, kRaiseInBackward, 2, 3}, 1);
    EXPECT_THROW(trainer.backward(loss), std::exception);
    trainer.discard_gradients();
  }
  trainer.backward(trainer.loss(kAll));
}

// Where the gradients of blocks 0 and 1 are there, but wait for those of 3 and 2.
void raises_in_a_backward_out_of_order(Trainer& trainer, int step) {
  if (step == 1) {
    const auto loss = trainer.loss({3, 2, kRaiseInBackward, 0, 1}, 1);
    EXPECT_THROW(trainer.backward(loss), std::exception);
    trainer.discard_gradients();
  }
  trainer.backward(trainer.loss(kAll));
}

void raises_in_an_accumulating_backward(Trainer& trainer, int step) {
  trainer.set_sync(false);
  trainer.backward(trainer.loss(kAll, 2));
  if (step == 1) {
    const auto loss = trainer.loss({0, 1, 2, kRaiseInBackward, 3}, 1);
    EXPECT_THROW(trainer.backward(loss), std::exception);
    trainer.discard_gradients();
  }
  trainer.set_sync(true);
  trainer.backward(trainer.loss(kAll));
}

struct Loop {
  const char* name;
  void (*body)(Trainer&, int);
};

const Loop kLoops[] = {
    {"AccumulateWithSync", accumulate_with_sync},
    {"AccumulateWithoutSync", accumulate_without_sync},
    {"AccumulateDifferentModules", accumulate_different_modules},
    {"UnusedOnAllRanks", unused_on_all_ranks},
    {"UnusedOnOneRank", unused_on_one_rank},
    {"UsedByOneRank", used_by_one_rank},
    {"NothingUsedOnOneRank", nothing_used_on_one_rank},
    {"DifferentOrders", different_orders},
    {"UsedTwice", used_twice},
    {"TwoForwardsOneBackward", two_forwards_one_backward},
    {"TwoForwardsTwoBackwards", two_forwards_two_backwards},
    {"RetainGraphTwice", retain_graph_twice},
    {"EvaluationBetween", evaluation_between},
    {"DiscardedForward", discarded_forward},
    {"DiscardedForwardWithItsGraphAlive", discarded_forward_with_its_graph_alive},
    {"RaisesInForward", raises_in_forward},
    {"RaisesInForwardOnOneRank", raises_in_forward_on_one_rank},
    {"RaisesInBackward", raises_in_backward},
    {"RaisesInABackwardOutOfOrder", raises_in_a_backward_out_of_order},
    {"RaisesInAnAccumulatingBackward", raises_in_an_accumulating_backward},
};

class Passes : public ::testing::TestWithParam<Loop> {};

TEST_P(Passes, TrainAsOneProcessWould) {
  for (const int ranks : {1, 3}) {
    for (const bool reshard : {true, false}) {
      for (const bool nested : {false, true}) {
        SCOPED_TRACE(c10::str(ranks, " ranks, ", reshard ? "Z3" : "Z2", nested ? ", nested, shared memory" : ""));
        TrainSetup setup;
        setup.ranks = ranks;
        setup.shares = nested;
        setup.reshard_after_forward = reshard;
        setup.shape.blocks = 4;
        setup.shape.nested = nested;
        expect_parity(setup, 3, GetParam().body);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Loops, Passes, ::testing::ValuesIn(kLoops),
                         [](const auto& loop) { return std::string(loop.param.name); });

void plain(Trainer& trainer, int) { trainer.backward(trainer.loss(kAll)); }

TEST(PassesWith, FrozenMatrices) {
  TrainSetup setup;
  setup.ranks = 3;
  setup.shape.blocks = 4;
  setup.shape.frozen = {"blocks.1.up", "blocks.2.up", "blocks.2.down"};  // one of a group, and a whole group
  expect_parity(setup, 3, plain);
}

TEST(PassesWith, AnInputThatNeedsNoGradient) {
  for (const bool reshard : {true, false}) {
    TrainSetup setup;
    setup.ranks = 3;
    setup.reshard_after_forward = reshard;
    setup.shape.blocks = 4;
    setup.shape.trains_embedding = false;
    expect_parity(setup, 3, plain);
    expect_parity(setup, 3, different_orders);
    expect_parity(setup, 3, accumulate_different_modules);
  }
}

// Z3 frees a group after each use, so ranks may differ in how often they use one only where it is kept.
TEST(PassesWith, AModuleUsedTwiceOnSomeRanksWhereItIsKept) {
  TrainSetup setup;
  setup.ranks = 3;
  const auto some_twice = [](Trainer& trainer, int step) {
    if (trainer.runtime()) trainer.runtime()->set_reshard_after_forward(false, 1);
    trainer.backward(trainer.loss(trainer.rank() == step ? Route{2, 1, 0, 1} : Route{0, 2}));
  };
  expect_parity(setup, 3, some_twice);
  setup.reshard_after_forward = false;
  expect_parity(setup, 3, some_twice);
}

TEST(PassesWith, GraphsOfGraphsRefused) {
  TrainSetup setup;
  EXPECT_THROW(static_cast<void>(train_on_threads(
                   setup, 1,
                   [](Trainer& trainer, int) { trainer.loss({0}).backward({}, std::nullopt, /*create_graph=*/true); })),
               std::runtime_error);
}

}  // namespace
}  // namespace dmuon
