// All Newton-Schulz products of a list of matrices as one work list for the tile-product kernel.
//
// Plain C++: no torch, no CUDA.  The arithmetic is that of iteration.h, in the same order.  A matrix keeps its iterate
// X in two tensors of its own; the square matrices of the iteration lie in a slot that matrices take in turn.  Matrices
// of different slots advance side by side, so that one fills the GPU while another's next product waits.
//
// Products wait for panels, not for whole products: a tile of S T reads one block row of S and one block column of T.
// What need not be waited for is explained at each product in work_list.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dmuon/ns_coefficients.h"
#include "kernels/tile_work.h"

namespace dmuon {

struct WorkMatrix {
  std::int64_t rows = 0;  ///< > 0
  std::int64_t cols = 0;  ///< > 0
  std::vector<int> restarts;
};

/// A row-major fp16 matrix in the arena; offset and ld in elements.
struct ArenaMatrix {
  std::int64_t offset = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t ld = 0;
};

struct WorkList {
  std::vector<kernels::TileOp> ops;
  std::vector<kernels::WorkItem> items;
  std::vector<ArenaMatrix> tensors;  ///< the table of tensor maps
  std::vector<int> inputs;           ///< per matrix: where its normalised X is expected, an index into `tensors`
  std::vector<int> results;          ///< per matrix: where its X_T is left; kResultTensors + i if not in the arena
  std::int64_t arena_elements = 0;
  std::int32_t counter_count = 0;  ///< with the ticket counter, the last one
};

struct WorkOptions {
  int slots = 1;  ///< matrices in work side by side
  int prescale = 0;
  int multiprocessors = 132;
  int width = 0;             ///< of all tiles, in boxes; 0 for tile_width
  bool to_bfloat16 = false;  ///< X_T is rounded to bf16 instead of fp16
  bool to_caller = false;    ///< X_T is written to the caller's results, not into the arena
};

/// Boxes to make the tiles of a product wide when `alike` such products are in work side by side.  Narrow tiles fill
/// the GPU with few products, wide ones load less for each operation.
[[nodiscard]] int tile_width(const kernels::TileOp& op, int alike, int multiprocessors);

/// `steps` is not empty.  Restarts outside [1, steps) do nothing.
[[nodiscard]] WorkList make_work_list(std::span<const WorkMatrix> matrices, std::span<const NsCoefficients> steps,
                                      const WorkOptions& options);

}  // namespace dmuon
