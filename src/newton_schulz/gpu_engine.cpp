#include "newton_schulz/gpu_engine.h"

#include <c10/util/Exception.h>

#ifdef DMUON_HAVE_KERNELS
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <mutex>
#include <numeric>
#include <tuple>
#include <utility>

#include "kernels/device_table.h"
#include "kernels/matrix_passes.h"
#include "kernels/tile_product.h"
#include "newton_schulz/current_stream.h"
#include "newton_schulz/iteration.h"
#include "newton_schulz/work_list.h"
#endif

namespace dmuon {
#ifdef DMUON_HAVE_KERNELS
namespace {

using kernels::DeviceTable;
using kernels::PassMatrix;
using kernels::Scalar;

constexpr double kWavesOfTiles = 4.0;  // of one product, over all slots: then no multiprocessor waits long for another
constexpr int kMultiprocessors = 132;

// Enough matrices side by side to fill the GPU, and no more: each takes six squares.
int slots_for(const std::vector<WorkMatrix>& matrices) {
  std::int64_t n = 1;
  for (const WorkMatrix& matrix : matrices) n = std::max(n, std::min(matrix.rows, matrix.cols));
  const double panels = std::ceil(static_cast<double>(n) / kernels::kBlock);
  const double tiles = panels * (panels + 1.0) / 4.0;  // of a symmetric product, two blocks wide
  return static_cast<int>(std::ceil(kWavesOfTiles * kMultiprocessors / tiles));
}

// Lists kept, and places of the workspace for each: torch's allocator gives other ones where sizes vary from step to
// step.  What is dropped waits for the device, so there are many; a place takes 128 bytes a tensor.
constexpr std::size_t kMaxPrepared = 32;
constexpr std::size_t kMaxPlaces = 64;

void check(const char* error, const char* what) {
  TORCH_CHECK(error == nullptr, "[dmuon.kernels] ", what, " failed: ", error,
              ". Expected a Hopper GPU (compute capability 9.0) with enough free memory.");
}

struct Key {
  at::Device device;
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes;
  std::vector<NsCoefficients> steps;
  std::vector<int> restarts;
  NsBackend backend;
  bool to_bfloat16 = false;
  bool to_caller = false;

  bool operator==(const Key&) const = default;
};

// A work list with its tables in device memory.
struct Prepared {
  Key key;
  WorkList list;
  DeviceTable ops;
  DeviceTable items;
  std::list<std::pair<const void*, DeviceTable>> maps;  // by the place of the workspace, latest use first
};

template <class T>
DeviceTable table_of(const std::vector<T>& values, const char* what) {
  DeviceTable table;
  check(table.fill(values.data(), values.size() * sizeof(T)), what);
  return table;
}

std::vector<WorkMatrix> work_of(const Key& key, const NsOptions& options) {
  std::vector<WorkMatrix> work;
  for (const auto& [rows, cols] : key.shapes) work.push_back({rows, cols, restarts_for(options, rows, cols)});
  return work;
}

WorkList list_for(const Key& key, const NsOptions& options) {
  const std::vector<WorkMatrix> matrices = work_of(key, options);
  return make_work_list(matrices, options.coefficients,
                        {.slots = slots_for(matrices),
                         .prescale = kHalfPrescale,
                         .multiprocessors = kMultiprocessors,
                         .to_bfloat16 = key.to_bfloat16,
                         .to_caller = key.to_caller});
}

void describe(const kernels::TensorMapSpec& matrix, kernels::TensorMap& to) {
  check(kernels::encode_tensor_map(matrix, to), "describing a matrix to the copy engine");
}

DeviceTable maps_at(const WorkList& list, const std::uint16_t* arena) {
  std::vector<kernels::TensorMap> maps(list.tensors.size());
  for (std::size_t i = 0; i < maps.size(); ++i) {
    const ArenaMatrix& tensor = list.tensors[i];
    describe({arena + tensor.offset, tensor.rows, tensor.cols, tensor.ld}, maps[i]);
  }
  return table_of(maps, "copying the table of tensors");
}

// Lists by shapes, for all threads of the process.
class Cache {
 public:
  std::mutex mutex;

  Prepared& find(const Key& key, const NsOptions& options) {
    const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const Prepared& p) { return p.key == key; });
    if (found != entries_.end()) {
      entries_.splice(entries_.begin(), entries_, found);
      return entries_.front();
    }
    Prepared made{.key = key, .list = list_for(key, options), .ops = {}, .items = {}, .maps = {}};
    made.ops = table_of(made.list.ops, "copying the table of products");
    made.items = table_of(made.list.items, "copying the work list");
    entries_.push_front(std::move(made));
    if (entries_.size() > kMaxPrepared) entries_.pop_back();
    return entries_.front();
  }

