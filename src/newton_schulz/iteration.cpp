#include "newton_schulz/iteration.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "newton_schulz/segments.h"

namespace dmuon {
namespace {

// Block rows of a symmetric product: so many leave out 7/16 of it, and smaller ones no longer run at full speed.
constexpr std::int64_t kMostBlocks = 8;
constexpr std::int64_t kLeastRows = 512;

bool is_wide(const at::Tensor& x) { return x.size(-2) <= x.size(-1); }

at::Tensor product(const at::Tensor& a, const at::Tensor& b) { return a.dim() == 2 ? at::mm(a, b) : at::bmm(a, b); }

// beta * c + alpha * a b
at::Tensor multiply_add(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  return c.dim() == 2 ? at::addmm(c, a, b, beta, alpha) : at::baddbmm(c, a, b, beta, alpha);
}

// alpha * a b + beta * c, which is symmetric; without c, a b.  Of a large one only the block rows up to the diagonal
// are computed; what lies above is copied from below.
at::Tensor symmetric(const at::Tensor& a, const at::Tensor& b, const at::Tensor& c, double beta, double alpha) {
  const auto of = [&](const at::Tensor& left, const at::Tensor& right, const at::Tensor& old) {
    return old.defined() ? multiply_add(old, left, right, beta, alpha) : product(left, right);
  };
  const std::int64_t n = a.size(-2);
  const std::int64_t blocks = std::min(kMostBlocks, n / kLeastRows);
  if (blocks < 2) return of(a, b, c);
  auto sizes = a.sizes().vec();
  sizes.back() = n;
  const at::Tensor out = at::empty(sizes, a.options());
  for (std::int64_t block = 0; block < blocks; ++block) {
    const std::int64_t begin = n * block / blocks;
    const std::int64_t end = n * (block + 1) / blocks;
    const auto rows = [&](const at::Tensor& x) { return x.narrow(-2, begin, end - begin); };
    const at::Tensor found = of(rows(a), b.narrow(-1, 0, end), c.defined() ? rows(c).narrow(-1, 0, end) : c);
    rows(out).narrow(-1, 0, end).copy_(found);
    out.narrow(-2, 0, begin).narrow(-1, begin, end - begin).copy_(found.narrow(-1, 0, begin).mT());
  }
  return out;
}

at::Tensor gram(const at::Tensor& x) {
  return is_wide(x) ? symmetric(x, x.mT(), {}, 0.0, 1.0) : symmetric(x.mT(), x, {}, 0.0, 1.0);
}

// beta * x + alpha * q x, on the short side of x
at::Tensor apply(const at::Tensor& q, const at::Tensor& x, double beta, double alpha) {
  return is_wide(x) ? multiply_add(x, q, x, beta, alpha) : multiply_add(x, x, q, beta, alpha);
}

at::Tensor plus_identity(const at::Tensor& z, double a) {
  at::Tensor q = z.clone();
  q.diagonal(0, -2, -1).add_(a);
  return q;
}

at::Tensor run_segment(const at::Tensor& x, std::span<const NsCoefficients> steps, int prescale) {
  const double down = std::ldexp(1.0, -prescale);
  const double down2 = down * down;
  const NsCoefficients first = steps.front();
  at::Tensor r = gram(x);
  at::Tensor z = symmetric(r, r, r, first.b * down2, first.c * down2 * down2);
  if (steps.size() == 1) return apply(z, x, first.a * down, down);

  at::Tensor q = plus_identity(z, first.a);
  for (std::size_t i = 1; i < steps.size(); ++i) {
    const double a = steps[i - 1].a;
    const double scale = i == 1 ? down2 : 1.0;
    r = symmetric(r, z, r, a, 1.0);
    r = symmetric(z, r, r, a * scale, scale);
    z = symmetric(r, r, r, steps[i].b, steps[i].c);
    q = symmetric(q, z, q, steps[i].a, 1.0);
  }
  return apply(q, x, 0.0, down);
}

}  // namespace

at::Tensor iterate(at::Tensor x, std::span<const NsCoefficients> steps, std::span<const int> restarts, int prescale) {
  for (std::size_t begin = 0; begin < steps.size();) {
    const std::size_t end = segment_end(restarts, begin, steps.size());
    x = run_segment(x, steps.subspan(begin, end - begin), begin == 0 ? prescale : 0);
    begin = end;
  }
  return x;
}

std::vector<int> restarts_for(const NsOptions& options, std::int64_t rows, std::int64_t cols) {
  if (options.backend == NsBackend::kGram && uses_gram(rows, cols)) return options.restarts;
  std::vector<int> every_step(options.coefficients.size() - 1);
  std::iota(every_step.begin(), every_step.end(), 1);
  return every_step;
}

}  // namespace dmuon
