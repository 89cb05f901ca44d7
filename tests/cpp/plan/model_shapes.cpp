#include "plan/model_shapes.h"

#include <cstdint>

namespace dmuon::plan {
namespace {

struct Attention {
  std::int64_t hidden = 0;
  std::int64_t query = 0;      // heads * head_dim
  std::int64_t key_value = 0;  // key-value heads * head_dim
};

void add(std::vector<Matrix>& out, const std::string& layer, const char* name, std::int64_t rows, std::int64_t cols) {
  out.push_back({.name = layer + "." + name, .rows = rows, .cols = cols, .layer = layer});
}

void add_attention(std::vector<Matrix>& out, const std::string& layer, const Attention& attention) {
  add(out, layer, "q_proj", attention.query, attention.hidden);
  add(out, layer, "k_proj", attention.key_value, attention.hidden);
  add(out, layer, "v_proj", attention.key_value, attention.hidden);
  add(out, layer, "o_proj", attention.hidden, attention.query);
}

void add_gated_mlp(std::vector<Matrix>& out, const std::string& layer, const std::string& prefix, std::int64_t hidden,
                   std::int64_t width) {
  add(out, layer, (prefix + "gate_proj").c_str(), width, hidden);
  add(out, layer, (prefix + "up_proj").c_str(), width, hidden);
  add(out, layer, (prefix + "down_proj").c_str(), hidden, width);
}

void add_decoder(std::vector<Matrix>& out, const std::string& prefix, int layers, const Attention& attention,
                 std::int64_t width) {
  for (int i = 0; i < layers; ++i) {
    const std::string layer = prefix + std::to_string(i);
    add_attention(out, layer, attention);
    add_gated_mlp(out, layer, "mlp.", attention.hidden, width);
  }
}

}  // namespace

ModelShapes gpt2_small() {
  ModelShapes model{.name = "GPT-2 small", .matrices = {}};
  for (int i = 0; i < 12; ++i) {
    const std::string layer = "h." + std::to_string(i);
    add(model.matrices, layer, "attn.c_attn", 768, 2304);
    add(model.matrices, layer, "attn.c_proj", 768, 768);
    add(model.matrices, layer, "mlp.c_fc", 768, 3072);
    add(model.matrices, layer, "mlp.c_proj", 3072, 768);
  }
  return model;
}

ModelShapes llama3_8b() {
  ModelShapes model{.name = "Llama-3 8B", .matrices = {}};
  add_decoder(model.matrices, "layers.", 32, {.hidden = 4096, .query = 4096, .key_value = 1024}, 14336);
  return model;
}

ModelShapes llama3_70b() {
  ModelShapes model{.name = "Llama-3 70B", .matrices = {}};
  add_decoder(model.matrices, "layers.", 80, {.hidden = 8192, .query = 8192, .key_value = 1024}, 28672);
  return model;
}

ModelShapes qwen3_30b_a3b() {
  ModelShapes model{.name = "Qwen3-30B-A3B", .matrices = {}};
  for (int i = 0; i < 48; ++i) {
    const std::string layer = "layers." + std::to_string(i);
    add_attention(model.matrices, layer, {.hidden = 2048, .query = 4096, .key_value = 512});
    for (int expert = 0; expert < 128; ++expert) {
      add_gated_mlp(model.matrices, layer, "mlp.experts." + std::to_string(expert) + ".", 2048, 768);
    }
  }
  return model;
}

ModelShapes vision_language_action() {
  ModelShapes model{.name = "ViT+LLM+action", .matrices = {}};
  for (int i = 0; i < 27; ++i) {
    const std::string layer = "vision.layers." + std::to_string(i);
    add_attention(model.matrices, layer, {.hidden = 1152, .query = 1152, .key_value = 1152});
    add(model.matrices, layer, "mlp.fc1", 4304, 1152);
    add(model.matrices, layer, "mlp.fc2", 1152, 4304);
  }
  add_decoder(model.matrices, "language.layers.", 18, {.hidden = 2048, .query = 2048, .key_value = 256}, 16384);
  add_decoder(model.matrices, "action.layers.", 18, {.hidden = 1024, .query = 2048, .key_value = 256}, 4096);
  return model;
}

std::vector<ModelShapes> all_models() {
  return {gpt2_small(), llama3_8b(), llama3_70b(), qwen3_30b_a3b(), vision_language_action()};
}

}  // namespace dmuon::plan
