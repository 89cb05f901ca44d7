#include "newton_schulz/matrices.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_eigvalsh.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/logspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace dmuon::testing {

Matrices::Matrices(std::uint64_t seed) : generator_(at::detail::createCPUGenerator(seed)) {}

at::Tensor Matrices::gaussian(std::int64_t rows, std::int64_t cols) {
  return at::randn({rows, cols}, generator_, at::TensorOptions(at::kFloat));
}

at::Tensor Matrices::low_rank(std::int64_t rows, std::int64_t cols, std::int64_t rank) {
  return gaussian(rows, rank).mm(gaussian(rank, cols));
}

at::Tensor Matrices::log_spaced(std::int64_t rows, std::int64_t cols, double condition) {
  const std::int64_t n = std::min(rows, cols);
  const at::Tensor sigma = at::logspace(0.0, -std::log10(condition), n, 10.0, at::TensorOptions(at::kDouble));
  return (orthonormal_columns(rows, n) * sigma).mm(orthonormal_columns(cols, n).mT()).to(at::kFloat);
}

at::Tensor Matrices::rank_one_in_three_rows(std::int64_t rows, std::int64_t cols) {
  at::Tensor x = at::zeros({rows, cols}, at::TensorOptions(at::kFloat));
  x.narrow(0, 0, 3).copy_(low_rank(3, cols, 1));
  return x;
}

at::Tensor Matrices::huge_entry(std::int64_t rows, std::int64_t cols) {
  at::Tensor x = gaussian(rows, cols);
  x[rows / 2][cols / 3] = 1e12;
  return x;
}

at::Tensor Matrices::orthonormal_columns(std::int64_t rows, std::int64_t cols) {
  return std::get<0>(at::linalg_qr(gaussian(rows, cols).to(at::kDouble)));
}

std::vector<Spectrum> stress_spectra(std::int64_t rows, std::int64_t cols) {
  Matrices make(2026);
  std::vector<Spectrum> list = {{"gaussian", make.gaussian(rows, cols)}};
  for (const double condition : {1e1, 1e2, 1e3, 1e5, 1e7}) {
    list.push_back({"log " + std::to_string(condition), make.log_spaced(rows, cols, condition), condition});
  }
  list.push_back({"rank 10", make.low_rank(rows, cols, 10)});
  list.push_back({"rank one in three rows", make.rank_one_in_three_rows(rows, cols)});
  list.push_back({"all ones", at::ones({rows, cols}, at::TensorOptions(at::kFloat))});
  list.push_back({"huge entry", make.huge_entry(rows, cols)});
  list.push_back({"zeros", at::zeros({rows, cols}, at::TensorOptions(at::kFloat))});
  return list;
}

double compose(std::span<const NsCoefficients> steps, double sigma) {
  for (const auto& [a, b, c] : steps) sigma = a * sigma + b * std::pow(sigma, 3) + c * std::pow(sigma, 5);
  return sigma;
}

at::Tensor reference_polynomial(const at::Tensor& x, std::span<const NsCoefficients> steps) {
  at::Tensor y = x.to(at::kDouble);
  const double norm = y.norm().item<double>();
  if (norm == 0.0) return y;
  y = y / norm;
  for (const auto& [a, b, c] : steps) {
    const at::Tensor gram = y.mm(y.mT());
    y = a * y + (b * gram + c * gram.mm(gram)).mm(y);
  }
  return y;
}

double spectral_norm(const at::Tensor& x) {
  const at::Tensor y = x.to(at::kDouble);
  const at::Tensor gram = y.size(0) <= y.size(1) ? y.mm(y.mT()) : y.mT().mm(y);
  return std::sqrt(at::linalg_eigvalsh(gram).max().item<double>());
}

double relative_error(const at::Tensor& x, const at::Tensor& reference) {
  const at::Tensor expected = reference.to(at::kDouble);
  const double error = (x.to(at::kDouble) - expected).norm().item<double>();
  return error == 0.0 ? 0.0 : error / expected.norm().item<double>();
}

bool same_bits(const at::Tensor& x, const at::Tensor& y) {
  if (x.sizes() != y.sizes() || x.scalar_type() != y.scalar_type()) return false;
  const at::Tensor a = x.cpu().contiguous();
  const at::Tensor b = y.cpu().contiguous();
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

}  // namespace dmuon::testing
