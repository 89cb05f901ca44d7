// A small byte-level GPT of libtorch modules.  Where dedicated ownership shows: the two brackets in Gpt::forward.
#pragma once

#include <torch/nn.h>

#include <cmath>
#include <vector>

#include "dmuon/dedicate.h"

struct GptConfig {
  std::int64_t layers = 4;
  std::int64_t dim = 128;
  std::int64_t heads = 4;
  std::int64_t seq = 128;
};

inline torch::nn::Linear linear(std::int64_t in, std::int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

inline torch::nn::LayerNorm norm(std::int64_t dim) { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim})); }

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(const GptConfig& config) : heads(config.heads) {
    register_module("attention_norm", attention_norm = norm(config.dim));
    register_module("qkv", qkv = linear(config.dim, 3 * config.dim));
    register_module("out", out = linear(config.dim, config.dim));
    register_module("mlp_norm", mlp_norm = norm(config.dim));
    register_module("up", up = linear(config.dim, 4 * config.dim));
    register_module("down", down = linear(4 * config.dim, config.dim));
  }

  /// x: [batch, seq, dim].
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = qkv(attention_norm(x)).unflatten(-1, {3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    const auto attended = x + out(y.transpose(1, 2).flatten(2));
    return attended + down(torch::gelu(up(mlp_norm(attended))));
  }

  std::int64_t heads;
  torch::nn::LayerNorm attention_norm{nullptr}, mlp_norm{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Layer);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptConfig& config) {
    register_module("embedding", embedding = torch::nn::Embedding(256, config.dim));
    register_module("position", position = torch::nn::Embedding(config.seq, config.dim));
    for (std::int64_t i = 0; i < config.layers; ++i) {
      layers.push_back(register_module("layers" + std::to_string(i), Layer(config)));
    }
    register_module("norm", final_norm = norm(config.dim));
    register_module("head", head = linear(config.dim, 256));
    const torch::NoGradGuard no_grad;
    for (const auto& item : named_parameters()) {  // as GPT-2 does
      const bool residual = item.key().ends_with("out.weight") || item.key().ends_with("down.weight");
      const double scale = residual ? 1.0 / std::sqrt(2.0 * static_cast<double>(config.layers)) : 1.0;
      if (item.value().dim() == 2) torch::Tensor(item.value()).normal_(0.0, 0.02 * scale);
    }
  }

  /// The matrices inside layers: dedicated.  Layer i is group i of the runtime.
  std::vector<dmuon::HookModule> hook_modules() const {
    std::vector<dmuon::HookModule> modules;
    for (size_t i = 0; i < layers.size(); ++i) {
      auto& module = modules.emplace_back();
      module.name = "layers" + std::to_string(i);
      for (const auto& item : layers[i]->named_parameters()) {
        if (item.value().dim() == 2) module.matrices.emplace_back(module.name + "." + item.key(), item.value());
      }
    }
    return modules;
  }

  /// Embeddings, norms and head.
  std::vector<torch::Tensor> rest() const {
    std::vector<torch::Tensor> result;
    for (const auto& item : named_parameters()) {
      const bool dedicated = item.key().starts_with("layers") && item.value().dim() == 2;
      if (!dedicated) result.push_back(item.value());
    }
    return result;
  }

  /// tokens: int64 [batch, seq].  Returns logits [batch, seq, 256].
  torch::Tensor forward(const torch::Tensor& tokens, dmuon::Runtime& runtime) {
    return dmuon::call_root(runtime, [&] {
      auto x = embedding(tokens) + position(torch::arange(tokens.size(1)));
      for (size_t i = 0; i < layers.size(); ++i) {
        x = dmuon::call_module(runtime, static_cast<int>(i), x,
                               [&](const torch::Tensor& input) { return layers[i]->forward(input); });
      }
      return head(final_norm(x));
    });
  }

  torch::nn::Embedding embedding{nullptr}, position{nullptr};
  std::vector<Layer> layers;
  torch::nn::LayerNorm final_norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);
