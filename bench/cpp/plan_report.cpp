// Prints, for real models and meshes, how even the plan is: max/mean beside the smallest value that any assignment of
// the same units can have, with small matrices merged (the default) and without.
#include <cstdio>
#include <string>
#include <vector>

#include "dmuon/plan.h"
#include "plan/model_shapes.h"

namespace {

using dmuon::plan::MeshShape;
using dmuon::plan::Plan;

const std::vector<MeshShape> kMeshes = {{1, 1},   {2, 1},  {8, 1},    {64, 1}, {8, 8},
                                        {256, 1}, {32, 8}, {1024, 1}, {64, 16}};

double bound_over_mean(const Plan& plan) {
  double total = 0.0;
  for (const auto& load : plan.loads) total += load.cost_seconds;
  return plan.lower_bound_seconds * static_cast<double>(plan.loads.size()) / total;
}

void print_model(const dmuon::plan::ModelShapes& model) {
  std::printf("%s: %zu matrices\n", model.name.c_str(), model.matrices.size());
  std::printf("      mesh   max/mean   bound   max/mean*  bound*  note\n");
  for (const MeshShape mesh : kMeshes) {
    const Plan merged = compute_balanced_assignment(model.matrices, mesh);
    const Plan single = compute_balanced_assignment(model.matrices, mesh, {.small_matrix_threshold = 0});
    std::printf("%5d x %-4d %7.3f %8.3f %10.3f %8.3f  %s\n", mesh.shard, mesh.replicate, merged.imbalance(),
                bound_over_mean(merged), single.imbalance(), bound_over_mean(single), merged.balance_note.c_str());
  }
  std::printf("\n");
}

}  // namespace

int main() {
  for (const auto& model : dmuon::plan::all_models()) print_model(model);
  std::printf("* small_matrix_threshold = 0: no merging\n\n");
  std::printf("Llama-3 8B on 8 slots:\n%s",
              compute_balanced_assignment(dmuon::plan::llama3_8b().matrices, {8, 1}).table().c_str());
  return 0;
}
