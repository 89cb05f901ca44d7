#include <gtest/gtest.h>

#include <set>

#include "dmuon/plan.h"
#include "plan/test_inputs.h"

namespace dmuon::plan {
namespace {

Plan small_plan() {
  return compute_balanced_assignment({{"a", 4, 6, "layers.0"}, {"b", 6, 4, "layers.1"}}, {2, 2}, by_numel());
}

TEST(Fingerprint, ChangesWithEveryInput) {
  std::set<std::uint64_t> seen = {small_plan().fingerprint()};
  const auto is_new = [&](auto change) {
    Plan plan = small_plan();
    change(plan);
    return seen.insert(plan.fingerprint()).second;
  };
  EXPECT_TRUE(is_new([](Plan& p) { p.mesh.shard = 4; }));
  EXPECT_TRUE(is_new([](Plan& p) { p.mesh.replicate = 4; }));
  EXPECT_TRUE(is_new([](Plan& p) { p.matrices[1].name = "c"; }));
  EXPECT_TRUE(is_new([](Plan& p) { p.matrices[1].rows = 4; }));
  EXPECT_TRUE(is_new([](Plan& p) { p.matrices[1].cols = 6; }));
  EXPECT_TRUE(is_new([](Plan& p) { std::swap(p.matrices[1].rows, p.matrices[1].cols); }));
  EXPECT_TRUE(is_new([](Plan& p) { p.matrices[1].layer = "layers.0"; }));
  EXPECT_TRUE(is_new([](Plan& p) { p.matrices[1].kind = Kind::kElementwise; }));
  EXPECT_TRUE(is_new([](Plan& p) { p.owners[0].shard ^= 1; }));
  EXPECT_TRUE(is_new([](Plan& p) { p.owners[0].replicate ^= 1; }));
  EXPECT_TRUE(is_new([](Plan& p) { std::swap(p.matrices[0], p.matrices[1]); }));
}

TEST(Fingerprint, SeparatesNameFromLayer) {
  const auto value = [](const std::string& name, const std::string& layer) {
    return compute_balanced_assignment({flat(name, 8, layer)}, {1, 1}).fingerprint();
  };
  EXPECT_NE(value("ab", "c"), value("a", "bc"));
}

TEST(Fingerprint, IsTheSameOnEveryMachine) {
  // FNV-1a of mesh, count, and per matrix name, rows, cols, layer and owner, computed by an independent program.
  EXPECT_EQ(compute_balanced_assignment({{"w", 3, 5, "l"}}, {1, 1}).fingerprint(), 0xa23573fa0d77cd67ULL);
}

}  // namespace
}  // namespace dmuon::plan
