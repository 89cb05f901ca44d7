// Uses an installed dmuon from C++: the planner (no torch) and one call that needs torch.
#include <ATen/ATen.h>

#include <iostream>

#include "dmuon/newton_schulz.h"
#include "dmuon/plan.h"

int main() {
  const auto plan = dmuon::plan::compute_balanced_assignment({{"a", 64, 32, "0"}, {"b", 32, 64, "1"}}, {.shard = 2});
  std::cout << plan.table();

  const auto options = dmuon::make_ns_options("gram", 5, "polar_express");
  const auto orthogonal = dmuon::newton_schulz({at::eye(32) * 1e-3}, options).front();
  const auto distance = (orthogonal - at::eye(32)).abs().max().item<double>();
  std::cout << "newton_schulz: distance to the polar factor " << distance << "\n";
  return distance < 0.5 ? 0 : 1;
}
