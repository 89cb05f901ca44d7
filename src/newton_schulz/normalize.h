// Frobenius normalisation that does not depend on the scale of its input and never synchronises.
//
// Result: 2^prescale * x / ||x||_F.  A zero matrix stays zero.  A NaN or Inf makes its whole matrix NaN, no other.
// A power-of-two factor on the input changes no bit of the result (subnormals aside).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace dmuon {

/// x: [..., rows, cols], floating, not empty.  Divides by max|x| and then by the Frobenius norm, so that no square
/// leaves the range; in fp32, or in fp64 for fp64 input.  Returns a new tensor of `dtype`.
[[nodiscard]] at::Tensor normalize(const at::Tensor& x, at::ScalarType dtype, int prescale);

/// matrices: at least one [rows, cols] tensor, equal in shape, dtype and CUDA device.  Returns fp16
/// [batch, rows, cols], written on the current stream.  Uses the fused kernels when they are built and the input fits
/// fp32, and `normalize` on a stacked copy otherwise.
[[nodiscard]] at::Tensor normalize_to_half_batch(const std::vector<at::Tensor>& matrices, int prescale);

}  // namespace dmuon
