// Time of the planner.  Arguments: matrices, shard, replicate, and whether small matrices are merged.
#include <benchmark/benchmark.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/plan.h"
#include "plan/model_shapes.h"

namespace {

using dmuon::plan::Matrix;
using dmuon::plan::MeshShape;

std::vector<Matrix> random_matrices(int count) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int> side(1, 64);
  std::vector<Matrix> matrices;
  for (int i = 0; i < count; ++i) {
    const std::string layer = "model.layers." + std::to_string(i / 100);
    matrices.push_back({.name = layer + ".experts." + std::to_string(i % 100) + ".weight",
                        .rows = 128 * side(random),
                        .cols = 128 * side(random),
                        .layer = layer});
  }
  return matrices;
}

/// One matrix outweighs a slot, so that the local search runs to its limit.
std::vector<Matrix> dominated_matrices(int count) {
  std::vector<Matrix> matrices = random_matrices(count);
  for (std::size_t i = 0; i + 1 < matrices.size(); i += 50) matrices[i].rows = matrices[i].cols = 65536;
  return matrices;
}

void run(benchmark::State& state, const std::vector<Matrix>& matrices) {
  const MeshShape mesh{static_cast<int>(state.range(1)), static_cast<int>(state.range(2))};
  dmuon::plan::PlanOptions options;
  if (state.range(3) == 0) options.small_matrix_threshold = 0;
  double imbalance = 0.0;
  for (auto _ : state) {
    state.PauseTiming();
    std::vector<Matrix> input = matrices;
    state.ResumeTiming();
    const auto plan = compute_balanced_assignment(std::move(input), mesh, options);
    imbalance = plan.imbalance();
  }
  state.counters["max/mean"] = imbalance;
}

void BM_Random(benchmark::State& state) { run(state, random_matrices(static_cast<int>(state.range(0)))); }

void BM_Dominated(benchmark::State& state) { run(state, dominated_matrices(static_cast<int>(state.range(0)))); }

void BM_Qwen3Moe(benchmark::State& state) { run(state, dmuon::plan::qwen3_30b_a3b().matrices); }

}  // namespace

BENCHMARK(BM_Random)
    ->Unit(benchmark::kMillisecond)
    ->Args({100'000, 8, 1, 0})
    ->Args({100'000, 1024, 1, 0})
    ->Args({100'000, 64, 16, 0})
    ->Args({100'000, 1, 1024, 0})
    ->Args({100'000, 1024, 1, 1});
BENCHMARK(BM_Dominated)->Unit(benchmark::kMillisecond)->Args({100'000, 1024, 1, 0})->Args({100'000, 64, 16, 0});
BENCHMARK(BM_Qwen3Moe)->Unit(benchmark::kMillisecond)->Args({18'624, 64, 1, 0})->Args({18'624, 1024, 1, 1});
