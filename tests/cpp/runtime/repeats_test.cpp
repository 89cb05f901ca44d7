// Z3 and modules that run more than once in a forward: the first repeat needs every rank at the same place; from then
// on the module is kept until the forward ends, and ranks may differ.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/trainer.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TrainSetup make_setup(int ranks, int replicas = 1) {
  TrainSetup setup;
  setup.ranks = ranks;
  setup.replicas = replicas;
  setup.shape.blocks = 4;
  return setup;
}

// [ranks] routes of every step.
Body on_routes(std::vector<Route> routes) {
  return [routes = std::move(routes)](Trainer& trainer, int) {
    trainer.backward(trainer.loss(routes[static_cast<size_t>(trainer.rank())]));
  };
}

Body on_route(const Route& route) {
  return [route](Trainer& trainer, int) { trainer.backward(trainer.loss(route)); };
}

std::vector<std::int64_t> gathers_by_step(const TrainSetup& setup, int steps, const Body& body) {
  std::vector<std::int64_t> calls;
  for (const auto& step : train_on_threads(setup, steps, body).traffic) calls.push_back(step.broadcast_calls);
  return calls;
}

// What the ranks were told, by rank.
std::string error_of(TrainSetup setup, const Body& body) {
  setup.timeout = std::chrono::milliseconds(500);
  try {
    static_cast<void>(train_on_threads(setup, 1, body));
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::string on_rank(int rank, const std::string& module) {
  return c10::str("rank ", rank, ": [dmuon.runtime] module '", module, "' runs again");
}

TEST(Repeats, AreExactAndCostOneGatherOnce) {
  const Route twice{0, 1, 1, 2, 3};
  for (const auto& setup : {make_setup(2), make_setup(3), make_setup(4, 2)}) {
    SCOPED_TRACE(c10::str(setup.ranks, " ranks, ", setup.replicas, " replicas"));
    expect_parity(setup, 3, on_route(twice));
    const std::int64_t usual = 2 * setup.ranks * setup.shape.blocks;
    EXPECT_EQ(gathers_by_step(setup, 3, on_route(twice)), (std::vector{usual + setup.ranks, usual, usual}));
  }
}

TEST(Repeats, OfSeveralModulesCostOneGatherEach) {
  const Route route{0, 1, 0, 1, 3, 3, 0};
  const auto setup = make_setup(3);
  expect_parity(setup, 3, on_route(route));
  EXPECT_EQ(gathers_by_step(setup, 3, on_route(route)), (std::vector<std::int64_t>{33, 24, 24}));
}

TEST(Repeats, CostNothingInZ2) {
  auto setup = make_setup(3);
  setup.reshard_after_forward = false;
  EXPECT_EQ(gathers_by_step(setup, 2, on_route({0, 1, 1, 2, 3})), (std::vector<std::int64_t>{12, 12}));
}

TEST(Repeats, InsideAnotherHookModuleAreExact) {
  auto setup = make_setup(3);
  setup.shape.nested = true;
  expect_parity(setup, 3, on_route({0, 1, 1, 0, 2, 3, 2}));
}

TEST(Repeats, InAnEvaluationCountToo) {
  const auto setup = make_setup(3);
  const auto evaluate_first = [](Trainer& trainer, int) {
    {
      const at::NoGradGuard no_grad;
      static_cast<void>(trainer.loss({0, 1, 1, 2, 3}, 1));
    }
    trainer.backward(trainer.loss({0, 1, 1, 2, 3}));
  };
  expect_parity(setup, 3, evaluate_first);
  EXPECT_EQ(gathers_by_step(setup, 2, evaluate_first), (std::vector<std::int64_t>{39, 36}));
}

// Rank 1 takes another way to the same place in the order of gathers.
TEST(Repeats, AtTheSamePlaceOnDifferentRoutesAreExact) {
  expect_parity(make_setup(2), 3, on_routes({{0, 1, 1, 2, 3}, {1, 1, 0, 3}}));
}

TEST(Repeats, MayDifferAfterAnEvenOne) {
  const auto setup = make_setup(3);
  const auto even_at_first = [](Trainer& trainer, int step) {
    const Route later[] = {{0, 1, 2, 3}, {0, 1, 2, 1, 3, 1}, {2, 1, 1}};
    trainer.backward(trainer.loss(step == 0 ? Route{0, 1, 1, 2, 3} : later[(trainer.rank() + step) % 3]));
  };
  expect_parity(setup, 4, even_at_first);
  EXPECT_EQ(gathers_by_step(setup, 4, even_at_first), (std::vector<std::int64_t>{27, 24, 24, 24}));
}

TEST(Repeats, OnSomeRanksAtFirstNameTheModule) {
  const auto error = error_of(make_setup(3), on_routes({{0, 1, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 1, 2, 3}}));
  EXPECT_THAT(error, AllOf(HasSubstr(on_rank(0, "blocks.1")), HasSubstr("rank 1: "), HasSubstr(on_rank(2, "blocks.1")),
                           HasSubstr("set_reshard_after_forward(False)")));
}

TEST(Repeats, OfDifferentModulesAtFirstNameBoth) {
  const auto error = error_of(make_setup(2), on_routes({{0, 1, 1, 2, 3}, {1, 0, 0, 2, 3}}));
  EXPECT_THAT(error, AllOf(HasSubstr(on_rank(0, "blocks.1")), HasSubstr("rank 1 says ''blocks.0'"),
                           HasSubstr(on_rank(1, "blocks.0")), HasSubstr("rank 0 says ''blocks.1'")));
}

// Rank 1 repeats when it has issued more gathers: the extra one would take the place of another module's.
TEST(Repeats, AtDifferentPlacesNameTheModule) {
  const auto error = error_of(make_setup(2), on_routes({{0, 1, 1, 2, 3}, {0, 1, 2, 1, 3}}));
  EXPECT_THAT(error, AllOf(HasSubstr(on_rank(0, "blocks.1")), HasSubstr(on_rank(1, "blocks.1"))));
}

}  // namespace
}  // namespace dmuon
