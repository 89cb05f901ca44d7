#include "runtime/toy_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>

namespace dmuon {
namespace {

constexpr std::int64_t kVocabulary = 32;

struct Block {
  torch::nn::LayerNorm norm;
  torch::nn::Linear up;
  torch::nn::Linear down;

  // Weights take the dtype of the data, as mixed precision wants; no-op when they have it.
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, bool raises) const {
    const auto dtype = x.scalar_type();
    const auto normed = at::layer_norm(x, {x.size(-1)}, norm->weight.to(dtype));
    const auto middle = at::gelu(at::linear(normed, up->weight.to(dtype)));
    if (raises) throw std::runtime_error("raised in forward");
    return x + at::linear(middle, down->weight.to(dtype));
  }
};

torch::nn::Linear linear(std::int64_t in, std::int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

void fill(at::Tensor weight, at::Generator& generator, at::ScalarType dtype, bool trains) {
  const at::NoGradGuard no_grad;
  const double scale = 1.0 / std::sqrt(static_cast<double>(weight.size(-1)));
  const auto values = at::randn(weight.sizes(), generator, at::TensorOptions(at::kDouble)) * scale;
  weight.set_data(values.to(dtype));
  weight.set_requires_grad(trains);
}

}  // namespace

struct ToyModel::Modules {
  torch::nn::Embedding embedding{kVocabulary, 1};
  std::vector<Block> blocks;
  torch::nn::Linear mix{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};

ToyModel::ToyModel(const ToyShape& shape, std::uint64_t seed) : shape_(shape), modules_(std::make_unique<Modules>()) {
  const auto norm = [&] {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width}).elementwise_affine(true));
  };
  modules_->embedding = torch::nn::Embedding(kVocabulary, shape.width);
  for (int i = 0; i < shape.blocks; ++i) {
    modules_->blocks.push_back({norm(), linear(shape.width, shape.hidden), linear(shape.hidden, shape.width)});
  }
  modules_->mix = linear(shape.width, shape.width);
  modules_->norm = norm();
  modules_->head = linear(shape.width, kVocabulary);

  auto generator = at::detail::createCPUGenerator(seed);
  for (const auto& [name, weight] : rest()) {
    fill(weight, generator, shape.dtype, shape.trains_embedding || name != "embedding");
  }
  for (const auto& module : hook_modules()) {
    for (const auto& [name, weight] : module.matrices) fill(weight, generator, shape.dtype, !shape.frozen.count(name));
  }
}

ToyModel::~ToyModel() = default;

std::string ToyModel::block_name(int block) const {
  return (is_inside(block) ? "outer.blocks." : "blocks.") + std::to_string(block);
}

std::vector<HookModule> ToyModel::hook_modules() const {
  std::vector<HookModule> result;
  if (shape_.nested) result.push_back({"outer", {{"outer.mix", modules_->mix->weight}}});
  for (int i = 0; i < shape_.blocks; ++i) {
    const auto& block = modules_->blocks[static_cast<size_t>(i)];
    const auto name = block_name(i);
    result.push_back({name, {{name + ".up", block.up->weight}, {name + ".down", block.down->weight}}});
  }
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> ToyModel::rest() const {
  std::vector<std::pair<std::string, at::Tensor>> result{
      {"embedding", modules_->embedding->weight}, {"norm", modules_->norm->weight}, {"head", modules_->head->weight}};
  for (int i = 0; i < shape_.blocks; ++i) {
    result.emplace_back(block_name(i) + ".norm", modules_->blocks[static_cast<size_t>(i)].norm->weight);
  }
  return result;
}

at::Tensor ToyModel::run_block(int index, const at::Tensor& x, bool raises, const ModuleCalls& calls) const {
  const auto& block = modules_->blocks[static_cast<size_t>(index)];
  return calls.hooked(index + (shape_.nested ? 1 : 0), x,
                      [&](const at::Tensor& input) { return block.forward(input, raises); });
}

at::Tensor ToyModel::run_route(const at::Tensor& x, const Route& route, const ModuleCalls& calls) const {
  auto y = x;
  for (const int item : route) {
    if (item == kRaiseInBackward) {
      y = y.clone();
      y.register_hook([](const at::Tensor&) { throw std::runtime_error("raised in backward"); });
    } else {
      y = run_block(std::max(item, 0), y, item == kRaiseInForward, calls);
    }
  }
  return y;
}

at::Tensor ToyModel::logits(const at::Tensor& tokens, const Route& route, const ModuleCalls& calls) const {
  auto x = at::embedding(modules_->embedding->weight, tokens);
  Route inside;
  Route outside;
  for (const int item : route) (is_inside(std::max(item, 0)) ? inside : outside).push_back(item);
  if (!inside.empty()) {
    x = calls.hooked(0, x, [&](const at::Tensor& input) {
      const auto weight = modules_->mix->weight.to(input.scalar_type());
      return input + at::linear(run_route(at::linear(input, weight), inside, calls), weight);
    });
  }
  x = run_route(x, outside, calls).to(shape_.dtype);
  return at::linear(at::layer_norm(x, {shape_.width}, modules_->norm->weight), modules_->head->weight);
}

at::Tensor ToyModel::loss(const at::Tensor& tokens, const Route& route, const ModuleCalls& calls) const {
  const auto inputs = tokens.narrow(1, 0, tokens.size(1) - 1);
  const auto targets = tokens.narrow(1, 1, tokens.size(1) - 1);
  const auto output = calls.root([&] { return logits(inputs, route, calls); });
  return at::cross_entropy_loss(output.reshape({-1, kVocabulary}), targets.reshape({-1}));
}

}  // namespace dmuon
