// What the tile-product kernel executes: a table of products and a list of output tiles, both in device memory.
//
// A product is D = alpha * A B + beta * C on fp16 matrices with fp32 accumulation.  A work item names a tile of D,
// which one thread block computes.  Items wait for the panels (kBlock rows or columns) of earlier products that they
// read, by counters in device memory, so products that depend on each other run in one launch.  Thread blocks take
// items in list order, whichever is free: an item may only wait for items before it, and then the list runs to its end
// on any number of resident thread blocks.
//
// Written by newton_schulz (src/newton_schulz/work_list.h), read by tile_product.cu.  Plain data, no CUDA header.
#pragma once

#include <cstdint>

namespace dmuon::kernels {

inline constexpr int kBox = 64;          ///< rows and columns of what is copied at a time
inline constexpr int kBlock = 2 * kBox;  ///< rows and columns of an output block; a panel is a row or column of blocks
inline constexpr int kMirrorBoxes = 4;   ///< a square of so many boxes on the diagonal holds both its halves
inline constexpr int kResultTensors = 1 << 20;  ///< tensor kResultTensors + i is the caller's i-th result
inline constexpr int kSignalsABlock = 4;  ///< a finished block adds this to each counter it signals, one for each box

/// "counters[base + panel] has reached target"; base < 0: nothing to wait for.
struct PanelWait {
  std::int32_t base = -1;
  std::int32_t target = 0;
};

/// A [rows, depth] and B [depth, cols].  Where an operand lies as its depth index contiguous, it is "depth-major".
/// Tensors are named by their place in the table of tensors.
///
/// A half-stored symmetric matrix has no values above its diagonal but in the squares of kMirrorBoxes boxes on it: they
/// are read from below, turned over by the matrix instruction.  Half the stores, and code for each way of reading.
struct alignas(16) TileOp {
  float alpha = 1.0F;
  float beta = 0.0F;
  float gamma = 0.0F;  ///< d2 = D + gamma * I
  std::int32_t a = 0;
  std::int32_t b = 0;
  std::int32_t c = 0;  ///< unused when beta is 0
  std::int32_t d = 0;
  std::int32_t d2 = -1;  ///< second output of a symmetric product, or -1
  std::int32_t rows = 0;
  std::int32_t cols = 0;
  std::int32_t depth = 0;
  std::int32_t symmetric = 0;     ///< D is: only blocks on and below the diagonal are computed
  std::int32_t width = 4;         ///< of its tiles, in boxes: 1, 2 or 4; tiles at a diagonal may be narrower
  std::int32_t depth_major = 3;   ///< bit 0: A lies depth-major ([rows, depth]); bit 1: B does ([cols, depth])
  std::int32_t half_stored = 0;   ///< bit 0: A is, and depth-major; bit 1: B is; bit 2: D is to be
  PanelWait row_waits[2];         ///< base + block row
  PanelWait col_waits[2];         ///< base + block column
  PanelWait all_wait;             ///< base alone
  std::int32_t signal_rows = -1;  ///< counters[signal_rows + block row] counts blocks of that row, and so on
  std::int32_t signal_cols = -1;
  std::int32_t signal_all = -1;
  std::int32_t to_bfloat16 = 0;  ///< D is rounded to bf16 instead of fp16: a result
  std::int32_t unused[2] = {};
};
static_assert(sizeof(TileOp) == 128, "one warp copies it, four bytes a lane");

/// A tile of D: one block high, `boxes` boxes wide (1, 2 or 4, at most TileOp::width).  It starts at a block row and a
/// box column, an even one if the tile is wider than a box.
struct WorkItem {
  std::int32_t op = 0;
  std::int16_t block_row = 0;
  std::int16_t box_col = 0;
  std::int32_t boxes = 0;
};

}  // namespace dmuon::kernels
