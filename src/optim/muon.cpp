#include "dmuon/muon.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <tuple>

#include "newton_schulz/gpu_engine.h"

namespace dmuon {
namespace {

struct Chunk {
  std::vector<std::size_t> places;  // in the caller's list
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> momenta;
};

void check_options(const MuonOptions& options) {
  TORCH_CHECK_VALUE(std::isfinite(options.lr) && options.lr >= 0.0, "[dmuon.optim] lr is ", options.lr,
                    "; expected a finite value >= 0. Check the schedule.");
  TORCH_CHECK_VALUE(options.momentum >= 0.0 && options.momentum < 1.0, "[dmuon.optim] momentum is ", options.momentum,
                    "; expected 0 <= momentum < 1. The usual value is 0.95.");
  TORCH_CHECK_VALUE(std::isfinite(options.weight_decay) && options.weight_decay >= 0.0,
                    "[dmuon.optim] weight_decay is ", options.weight_decay,
                    "; expected a finite value >= 0. Pass 0 for none.");
  check_ns_options(options.ns);
}

void check_tensor(const MuonMatrix& matrix, const char* role, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), "[dmuon.optim] '", matrix.name, "' has no ", role,
                    "; expected a tensor. Leave the matrix out of the step, or give it one.");
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "[dmuon.optim] ", role, " of '", matrix.name, "' is of dtype ",
                   tensor.scalar_type(), "; expected float32. Keep masters and optimizer state in float32.");
  TORCH_CHECK_VALUE(tensor.dim() == 2, "[dmuon.optim] ", role, " of '", matrix.name, "' is of shape ", tensor.sizes(),
                    "; expected [rows, cols]. Pass a two-dimensional view.");
  TORCH_CHECK_VALUE(tensor.sizes() == matrix.weight.sizes(), "[dmuon.optim] ", role, " of '", matrix.name,
                    "' is of shape ", tensor.sizes(), "; expected ", matrix.weight.sizes(), " as its weight. Pass ",
                    "the tensor that belongs to this matrix.");
  TORCH_CHECK_VALUE(tensor.device() == matrix.weight.device(), "[dmuon.optim] ", role, " of '", matrix.name, "' is on ",
                    tensor.device(), "; expected ", matrix.weight.device(), " as its weight. Move it there.");
}

void check_matrix(const MuonMatrix& matrix) {
  check_tensor(matrix, "weight", matrix.weight);
  check_tensor(matrix, "grad", matrix.grad);
  check_tensor(matrix, "momentum", matrix.momentum);
}

bool is_full(const Chunk& chunk) {
  const auto count = static_cast<std::int64_t>(chunk.weights.size());
  return count > 0 && (count + 1) * chunk.weights.front().numel() > kMaxBatchElements;
}

// Equal shapes on one device, cut so that each chunk holds at most kMaxBatchElements elements or one matrix.
std::vector<Chunk> make_chunks(const std::vector<MuonMatrix>& matrices, const std::vector<std::size_t>& places) {
  std::map<std::tuple<std::int64_t, std::int64_t, std::string>, std::size_t> open;  // index of the chunk being filled
  std::vector<Chunk> chunks;
  for (const std::size_t i : places) {
    const MuonMatrix& matrix = matrices[i];
    const auto key = std::tuple(matrix.weight.size(0), matrix.weight.size(1), matrix.weight.device().str());
    const auto found = open.find(key);
    if (found == open.end() || is_full(chunks[found->second])) {
      open[key] = chunks.size();
      chunks.emplace_back();
    }
    Chunk& chunk = chunks[open[key]];
    chunk.places.push_back(i);
    chunk.weights.push_back(matrix.weight);
    chunk.grads.push_back(matrix.grad);
    chunk.momenta.push_back(matrix.momentum);
  }
  return chunks;
}

std::vector<at::Tensor> update_direction(const Chunk& chunk, const MuonOptions& options) {
  at::_foreach_mul_(chunk.momenta, options.momentum);
  at::_foreach_add_(chunk.momenta, chunk.grads);
  if (!options.nesterov) return newton_schulz(chunk.momenta, options.ns);
  return newton_schulz(at::_foreach_add(chunk.grads, chunk.momenta, options.momentum), options.ns);
}

void step_chunk(const Chunk& chunk, const MuonOptions& options, std::vector<at::Tensor>& finite) {
  const std::vector<at::Tensor> updates = update_direction(chunk, options);
  const at::Tensor& first = chunk.weights.front();
  const double scale = lr_scale(options.adjust_lr, first.size(0), first.size(1));
  if (options.weight_decay != 0.0) at::_foreach_mul_(chunk.weights, 1.0 - options.lr * options.weight_decay);
  at::_foreach_add_(chunk.weights, updates, -options.lr * scale);
  for (std::size_t i = 0; i < updates.size(); ++i) {
    // Singular values are near 1, so the sum is finite exactly when every entry is.
    finite[chunk.places[i]] = at::isfinite(updates[i].sum());
  }
}

bool fits_engine(const MuonMatrix& matrix) {
  return matrix.weight.numel() > 0 && matrix.weight.is_contiguous() && matrix.momentum.is_contiguous() &&
         gpu_engine_supports(matrix.weight.device());
}

// Everything fused, for matrices of one device.
void step_on_gpu(const std::vector<MuonMatrix>& matrices, const std::vector<std::size_t>& places,
                 const MuonOptions& options, std::vector<at::Tensor>& finite) {
  std::vector<GpuMuonMatrix> list;
  for (const std::size_t i : places) {
    const MuonMatrix& matrix = matrices[i];
    const double scale = lr_scale(options.adjust_lr, matrix.weight.size(0), matrix.weight.size(1));
    list.push_back({matrix.grad.contiguous(), matrix.momentum, matrix.weight, options.lr * scale});
  }
  const GpuMuonOptions muon{options.momentum, options.nesterov, 1.0 - options.lr * options.weight_decay};
  std::vector<at::Tensor> flags = gpu_muon_step(list, muon, options.ns);
  for (std::size_t i = 0; i < places.size(); ++i) finite[places[i]] = std::move(flags[i]);
}

}  // namespace

AdjustLr parse_adjust_lr(const std::string& name) {
  if (name == "original") return AdjustLr::kOriginal;
  TORCH_CHECK_VALUE(name == "match_rms_adamw", "[dmuon.optim] unknown adjust_lr_fn '", name,
                    "'; expected 'original' or 'match_rms_adamw'. Pass one of these.");
  return AdjustLr::kMatchRmsAdamw;
}

double lr_scale(AdjustLr mode, std::int64_t rows, std::int64_t cols) {
  if (mode == AdjustLr::kMatchRmsAdamw) return 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
  return std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(cols)));
}

std::vector<at::Tensor> muon_step(const std::vector<MuonMatrix>& matrices, const MuonOptions& options) {
  check_options(options);
  for (const MuonMatrix& matrix : matrices) check_matrix(matrix);
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> finite(matrices.size());
  std::map<std::string, std::vector<std::size_t>> on_gpu;  // by device
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    (fits_engine(matrices[i]) ? on_gpu[matrices[i].weight.device().str()] : others).push_back(i);
  }
  for (const auto& [device, places] : on_gpu) step_on_gpu(matrices, places, options, finite);
  for (const Chunk& chunk : make_chunks(matrices, others)) step_chunk(chunk, options, finite);
  return finite;
}

std::optional<std::int64_t> muon_workspace_bytes(const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes,
                                                 const NsOptions& options, c10::Device device) {
  if (!gpu_engine_supports(device)) return std::nullopt;
  return gpu_workspace_bytes(shapes, options);
}

}  // namespace dmuon
