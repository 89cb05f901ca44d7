#include "dmuon/dedicate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "comm/thread_ranks.h"
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
    agree_on_inputs({make_thread_communicator(world, rank).get()}, input.error, plan::describe_inputs(input.matrices));
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

// What every rank is told by dedicate.
std::vector<std::string> dedicate_errors(int ranks, const std::function<std::vector<HookModule>(int rank)>& modules) {
  const auto world = make_thread_world(ranks, std::chrono::seconds(10));
  return errors_on_threads(ranks, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    (void)dedicate(modules(rank), {communicator, communicator});
  });
}

at::Tensor weight(std::int64_t rows, std::int64_t cols) { return at::ones({rows, cols}).set_requires_grad(true); }

TEST(Dedicate, RefusesOnEveryRankWhatCannotBeDedicated) {
  const auto with = [](const at::Tensor& bad) {
    return dedicate_errors(2, [&](int rank) -> std::vector<HookModule> {
      return {{"m", {{"m.good", weight(4, 4)}, {"m.bad", rank == 1 ? bad : weight(4, 4)}}}};
    });
  };
  EXPECT_THAT(with(weight(4, 4)), Each(""));
  EXPECT_THAT(with(at::ones({4})), Each(AllOf(HasSubstr("rank 1: parameter 'm.bad'"), HasSubstr("[4]"))));
  EXPECT_THAT(with(at::ones({4, 4}, at::kLong)), Each(AllOf(HasSubstr("'m.bad'"), HasSubstr("Long"))));
  EXPECT_THAT(with(weight(4, 4) * 2), Each(AllOf(HasSubstr("'m.bad'"), HasSubstr("non-leaf"))));
  EXPECT_THAT(with(at::Tensor()), Each(HasSubstr("'m.bad' is undefined")));
  EXPECT_THAT(with(weight(4, 8)), Each(HasSubstr("'m.bad'")));
}

TEST(Dedicate, TakesElementwiseParametersOfAnyShape) {
  const auto with = [](const at::Tensor& other) {
    return dedicate_errors(2, [&](int) -> std::vector<HookModule> {
      return {{"m", {{"m.w", weight(4, 4)}}, {{"m.other", other}}}};
    });
  };
  EXPECT_THAT(with(at::ones({5})), Each(""));
  EXPECT_THAT(with(at::ones({1, 3, 2})), Each(""));
  EXPECT_THAT(with(at::ones({})), Each(AllOf(HasSubstr("'m.other'"), HasSubstr("at least one dimension"))));
  EXPECT_THAT(with(at::ones({0, 3})), Each(HasSubstr("'m.other'")));
  EXPECT_THAT(with(at::ones({3}, at::kLong)), Each(HasSubstr("'m.other'")));
}

TEST(Dedicate, RefusesAnEmptyListAndDuplicateNames) {
  EXPECT_THAT(dedicate_errors(2, [](int) { return std::vector<HookModule>{}; }), Each(HasSubstr("[dmuon")));
  EXPECT_THAT(dedicate_errors(2,
                              [](int) -> std::vector<HookModule> {
                                return {{"m", {{"m.w", weight(4, 4)}, {"m.w", weight(4, 4)}}}};
                              }),
              Each(HasSubstr("'m.w'")));
  EXPECT_THAT(dedicate_errors(1,
                              [](int) -> std::vector<HookModule> {
                                return {{"empty", {}}, {"m", {{"m.w", weight(4, 4)}}}};
                              }),
              Each(HasSubstr("'empty' has no matrix")));
}

TEST(Dedicate, GivesEveryMatrixOneOwnerThatHoldsRankZerosValues) {
  const auto world = make_thread_world(3, std::chrono::seconds(10));
  std::vector<int> owners(4);
  std::mutex mutex;
  on_threads(3, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    std::vector<HookModule> modules;
    for (int i = 0; i < 4; ++i) {
      const auto name = std::to_string(i);
      modules.push_back({name, {{name + ".w", at::full({8, 8}, 10 * rank + i, at::kFloat).set_requires_grad(i != 2)}}});
    }
    DedicateOptions options;
    options.runtime.reshard_after_forward = false;
    const auto runtime = dedicate(modules, {communicator, communicator}, options);
    runtime->materialize();
    runtime->check_invariants();
    for (int i = 0; i < 4; ++i) {
      const auto& param = *runtime->params()[static_cast<size_t>(i)];
      EXPECT_EQ(param.registered().requires_grad(), i != 2);
      EXPECT_EQ(param.owned_data().defined(), param.is_owner());
      EXPECT_TRUE(param.unsharded().is_same(modules[static_cast<size_t>(i)].matrices[0].second));
      if (!param.is_owner()) continue;
      EXPECT_TRUE(param.registered().eq(i).all().item<bool>());
      const std::lock_guard<std::mutex> lock(mutex);
      ++owners[static_cast<size_t>(i)];
    }
  });
  EXPECT_THAT(owners, Each(1));
}