  static const void* maps(Prepared& prepared, const std::uint16_t* arena) {
    auto& maps = prepared.maps;
    const auto found = std::find_if(maps.begin(), maps.end(), [arena](const auto& m) { return m.first == arena; });
    if (found != maps.end()) {
      maps.splice(maps.begin(), maps, found);
    } else {
      maps.emplace_front(arena, maps_at(prepared.list, arena));
      if (maps.size() > kMaxPlaces) maps.pop_back();
    }
    return maps.front().second.data();
  }

 private:
  std::list<Prepared> entries_;  // latest use first
};

Cache& cache() {
  static auto* instance = new Cache;  // lives on: CUDA may be gone when the process ends
  return *instance;
}

Scalar scalar_of(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kHalf) return Scalar::kHalf;
  if (tensor.scalar_type() == at::kBFloat16) return Scalar::kBFloat16;
  TORCH_INTERNAL_ASSERT(tensor.scalar_type() == at::kFloat);
  return Scalar::kFloat;
}

// A part of a call: equal places in all three.
struct Part {
  std::vector<std::size_t> places;  // in the caller's list
  std::vector<PassMatrix> matrices;
};

// Large and alike matrices first, so that those side by side take about as long; parts of bounded size.
std::vector<Part> parts_of(const std::vector<PassMatrix>& matrices) {
  std::vector<std::size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), 0);
  const auto size = [&](std::size_t i) {
    const PassMatrix& m = matrices[i];
    return std::tuple(std::min(m.rows, m.cols), std::max(m.rows, m.cols), m.rows);
  };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t i, std::size_t j) { return size(i) > size(j); });
  std::vector<Part> parts;
  std::int64_t elements = 0;
  for (const std::size_t i : order) {
    const std::int64_t numel = matrices[i].rows * matrices[i].cols;
    if (parts.empty() || elements + numel > kMaxPartElements) {
      parts.emplace_back();
      elements = 0;
    }
    elements += numel;
    parts.back().places.push_back(i);
    parts.back().matrices.push_back(matrices[i]);
  }
  return parts;
}

// 16-bit results of a few matrices are written by the products themselves, where the copy engine can.
bool writes_results(const std::vector<PassMatrix>& matrices, Scalar scalar) {
  const auto writable = [](const PassMatrix& m) {
    return m.weight == nullptr && m.cols % 8 == 0 && reinterpret_cast<std::uintptr_t>(m.output) % 16 == 0;
  };
  return scalar != Scalar::kFloat && matrices.size() <= kernels::kMaxResults &&
         std::all_of(matrices.begin(), matrices.end(), writable);
}

Key key_of(const Part& part, const NsOptions& options, const at::Device& device, Scalar scalar) {
  const std::vector<PassMatrix>& matrices = part.matrices;
  Key key{device,
          {},
          options.coefficients,
          options.restarts,
          options.backend,
          scalar == Scalar::kBFloat16,
          writes_results(matrices, scalar)};
  for (const PassMatrix& matrix : matrices) key.shapes.emplace_back(matrix.rows, matrix.cols);
  return key;
}

// Queues one part.  `common` holds what all matrices share.
void run_part(Part& part, const NsOptions& options, kernels::PassArgs common, const at::Device& device) {
  const std::lock_guard lock(cache().mutex);
  Prepared& prepared = cache().find(key_of(part, options, device, common.scalar), options);
  const WorkList& list = prepared.list;
  const auto on_device = at::TensorOptions().device(device);
  const at::Tensor arena_tensor = at::empty({list.arena_elements}, on_device.dtype(at::kHalf));
  const at::Tensor counters = at::empty({list.counter_count}, on_device.dtype(at::kInt));
  auto* arena = static_cast<std::uint16_t*>(arena_tensor.data_ptr());
  const auto place = [&](std::size_t i, const std::vector<int>& tensors) {
    const ArenaMatrix& tensor = list.tensors[static_cast<std::size_t>(tensors[i])];
    part.matrices[i].x = arena + tensor.offset;
    part.matrices[i].ld = tensor.ld;
  };
  for (std::size_t i = 0; i < part.matrices.size(); ++i) place(i, list.inputs);
  const at::Tensor workspace = at::empty({kernels::normalize_workspace(part.matrices)}, on_device.dtype(at::kDouble));
  common.matrices = part.matrices;
  common.scale = std::ldexp(1.0, kHalfPrescale);
  common.workspace = workspace.data_ptr<double>();
  common.zeros = counters.data_ptr<std::int32_t>();
  common.zero_count = list.counter_count;

  cudaStream_t stream = current_stream(device);
  check(kernels::normalize(common, stream), "normalising");
  kernels::TileProductArgs products{.ops = static_cast<const kernels::TileOp*>(prepared.ops.data()),
                                    .items = static_cast<const kernels::WorkItem*>(prepared.items.data()),
                                    .item_count = static_cast<std::int32_t>(list.items.size()),
                                    .tensor_maps = Cache::maps(prepared, arena),
                                    .counters = common.zeros,
                                    .counter_count = list.counter_count};
  const bool to_caller = prepared.key.to_caller;
  for (std::size_t i = 0; to_caller && i < part.matrices.size(); ++i) {
    const PassMatrix& m = part.matrices[i];
    describe({m.output, m.rows, m.cols, m.cols}, products.results[i]);
  }
  check(kernels::run_tile_products(products, stream), "Newton-Schulz");
  if (to_caller) return;
  for (std::size_t i = 0; i < part.matrices.size(); ++i) place(i, list.results);
  check(kernels::finish(common, stream), "the update");
}

}  // namespace

