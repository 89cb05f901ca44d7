// The Muon update on matrices this rank owns.  Pure math on local tensors: no ranks, no communication.
//
//   buf = momentum * buf + grad;   x = nesterov ? grad + momentum * buf : buf;   u = newton_schulz(x)
//   weight *= 1 - lr * weight_decay;   weight -= lr * scale(rows, cols) * u
//
// (Jordan et al. 2024; the default scale 0.2 * sqrt(max(rows, cols)) matches AdamW's update RMS, Liu et al. 2025,
// arXiv 2502.16982.)
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dmuon/newton_schulz.h"

namespace dmuon {

enum class AdjustLr { kOriginal, kMatchRmsAdamw };

/// "original" (sqrt(max(1, rows / cols))) or "match_rms_adamw" (0.2 * sqrt(max(rows, cols))), as in torch.optim.Muon.
/// Throws c10::Error that lists the known names.
[[nodiscard]] AdjustLr parse_adjust_lr(const std::string& name);

/// The factor on lr for a matrix of this shape.
[[nodiscard]] double lr_scale(AdjustLr mode, std::int64_t rows, std::int64_t cols);

struct MuonOptions {
  double lr = 0.02;
  double momentum = 0.95;
  double weight_decay = 0.0;
  bool nesterov = true;
  AdjustLr adjust_lr = AdjustLr::kMatchRmsAdamw;
  NsOptions ns;
};

/// One owned matrix.  All three are [rows, cols], on one device; `weight` and `momentum` are fp32 and updated in place;
/// `grad` is fp32 and left as it is.
struct MuonMatrix {
  std::string name;  ///< for error messages
  at::Tensor weight;
  at::Tensor grad;
  at::Tensor momentum;
};

/// Steps all matrices.  On Hopper GPUs all of a device run as one list with the momentum and the update fused in (see
/// newton_schulz()); elsewhere Newton-Schulz runs in batches of equal shape of at most `kMaxBatchElements` elements, so
/// the workspace is bounded either way.  Throws c10::Error naming the matrix before anything is changed if shapes,
/// dtypes or devices do not fit.  Runs on the current stream; never synchronises.
/// Returns, per matrix, a bool scalar tensor on its device: whether its update was finite.  A matrix whose update is
/// not finite keeps that damage to itself.
std::vector<at::Tensor> muon_step(const std::vector<MuonMatrix>& matrices, const MuonOptions& options);

/// Bytes that muon_step takes on `device` at a time, beside its arguments and before the allocator rounds up, for
/// contiguous matrices of these shapes (rows, cols), none of them empty.  Unset where it is not planned: on anything
/// but Hopper GPUs, where kMaxBatchElements bounds it.
[[nodiscard]] std::optional<std::int64_t> muon_workspace_bytes(
    const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes, const NsOptions& options, c10::Device device);

/// Elements of one Newton-Schulz batch (64 Mi) of the plain path: bounds the optimizer's workspace.
inline constexpr std::int64_t kMaxBatchElements = std::int64_t{1} << 26;

}  // namespace dmuon
