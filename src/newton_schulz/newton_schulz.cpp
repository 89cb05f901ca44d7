#include "dmuon/newton_schulz.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "newton_schulz/gpu_engine.h"
#include "newton_schulz/iteration.h"
#include "newton_schulz/normalize.h"

namespace dmuon {
namespace {

constexpr double kGramAspect = 1.3;  // below it standard Newton-Schulz needs no more FLOPs and fewer launches
constexpr std::int64_t kFillsTheGpu = std::int64_t{1} << 20;  // elements
constexpr std::size_t kSmallBatch = 8;

struct Group {
  std::vector<std::size_t> places;  // in the caller's list
  std::vector<at::Tensor> matrices;
};

void check_matrices(const std::vector<at::Tensor>& matrices) {
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    TORCH_CHECK_VALUE(matrices[i].defined() && matrices[i].dim() == 2, "[dmuon.newton_schulz] matrix ", i, " is ",
                      matrices[i].defined() ? "of shape " + c10::str(matrices[i].sizes()) : "undefined",
                      "; expected [rows, cols]. Flatten or split it first.");
    TORCH_CHECK_TYPE(matrices[i].is_floating_point(), "[dmuon.newton_schulz] matrix ", i, " is of dtype ",
                     matrices[i].scalar_type(), "; expected a real floating dtype. Convert it first.");
  }
}

// A list whose matrices can be worked on together: equal dtype and device, and equal shape where `by_shape`.
std::vector<Group> grouped(const std::vector<at::Tensor>& matrices, const std::vector<std::size_t>& places,
                           bool by_shape) {
  std::map<std::tuple<std::int64_t, std::int64_t, at::ScalarType, std::string>, Group> groups;
  for (const std::size_t i : places) {
    const at::Tensor& matrix = matrices[i];
    const std::int64_t rows = by_shape ? matrix.size(0) : 0;
    const std::int64_t cols = by_shape ? matrix.size(1) : 0;
    Group& group = groups[{rows, cols, matrix.scalar_type(), matrix.device().str()}];
    group.places.push_back(i);
    group.matrices.push_back(matrix);
  }
  std::vector<Group> result;
  for (auto& [key, group] : groups) result.push_back(std::move(group));
  return result;
}

// The GPU engine's dtypes are the 16-bit ones and fp32; everything else takes the plain path.
bool fits_engine(const at::Tensor& matrix) {
  const at::ScalarType type = matrix.scalar_type();
  return matrix.is_cuda() && (type == at::kFloat || type == at::kHalf || type == at::kBFloat16) &&
         gpu_engine_supports(matrix.device());
}

// cuBLAS chooses its algorithm by the number of matrices in a batch too.  A number that follows from the shape alone
// keeps a matrix's bits independent of what else is stepped with it; large matrices fill the GPU one at a time.
std::size_t batch_for(std::int64_t numel) { return numel < kFillsTheGpu ? kSmallBatch : 1; }

std::vector<at::Tensor> padded_chunk(const std::vector<at::Tensor>& matrices, std::size_t begin, std::size_t batch) {
  const auto end = std::min(begin + batch, matrices.size());
  std::vector<at::Tensor> chunk(matrices.begin() + static_cast<std::ptrdiff_t>(begin),
                                matrices.begin() + static_cast<std::ptrdiff_t>(end));
  if (chunk.size() < batch) chunk.resize(batch, at::zeros_like(chunk.front()));
  return chunk;
}

std::vector<at::Tensor> run_group(const std::vector<at::Tensor>& matrices, const NsOptions& options) {
  const at::Tensor& first = matrices.front();
  const std::vector<int> restarts = restarts_for(options, first.size(0), first.size(1));
  std::vector<at::Tensor> results;
  if (first.is_cuda()) {
    const auto batch = batch_for(first.numel());
    for (std::size_t begin = 0; begin < matrices.size(); begin += batch) {
      const auto chunk = padded_chunk(matrices, begin, batch);
      at::Tensor x =
          iterate(normalize_to_half_batch(chunk, kHalfPrescale), options.coefficients, restarts, kHalfPrescale);
      auto found = x.to(first.scalar_type()).unbind(0);
      found.resize(std::min(batch, matrices.size() - begin));
      std::move(found.begin(), found.end(), std::back_inserter(results));
    }
    return results;
  }
  for (const at::Tensor& matrix : matrices) {
    at::Tensor x = normalize(matrix, at::kFloat, 0);
    results.push_back(iterate(std::move(x), options.coefficients, restarts, 0).to(matrix.scalar_type()));
  }
  return results;
}

}  // namespace

void check_ns_options(const NsOptions& options) {
  TORCH_CHECK_VALUE(!options.coefficients.empty(),
                    "[dmuon.newton_schulz] NsOptions::coefficients is empty; expected one entry a step. Fill it with "
                    "make_ns_options, coefficient_set or solve_coefficients.");
  for (const int restart : options.restarts) {
    TORCH_CHECK_VALUE(restart >= 1, "[dmuon.newton_schulz] restart ", restart,
                      " found; expected steps >= 1. The first step forms X anyway: leave it out.");
  }
}

bool uses_gram(std::int64_t rows, std::int64_t cols) {
  return static_cast<double>(std::max(rows, cols)) >= kGramAspect * static_cast<double>(std::min(rows, cols));
}

std::vector<at::Tensor> newton_schulz(const std::vector<at::Tensor>& matrices, const NsOptions& options) {
  check_ns_options(options);
  check_matrices(matrices);
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::vector<at::Tensor> results(matrices.size());
  std::vector<std::size_t> engine;
  std::vector<std::size_t> plain;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    if (matrices[i].numel() == 0) {
      results[i] = at::empty_like(matrices[i]);
    } else {
      (fits_engine(matrices[i]) ? engine : plain).push_back(i);
    }
  }
  const auto put = [&results](const Group& group, std::vector<at::Tensor> found) {
    for (std::size_t i = 0; i < found.size(); ++i) results[group.places[i]] = std::move(found[i]);
  };
  for (const Group& group : grouped(matrices, engine, /*by_shape=*/false)) {
    put(group, gpu_newton_schulz(group.matrices, options));
  }
  for (const Group& group : grouped(matrices, plain, /*by_shape=*/true)) put(group, run_group(group.matrices, options));
  return results;
}

}  // namespace dmuon
