// A small language model of libtorch modules whose every choice a test can make: which blocks run, in which order, how
// often, nested or not, and where something raises.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "dmuon/dedicate.h"

namespace dmuon {

/// Names of dedicated matrices: "blocks.K.up", "blocks.K.down", and with `nested` "outer.mix" and "outer.blocks.K.up",
/// "outer.blocks.K.down" for the first half of the blocks (rounded up).
struct ToyShape {
  int blocks = 3;
  std::int64_t width = 16;
  std::int64_t hidden = 24;
  bool nested = false;  ///< a hook module around the first half of the blocks, with a matrix used before and after them
  bool trains_embedding = true;  ///< false: the first block's input needs no gradient
  std::set<std::string> frozen;  ///< names of dedicated matrices
  at::ScalarType dtype = at::kFloat;
};

/// Blocks to run, by index, in order; repeats allowed.  Nested: those of the first half run first, inside "outer".
using Route = std::vector<int>;
/// In a route: block 0's forward raises in its middle; a gradient raises on its way back through this place.
inline constexpr int kRaiseInForward = -1;
inline constexpr int kRaiseInBackward = -2;

/// `group`: index of the hook module.
using Layer = std::function<at::Tensor(const at::Tensor&)>;
struct ModuleCalls {
  std::function<at::Tensor(const std::function<at::Tensor()>&)> root;
  std::function<at::Tensor(int group, const at::Tensor& input, const Layer& forward)> hooked;
};

class ToyModel {
 public:
  /// The same values for the same seed.
  ToyModel(const ToyShape& shape, std::uint64_t seed);
  ~ToyModel();

  /// Mean cross entropy of next-token prediction.  tokens: [batch, time + 1], int64.
  at::Tensor loss(const at::Tensor& tokens, const Route& route, const ModuleCalls& calls) const;

  [[nodiscard]] std::vector<HookModule> hook_modules() const;
  /// Embedding, norms and head: not dedicated.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> rest() const;

 private:
  struct Modules;
  at::Tensor run_block(int index, const at::Tensor& x, bool raises, const ModuleCalls& calls) const;
  at::Tensor run_route(const at::Tensor& x, const Route& route, const ModuleCalls& calls) const;
  at::Tensor logits(const at::Tensor& tokens, const Route& route, const ModuleCalls& calls) const;
  [[nodiscard]] bool is_inside(int block) const { return shape_.nested && block < (shape_.blocks + 1) / 2; }
  [[nodiscard]] std::string block_name(int block) const;

  ToyShape shape_;
  std::unique_ptr<Modules> modules_;
};

}  // namespace dmuon
