// Seeded matrices with known spectra and the fp64 references of the Newton-Schulz tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "dmuon/newton_schulz.h"

namespace dmuon::testing {

/// Matrices of one seed.  All are fp32 on the CPU.
class Matrices {
 public:
  explicit Matrices(std::uint64_t seed);

  [[nodiscard]] at::Tensor gaussian(std::int64_t rows, std::int64_t cols);
  [[nodiscard]] at::Tensor low_rank(std::int64_t rows, std::int64_t cols, std::int64_t rank);
  /// Singular values log-spaced from 1 to 1 / condition.
  [[nodiscard]] at::Tensor log_spaced(std::int64_t rows, std::int64_t cols, double condition);
  /// A rank-one matrix that lives in its first three rows.
  [[nodiscard]] at::Tensor rank_one_in_three_rows(std::int64_t rows, std::int64_t cols);
  /// Gaussian with one entry of 1e12.
  [[nodiscard]] at::Tensor huge_entry(std::int64_t rows, std::int64_t cols);

 private:
  at::Tensor orthonormal_columns(std::int64_t rows, std::int64_t cols);

  at::Generator generator_;
};

struct Spectrum {
  std::string name;
  at::Tensor matrix;
  double condition = 0.0;  ///< of a log-spaced one; 0 for the others
};

/// The stress list: Gaussian, log-spaced 10 .. 1e7, low rank, rank one in three rows, all ones, one huge entry, zeros.
[[nodiscard]] std::vector<Spectrum> stress_spectra(std::int64_t rows, std::int64_t cols);

/// All steps applied to a singular value.
[[nodiscard]] double compose(std::span<const NsCoefficients> steps, double sigma);

/// The plain fp64 iteration X <- a X + (b A + c A^2) X, A = X X^T, on x / ||x||_F.
[[nodiscard]] at::Tensor reference_polynomial(const at::Tensor& x, std::span<const NsCoefficients> steps);

/// Largest singular value, in fp64.
[[nodiscard]] double spectral_norm(const at::Tensor& x);

/// ||x - reference||_F / ||reference||_F in fp64; 0 when both are zero.
[[nodiscard]] double relative_error(const at::Tensor& x, const at::Tensor& reference);

/// Same shape, dtype and bits (a NaN equals itself).
[[nodiscard]] bool same_bits(const at::Tensor& x, const at::Tensor& y);

}  // namespace dmuon::testing
