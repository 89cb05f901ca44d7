#include "newton_schulz/normalize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#ifdef DMUON_HAVE_KERNELS
#include "kernels/matrix_passes.h"
#include "newton_schulz/current_stream.h"
#endif

namespace dmuon {
namespace {

// [..., 1, 1].  Rows first: one fp32 sum over a large matrix would be off by up to 0.4 %.
at::Tensor matrix_norm(const at::Tensor& x, double order) {
  const at::Tensor rows = at::linalg_vector_norm(x, order, at::IntArrayRef(-1), /*keepdim=*/true);
  return at::linalg_vector_norm(rows, order, at::IntArrayRef(-2), /*keepdim=*/true);
}

#ifdef DMUON_HAVE_KERNELS
at::Tensor normalize_fused(const std::vector<at::Tensor>& matrices, int prescale) {
  const at::Tensor& first = matrices.front();
  const c10::DeviceGuard guard(first.device());
  const auto count = static_cast<std::int64_t>(matrices.size());
  at::Tensor result = at::empty({count, first.size(0), first.size(1)}, first.options().dtype(at::kHalf));
  std::vector<at::Tensor> inputs;  // keeps converted copies alive until the launches are queued
  std::vector<kernels::PassMatrix> list;
  for (std::int64_t i = 0; i < count; ++i) {
    inputs.push_back(matrices[static_cast<std::size_t>(i)].to(at::kFloat).contiguous());
    list.push_back({.input = inputs.back().data_ptr(),
                    .x = result.data_ptr<at::Half>() + i * first.numel(),
                    .rows = first.size(0),
                    .cols = first.size(1),
                    .ld = first.size(1)});
  }
  at::Tensor workspace = at::empty({kernels::normalize_workspace(list)}, first.options().dtype(at::kDouble));
  const char* error = kernels::normalize(
      {.matrices = list, .scale = std::ldexp(1.0, prescale), .workspace = workspace.data_ptr<double>()},
      current_stream(first.device()));
  TORCH_CHECK(error == nullptr, "[dmuon.kernels] normalising ", count, " matrices of shape ", first.sizes(),
              " failed: ", error, ". Expected a device of compute capability 8.0 or higher.");
  return result;
}
#endif

}  // namespace

at::Tensor normalize(const at::Tensor& x, at::ScalarType dtype, int prescale) {
  at::Tensor y = x.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor largest = matrix_norm(y, std::numeric_limits<double>::infinity());
  y = y / largest.masked_fill(largest == 0.0, 1.0);
  const at::Tensor norm = matrix_norm(y, 2.0).clamp_min(1.0);  // at least 1, unless y is zero
  return y.div_(norm.mul_(std::ldexp(1.0, -prescale))).to(dtype);
}

at::Tensor normalize_to_half_batch(const std::vector<at::Tensor>& matrices, int prescale) {
#ifdef DMUON_HAVE_KERNELS
  if (matrices.front().scalar_type() != at::kDouble) return normalize_fused(matrices, prescale);
#endif
  return normalize(at::stack(matrices), at::kHalf, prescale);
}

}  // namespace dmuon
