#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/thread_ranks.h"
#include "dmuon/checkpoint.h"
#include "dmuon/thread_communicator.h"

namespace dmuon {
namespace {

using ::testing::Each;
using ::testing::Eq;
using ::testing::HasSubstr;

const std::vector<StateEntry> kExpected{{"a", {2, 3}, ""}, {"b", {4}, "whole"}};

TEST(StateProblem, NamesWhatIsWrong) {
  EXPECT_THAT(state_problem(kExpected, {{"b", {4}, "whole"}, {"a", {2, 3}, "any"}}, true), Eq(""));
  EXPECT_THAT(state_problem(kExpected, {{"a", {3, 2}, ""}, {"b", {4}, "whole"}}, false),
              HasSubstr("wrong shapes: 'a' is [3, 2], expected [2, 3]"));
  EXPECT_THAT(state_problem(kExpected, {{"a", {2, 3}, ""}, {"b", {4}, "cut"}}, false),
              HasSubstr("other shardings: 'b' is cut, expected whole"));
  const std::vector<StateEntry> other{{"a", {2, 3}, ""}, {"c", {}, ""}};
  EXPECT_THAT(state_problem(kExpected, other, true), HasSubstr("missing keys: 'b'. unexpected keys: 'c'."));
  EXPECT_THAT(state_problem(kExpected, other, false), Eq(""));
}

TEST(StateProblem, ShowsTenNames) {
  std::vector<StateEntry> many;
  for (int i = 0; i < 14; ++i) many.push_back({c10::str("key", i), {1}, ""});
  EXPECT_THAT(state_problem(many, {}, true), HasSubstr("'key9' and 4 more"));
}

std::vector<std::string> agree(const std::function<std::string(int)>& problem,
                               const std::function<std::vector<StateEntry>(int)>& given) {
  const auto world = make_thread_world(3, std::chrono::seconds(10));
  return errors_on_threads(3, [&](int rank) {
    const CheckpointAxes axes{make_thread_communicator(world, rank), nullptr};
    agree_on_state(axes, "load", problem(rank), describe_state(given(rank)));
  });
}

TEST(AgreeOnState, AllRanksThrowOrNone) {
  const auto same = [](int) { return kExpected; };
  EXPECT_THAT(agree([](int) { return ""; }, same), Each(Eq("")));
  EXPECT_THAT(agree([](int rank) { return rank == 1 ? "bad key 'x'" : ""; }, same), Each(HasSubstr("bad key 'x'")));
  const auto reversed = [](int rank) {
    return rank == 2 ? std::vector<StateEntry>{kExpected[1], kExpected[0]} : kExpected;
  };
  EXPECT_THAT(agree([](int) { return ""; }, reversed), Each(Eq(""))) << "the order of keys means nothing";
  const auto shorter = [](int rank) { return rank == 2 ? std::vector<StateEntry>{kExpected[0]} : kExpected; };
  EXPECT_THAT(agree([](int) { return ""; }, shorter), Each(HasSubstr("ranks 0 and 2 were given different states")));
}

TEST(GroupsProblem, ComparesKindsSizesAndVersions) {
  const std::vector<OptimizerGroup> groups{{true, 3}, {false, 2}};
  EXPECT_THAT(groups_problem(groups, groups), Eq(""));
  EXPECT_THAT(groups_problem(groups, {{true, 3}}), HasSubstr("Muon of 3 AdamW of 2; the state has Muon of 3"));
  EXPECT_THAT(groups_problem(groups, {{false, 3}, {false, 2}}), HasSubstr("use dmuon.import_state"));
  EXPECT_THAT(groups_problem(groups, {{true, 3, kCheckpointVersion + 1}, {false, 2}}), HasSubstr("format version 2"));
}

}  // namespace
}  // namespace dmuon
