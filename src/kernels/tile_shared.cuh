// What the warps of a thread block of the tile-product kernel share: memory, barriers and rings.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/hopper.cuh"
#include "kernels/tile_product.h"

namespace dmuon::kernels::tiles {

using namespace hopper;  // NOLINT

constexpr int kBoxBytes = kBox * kBox * 2;  // 8 KiB
constexpr int kMultipliers = 2;             // warpgroups of 64 rows
constexpr int kThreads = 128 * (1 + kMultipliers);
constexpr int kWarps = 4;         // of a multiplier
constexpr int kSlots = 2;         // no more: a ticket that waits here is one that no idle block can take
constexpr int kStagingBoxes = 2;  // for each multiplier
constexpr int kMaxSharedBytes = 232448;
constexpr int kAlignment = 1024;                                     // of boxes: the swizzle repeats every 8 lines
constexpr int kSlotReaders = 1 + kMultipliers + 128 * kMultipliers;  // loader, storers, all threads that multiply

struct alignas(16) Slot {
  TileOp op;
  WorkItem item;  // boxes is 0 after the last one
};

// A stage holds A's and B's boxes at one depth, or boxes of C.  The memory for stages is cut anew for products of
// another tile width, so that narrow tiles have as many bytes on their way.
constexpr int kABoxes = kBlock / kBox;
constexpr int kMaxBoxes = 4;
constexpr int kStageBoxes = 4 * (kABoxes + kMaxBoxes);  // of all stages: 4 of the widest, 6 or 8 of the others
constexpr int kMaxStages = kStageBoxes / (kABoxes + 1);

// Boxes of C in a stage: both of the block's rows by so many columns.
constexpr __host__ __device__ int c_columns(int boxes) { return boxes < 2 ? boxes : 2; }

struct Shared {
  std::uint8_t stages[kStageBoxes][kBoxBytes];
  std::uint8_t staging[kMultipliers][kStagingBoxes][kBoxBytes];
  Slot slots[kSlots];
  std::uint64_t stage_full[kMaxStages];
  std::uint64_t stage_free[kMaxStages];
  std::uint64_t slot_full[kSlots];
  std::uint64_t slot_free[kSlots];
  std::uint64_t staged[kMultipliers][kStagingBoxes];
  std::uint64_t stored[kMultipliers][kStagingBoxes];
  std::uint64_t first_through;  // the first multiplier has queued a tile's last product
};

// A place in a ring of kCount, and the parity of the current round.
template <int kCount>
struct Ring {
  int index = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1U;
    }
  }
};

// The stages in use: where the next one lies, and the parity of each one's next round.
struct StageRing {
  std::uint32_t memory;  // of all stages
  std::uint32_t place;
  std::uint32_t bytes = 0;  // of a stage
  int width = 0;            // in boxes, of the tiles that the memory is cut for
  int count = 0;
  int index = 0;
  unsigned parities = 0;

  __device__ explicit StageRing(const Shared& shared) : memory(shared_address(shared.stages)), place(memory) {}

  __device__ unsigned parity() const { return (parities >> index) & 1U; }

  __device__ void advance() {
    parities ^= 1U << index;
    place += bytes;
    if (++index < count) return;
    index = 0;
    place = memory;
  }

  __device__ void cut(int new_width) {
    width = new_width;
    bytes = static_cast<std::uint32_t>((kABoxes + width) * kBoxBytes);
    count = width == 4 ? kStageBoxes / (kABoxes + 4) : width == 2 ? kStageBoxes / (kABoxes + 2) : kMaxStages;
    index = 0;
    place = memory;
  }
};

__device__ inline void init_barriers(Shared& shared) {
  for (std::uint64_t& barrier : shared.stage_full) barrier_init(shared_address(&barrier), 1);
  for (std::uint64_t& barrier : shared.stage_free) barrier_init(shared_address(&barrier), kMultipliers);
  for (std::uint64_t& barrier : shared.slot_full) barrier_init(shared_address(&barrier), 32);
  for (std::uint64_t& barrier : shared.slot_free) barrier_init(shared_address(&barrier), kSlotReaders);
  for (int i = 0; i < kMultipliers; ++i) {
    for (std::uint64_t& barrier : shared.staged[i]) barrier_init(shared_address(&barrier), kWarps);
    for (std::uint64_t& barrier : shared.stored[i]) barrier_init(shared_address(&barrier), 1);
  }
  barrier_init(shared_address(&shared.first_through), 1);
  fence_barrier_init();
}

__device__ inline const void* map_at(const TileProductArgs& args, int tensor) {
  if (tensor >= kResultTensors) return &args.results[tensor - kResultTensors];
  return static_cast<const std::uint8_t*>(args.tensor_maps) + static_cast<std::size_t>(tensor) * kTensorMapBytes;
}

__device__ inline int blocks_of(int extent) { return (extent + kBlock - 1) / kBlock; }
__device__ inline int steps_of(int depth) { return (depth + kBox - 1) / kBox; }

// The steps from which half-stored operands are read the other way round; `steps`, the whole depth, if never.
struct Turns {
  int steps;
  int a;
  int b;

  __device__ Turns(const TileOp& op, const WorkItem& item)
      : steps(steps_of(op.depth)),
        a(turn((op.half_stored & 1) != 0, item.block_row * kABoxes)),
        b(turn((op.half_stored & 2) != 0, item.box_col)) {}

  // The first one after `done`.
  __device__ int next(int done) const {
    const int first = done < a ? a : steps;
    return done < b && b < first ? b : first;
  }

 private:
  __device__ int turn(bool half_stored, int along) const {
    return half_stored ? min(steps, kMirrorBoxes * (along / kMirrorBoxes + 1)) : steps;
  }
};

enum class BoxKind { kNone, kFull, kDiagonal };

// Which boxes of D are kept, in registers.  Boxes are named by (row, col), counted in boxes.
struct Output {
  int rows;
  int cols;
  bool symmetric;
  bool half_stored;

  __device__ explicit Output(const TileOp& op)
      : rows(op.rows), cols(op.cols), symmetric(op.symmetric != 0), half_stored((op.half_stored & 4) != 0) {}

  // Of a symmetric product nothing above the diagonal is kept.
  __device__ BoxKind kind(int row, int col) const {
    if (row * kBox >= rows || col * kBox >= cols) return BoxKind::kNone;
    if (!symmetric || row > col) return BoxKind::kFull;
    return row == col ? BoxKind::kDiagonal : BoxKind::kNone;
  }

  // Whether a full box is stored a second time, above the diagonal.
  __device__ bool is_mirrored(int row, int col) const {
    return half_stored ? row / kMirrorBoxes == col / kMirrorBoxes : symmetric;
  }
};

}  // namespace dmuon::kernels::tiles
