// Matrices of real models, for tests and benchmarks: names, shapes and layer keys as the predicate selects them.
#pragma once

#include <string>
#include <vector>

#include "dmuon/plan.h"

namespace dmuon::plan {

struct ModelShapes {
  std::string name;
  std::vector<Matrix> matrices;
};

[[nodiscard]] ModelShapes gpt2_small();
[[nodiscard]] ModelShapes llama3_8b();
[[nodiscard]] ModelShapes llama3_70b();
/// Mixture of experts: 48 layers of 128 experts, three matrices each.
[[nodiscard]] ModelShapes qwen3_30b_a3b();
/// Vision tower (27 layers), language model (18) and action head (18).
[[nodiscard]] ModelShapes vision_language_action();

[[nodiscard]] std::vector<ModelShapes> all_models();

}  // namespace dmuon::plan
