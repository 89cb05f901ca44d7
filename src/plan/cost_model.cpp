#include <algorithm>

#include "dmuon/plan.h"

namespace dmuon::plan {
namespace {

// Of a symmetric product one triangle is computed.  Per step: X X^T (b s^2), Z (s^3) and Z X (2 b s^2).
double standard_flops(double small, double big, int steps) {
  return steps * (3 * big * small * small + small * small * small);
}

// Per segment: X X^T and Q X (b s^2 and 2 b s^2), and of the small products Z in every step, Q Z in every step but the
// first, R Z and Z (R Z) in every step but the last: 4 steps - 3 of them, s^3 each.
double gram_flops(double small, double big, int steps) {
  const int segments = steps >= 3 ? 2 : 1;
  const int small_products = 4 * steps - 3 * segments;
  return segments * 3 * big * small * small + small_products * small * small * small;
}

}  // namespace

double CostModel::flops(std::int64_t rows, std::int64_t cols) const {
  const auto [small, big] = std::minmax(rows, cols);
  const auto s = static_cast<double>(small);
  const auto b = static_cast<double>(big);
  return 10 * b < 13 * s ? standard_flops(s, b, ns_steps) : gram_flops(s, b, ns_steps);
}

double CostModel::seconds(std::int64_t rows, std::int64_t cols) const {
  const double numel = static_cast<double>(rows) * static_cast<double>(cols);
  return flops(rows, cols) / flops_per_second + numel * elementwise_bytes / bytes_per_second + seconds_per_matrix;
}

double CostModel::seconds(const Matrix& matrix) const {
  if (matrix.kind == Kind::kMatrix) return seconds(matrix.rows, matrix.cols);
  return static_cast<double>(matrix.numel()) * adamw_bytes / bytes_per_second;
}

}  // namespace dmuon::plan
