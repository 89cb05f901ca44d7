// Newton-Schulz of whole lists of matrices on Hopper GPUs, with the momentum before and the update after it fused in.
//
// A list is cut into parts of at most kMaxPartElements elements, which bounds the workspace; a part is up to three
// elementwise launches and one of the tile-product kernel, which holds all its products.  Work lists are made once for
// a list of shapes and kept in device memory.  The work queues on the current stream of the matrices' device and never
// synchronises; the first time a list, or a new place of the workspace, is seen the host waits for a small copy.  May
// be captured in a CUDA graph.  Bits depend on the matrix and the options alone.
//
// Called by newton_schulz() and, through optim, by the Muon step.  The matrices of a call are not empty, on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "dmuon/newton_schulz.h"

namespace dmuon {

/// 256 Mi: 1 GiB for both iterates of each matrix.
inline constexpr std::int64_t kMaxPartElements = std::int64_t{1} << 28;

/// True if this build and the device (compute capability 9.0) have the kernels.
[[nodiscard]] bool gpu_engine_supports(const at::Device& device);

/// matrices: [rows, cols], all fp32, all fp16 or all bf16.  Returns new contiguous tensors of the same dtype.
[[nodiscard]] std::vector<at::Tensor> gpu_newton_schulz(const std::vector<at::Tensor>& matrices,
                                                        const NsOptions& options);

/// One matrix of a Muon step.  All fp32 [rows, cols], contiguous; momentum and weight are updated in place.
struct GpuMuonMatrix {
  at::Tensor grad;
  at::Tensor momentum;
  at::Tensor weight;
  double step = 0.0;  ///< weight = decay * weight - step * direction
};

struct GpuMuonOptions {
  double momentum = 0.95;
  bool nesterov = true;
  double decay = 1.0;
};

/// Returns, per matrix, a bool scalar tensor on the device: whether its direction was finite.
[[nodiscard]] std::vector<at::Tensor> gpu_muon_step(const std::vector<GpuMuonMatrix>& matrices,
                                                    const GpuMuonOptions& muon, const NsOptions& options);

/// Bytes of device memory that gpu_muon_step takes at a time for matrices of these shapes (rows, cols), before the
/// allocator rounds up.  Without a GPU, too; 0 in a build without kernels.
[[nodiscard]] std::int64_t gpu_workspace_bytes(const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes,
                                               const NsOptions& options);

}  // namespace dmuon