// Gradients of every shape arrive whole, as the mean over the ranks.
TEST(Dedicate, ReducesElementwiseParametersToTheirOwners) {
  const auto world = make_thread_world(3, std::chrono::seconds(10));
  const auto reduce_world = make_thread_world(3, std::chrono::seconds(10));
  on_threads(3, [&](int rank) {
    const auto bias = at::ones({5}).set_requires_grad(true);
    const auto scale = at::arange(6, at::kFloat).view({1, 3, 2}).set_requires_grad(true);
    const auto w = weight(2, 2);
    const auto runtime =
        dedicate({{"m", {{"m.w", w}}, {{"m.bias", bias}, {"m.scale", scale}}}},
                 {make_thread_communicator(world, rank), make_thread_communicator(reduce_world, rank)});
    const auto loss = call_root(*runtime, [&] {
      return call_module(*runtime, 0, at::full({1}, rank + 1.0F).set_requires_grad(true), [&](const at::Tensor& x) {
        return (x * (bias.sum() + scale.square().sum() + w.sum())).sum();
      });
    });
    EXPECT_EQ(loss.item<float>(), static_cast<float>(rank + 1) * (5 + 55 + 4));
    loss.backward();
    runtime->check_invariants();
    for (const auto& param : runtime->params()) {
      if (!param->is_owner()) continue;
      const auto grad = param->reduced_grad();
      ASSERT_EQ(grad.sizes(), param->registered().sizes());
      const auto expected =
          param->name() == "m.scale" ? at::arange(6, at::kFloat).view({1, 3, 2}) * 4 : at::full_like(grad, 2);
      EXPECT_TRUE(at::allclose(grad, expected)) << param->name();
    }
  });
}

// A step, a load, or `p.data = other`: whatever changed a master, the next forward computes with it.
TEST(Dedicate, AForwardComputesWithTheMastersAsTheyAre) {
  const auto world = make_thread_world(2, std::chrono::seconds(10));
  on_threads(2, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    const auto w = weight(2, 2);
    const auto runtime = dedicate({{"m", {{"m.w", w}}}}, {communicator, communicator});
    const auto compute = [&] {
      const at::NoGradGuard no_grad;
      return call_root(*runtime, [&] {
        return call_module(*runtime, 0, at::ones({1}), [&](const at::Tensor& x) { return x * w.sum(); });
      });
    };
    EXPECT_EQ(compute().item<float>(), 4.0F);
    const auto& master = runtime->params()[0];
    if (master->is_owner()) master->registered().variable_data().fill_(2.0F);
    EXPECT_EQ(compute().item<float>(), 8.0F);
    if (master->is_owner()) at::Tensor(master->registered()).set_data(at::full({2, 2}, 3.0F));
    EXPECT_EQ(compute().item<float>(), 12.0F);
    if (master->is_owner()) master->registered().variable_data().fill_(4.0F);
    EXPECT_EQ(compute().item<float>(), 16.0F);
    EXPECT_EQ(runtime->groups()[0]->state(), GroupState::kSharded);
  });
}

TEST(AverageGradients, TakesTheMeanAndCountsAMissingOneAsZeros) {
  const auto world = make_thread_world(3, std::chrono::seconds(10));
  on_threads(3, [&](int rank) {
    const auto communicator = make_thread_communicator(world, rank);
    const auto used = weight(2, 3);
    const auto unused = weight(2, 2);
    if (rank != 1) used.mutable_grad() = at::full({2, 3}, 3.0F * static_cast<float>(rank + 1));
    average_gradients(*communicator, {used, unused});
    EXPECT_TRUE(used.grad().eq(4.0F).all().item<bool>());
    EXPECT_TRUE(unused.grad().eq(0.0F).all().item<bool>());
  });
}

}  // namespace
}  // namespace dmuon