bool gpu_engine_supports(const at::Device& device) {
  if (!device.is_cuda()) return false;
  const c10::DeviceGuard guard(device);
  return kernels::tile_products_supported();
}

std::vector<at::Tensor> gpu_newton_schulz(const std::vector<at::Tensor>& matrices, const NsOptions& options) {
  const at::Device device = matrices.front().device();
  const c10::DeviceGuard guard(device);
  std::vector<at::Tensor> inputs;  // keeps contiguous copies alive until the work is queued
  std::vector<at::Tensor> outputs;
  std::vector<PassMatrix> list;
  for (const at::Tensor& matrix : matrices) {
    inputs.push_back(matrix.contiguous());
    outputs.push_back(at::empty(matrix.sizes(), matrix.options()));
    list.push_back({.input = inputs.back().data_ptr(),
                    .output = outputs.back().data_ptr(),
                    .rows = matrix.size(0),
                    .cols = matrix.size(1)});
  }
  for (Part& part : parts_of(list))
    run_part(part, options, {.matrices = {}, .scalar = scalar_of(matrices.front())}, device);
  return outputs;
}

std::vector<at::Tensor> gpu_muon_step(const std::vector<GpuMuonMatrix>& matrices, const GpuMuonOptions& muon,
                                      const NsOptions& options) {
  const at::Device device = matrices.front().weight.device();
  const c10::DeviceGuard guard(device);
  std::vector<PassMatrix> list;
  for (const GpuMuonMatrix& matrix : matrices) {
    list.push_back({.input = matrix.grad.data_ptr(),
                    .momentum = matrix.momentum.data_ptr<float>(),
                    .weight = matrix.weight.data_ptr<float>(),
                    .rows = matrix.weight.size(0),
                    .cols = matrix.weight.size(1),
                    .step = static_cast<float>(matrix.step)});
  }
  const auto count = static_cast<std::int64_t>(matrices.size());
  const at::Tensor finite = at::empty({count}, at::TensorOptions().device(device).dtype(at::kBool));
  const std::vector<at::Tensor> flags = finite.unbind(0);
  std::vector<at::Tensor> results(matrices.size());
  std::size_t done = 0;
  for (Part& part : parts_of(list)) {
    run_part(part, options,
             {.matrices = {},
              .momentum = static_cast<float>(muon.momentum),
              .nesterov = muon.nesterov,
              .decay = static_cast<float>(muon.decay),
              .finite = finite.data_ptr<bool>() + done},
             device);
    for (const std::size_t place : part.places) results[place] = flags[done++];
  }
  for (const GpuMuonMatrix& matrix : matrices) {  // as torch's own in-place operations: autograd must see the change
    matrix.momentum.unsafeGetTensorImpl()->bump_version();
    matrix.weight.unsafeGetTensorImpl()->bump_version();
  }
  return results;
}

std::int64_t gpu_workspace_bytes(const std::vector<std::pair<std::int64_t, std::int64_t>>& shapes,
                                 const NsOptions& options) {
  std::vector<PassMatrix> matrices;
  for (const auto& [rows, cols] : shapes) {
    auto& matrix = matrices.emplace_back();
    matrix.rows = rows;
    matrix.cols = cols;
  }
  std::int64_t most = 0;  // parts run one after the other
  for (const Part& part : parts_of(matrices)) {
    const WorkList list = list_for(key_of(part, options, at::Device(at::kCPU), Scalar::kFloat), options);
    const auto halves = list.arena_elements * static_cast<std::int64_t>(sizeof(std::uint16_t));
    const auto counters = list.counter_count * static_cast<std::int64_t>(sizeof(std::int32_t));
    const auto norms = kernels::normalize_workspace(part.matrices) * static_cast<std::int64_t>(sizeof(double));
    most = std::max(most, halves + counters + norms);
  }
  return most;
}

#else

bool gpu_engine_supports(const at::Device&) { return false; }

std::vector<at::Tensor> gpu_newton_schulz(const std::vector<at::Tensor>&, const NsOptions&) {
  TORCH_INTERNAL_ASSERT(false, "built without kernels");
}

std::vector<at::Tensor> gpu_muon_step(const std::vector<GpuMuonMatrix>&, const GpuMuonOptions&, const NsOptions&) {
  TORCH_INTERNAL_ASSERT(false, "built without kernels");
}

std::int64_t gpu_workspace_bytes(const std::vector<std::pair<std::int64_t, std::int64_t>>&, const NsOptions&) {
  return 0;
}

#endif

}  // namespace dmuon
