#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>
#include <utility>

#include "dmuon/newton_schulz.h"

namespace dmuon {
namespace {

using Row = std::array<double, 5>;  // four unknowns and the right-hand side
using System = std::array<Row, 4>;

struct Fit {
  NsCoefficients step;
  double error = 0.0;  // signed: the fit is 1 - error at the lower end
};

void eliminate(System& rows, std::size_t column) {
  const auto larger = [column](const Row& x, const Row& y) { return std::abs(x[column]) < std::abs(y[column]); };
  std::iter_swap(rows.begin() + column, std::max_element(rows.begin() + column, rows.end(), larger));
  for (std::size_t i = column + 1; i < rows.size(); ++i) {
    const double factor = rows[i][column] / rows[column][column];
    for (std::size_t j = column; j < rows[i].size(); ++j) rows[i][j] -= factor * rows[column][j];
  }
}

std::array<double, 4> solve(System rows) {
  for (std::size_t column = 0; column < rows.size(); ++column) eliminate(rows, column);
  std::array<double, 4> x{};
  for (std::size_t i = rows.size(); i-- > 0;) {
    double rest = rows[i][4];
    for (std::size_t j = i + 1; j < rows.size(); ++j) rest -= rows[i][j] * x[j];
    x[i] = rest / rows[i][i];
  }
  return x;
}

// The odd quintic that is 1 -+ error, with alternating sign, at the four points.
Fit interpolate(const std::array<double, 4>& points) {
  System rows{};
  for (std::size_t i = 0; i < points.size(); ++i) {
    const double x = points[i];
    rows[i] = {x, std::pow(x, 3), std::pow(x, 5), i % 2 == 0 ? 1.0 : -1.0, 1.0};
  }
  const auto [a, b, c, error] = solve(rows);
  return {{a, b, c}, error};
}

// The interior extrema: positive roots of p'(x) = a + 3 b x^2 + 5 c x^4.
std::pair<double, double> extrema(const NsCoefficients& p) {
  const double root = std::sqrt(9.0 * p.b * p.b - 20.0 * p.a * p.c);
  return {std::sqrt((-3.0 * p.b - root) / (10.0 * p.c)), std::sqrt((-3.0 * p.b + root) / (10.0 * p.c))};
}

// Minimax odd quintic to 1 on [lower, 1] by Remez exchange.
NsCoefficients minimax(double lower) {
  constexpr double kConverged =
      1.0 - 5e-6;  // above it the four points fall together; the Taylor limit is exact to 1e-16
  constexpr int kMaxSweeps = 50;
  if (lower >= kConverged) return {15.0 / 8.0, -10.0 / 8.0, 3.0 / 8.0};
  std::array<double, 4> points = {lower, (3.0 * lower + 1.0) / 4.0, (lower + 3.0) / 4.0, 1.0};
  Fit fit = interpolate(points);
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    const double previous = fit.error;
    std::tie(points[1], points[2]) = extrema(fit.step);
    fit = interpolate(points);
    if (std::abs(fit.error - previous) <= 1e-15) break;
  }
  return fit.step;
}

double evaluate(const NsCoefficients& p, double x) {
  const double y = x * x;
  return x * (p.a + y * (p.b + y * p.c));
}

}  // namespace

std::vector<NsCoefficients> solve_coefficients(double lower, int steps) {
  TORCH_CHECK_VALUE(lower > 0.0 && lower < 1.0, "[dmuon.newton_schulz] lower is ", lower,
                    "; expected a value between 0 and 1, exclusive. It is the smallest singular value to bring to 1, "
                    "relative to the Frobenius norm (1e-3 is usual).");
  TORCH_CHECK_VALUE(steps >= 1, "[dmuon.newton_schulz] steps is ", steps,
                    "; expected at least 1. The usual value is 5.");
  std::vector<NsCoefficients> result;
  double upper = 1.0;
  for (int i = 0; i < steps; ++i) {
    const NsCoefficients unit = minimax(lower / upper);
    result.push_back({unit.a / upper, unit.b / std::pow(upper, 3), unit.c / std::pow(upper, 5)});
    lower = evaluate(result.back(), lower);
    upper = 2.0 - lower;
  }
  return result;
}

}  // namespace dmuon
