// One thread block: 4 warps that move data and 2 warpgroups that multiply.
//
//   scheduler  takes tickets, copies the product and the item to a slot of a ring, waits for what the item reads
//   loader     fills a ring of stages with boxes of A and B, and then of C
//   multiplier (two, 64 rows each)  sums over the depth in registers, adds beta * C, rounds, and stages boxes to store
//   storer     (one for each multiplier)  writes the staged boxes and signals the finished blocks
//
// So the next item's loads and the last one's stores run beside the matrix instructions.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>

#include "kernels/hopper.cuh"
#include "kernels/tile_product.h"
#include "kernels/wgmma.cuh"

namespace dmuon::kernels {
namespace {

using namespace hopper;  // NOLINT

constexpr int kBoxBytes = kBox * kBox * 2;     // 8 KiB
constexpr int kMultipliers = 2;                // warpgroups of 64 rows
constexpr int kThreads = 128 * (1 + kMultipliers);
constexpr int kSlots = 4;
constexpr int kStagingBoxes = 2;  // for each multiplier
constexpr int kMaxSharedBytes = 232448;
constexpr int kAlignment = 1024;  // of boxes: the swizzle repeats every 8 lines
constexpr int kSlotReaders = 1 + kMultipliers + 4 * kMultipliers;  // loader, storers, multiplier warps

struct alignas(16) Slot {
  TileOp op;
  WorkItem item;  // boxes is 0 after the last one
};

// A stage holds A's and B's boxes at one depth, or boxes of C.  The memory for stages is cut anew for products of another
// tile width, so that narrow tiles have as many bytes on their way.
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

  __device__ explicit StageRing(const Shared& shared)
      : memory(shared_address(shared.stages)), place(memory) {}

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

__device__ void init_barriers(Shared& shared) {
  for (std::uint64_t& barrier : shared.stage_full) barrier_init(shared_address(&barrier), 1);
  for (std::uint64_t& barrier : shared.stage_free) barrier_init(shared_address(&barrier), kMultipliers);
  for (std::uint64_t& barrier : shared.slot_full) barrier_init(shared_address(&barrier), 1);
  for (std::uint64_t& barrier : shared.slot_free) barrier_init(shared_address(&barrier), kSlotReaders);
  for (int i = 0; i < kMultipliers; ++i) {
    for (std::uint64_t& barrier : shared.staged[i]) barrier_init(shared_address(&barrier), 128);
    for (std::uint64_t& barrier : shared.stored[i]) barrier_init(shared_address(&barrier), 1);
  }
  fence_barrier_init();
}

__device__ const void* map_at(const TileProductArgs& args, int tensor) {
  return static_cast<const std::uint8_t*>(args.tensor_maps) + static_cast<std::size_t>(tensor) * kTensorMapBytes;
}

__device__ int blocks_of(int extent) { return (extent + kBlock - 1) / kBlock; }
__device__ int steps_of(int depth) { return (depth + kBox - 1) / kBox; }

// --- scheduler ------------------------------------------------------------------------------------------------------

__device__ void prefetch_maps(const TileProductArgs& args, const TileOp& op, int lane) {
  if (lane == 0) prefetch_map(map_at(args, op.a));
  if (lane == 1) prefetch_map(map_at(args, op.b));
  if (lane == 2) prefetch_map(map_at(args, op.c));
  if (lane == 3) prefetch_map(map_at(args, op.d));
}

// What lane `lane` waits for, as a counter and its target; -1 for nothing.
__device__ PanelWait wait_of_lane(const TileOp& op, const WorkItem& item, int lane) {
  const int panel = lane / 2 - 1;  // of the columns: the tile lies in one or two
  if (lane < 2) {
    const PanelWait wait = op.row_waits[lane];
    return {wait.base >= 0 ? wait.base + item.block_row : -1, wait.target};
  }
  const int col = item.box_col / 2 + panel;
  if (lane < 6 && 2 * panel < item.boxes && col < blocks_of(op.cols)) {
    const PanelWait wait = op.col_waits[lane % 2];
    return {wait.base >= 0 ? wait.base + col : -1, wait.target};
  }
  return lane == 6 ? op.all_wait : PanelWait{};
}

__device__ void wait_for(const int* counters, const PanelWait& wait) {
  bool reached = wait.base < 0;
  while (true) {
    if (!reached) reached = load_acquire(counters + wait.base) >= wait.target;
    if (__all_sync(~0U, reached)) return;
  }
}

__device__ void schedule(Shared& shared, const TileProductArgs& args) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int* tickets = args.counters + args.counter_count - 1;
  for (Ring<kSlots> ring;; ring.advance()) {
    Slot& slot = shared.slots[ring.index];
    int ticket = 0;
    if (lane == 0) {
      barrier_wait(shared_address(&shared.slot_free[ring.index]), ring.parity ^ 1U);
      ticket = atomicAdd(tickets, 1);
    }
    ticket = __shfl_sync(~0U, ticket, 0);
    WorkItem item{};
    if (ticket < args.item_count) {
      item = args.items[ticket];
      reinterpret_cast<int*>(&slot.op)[lane] = reinterpret_cast<const int*>(args.ops + item.op)[lane];
      __syncwarp();
      prefetch_maps(args, slot.op, lane);
      wait_for(args.counters, wait_of_lane(slot.op, item, lane));
    }
    if (lane == 0) slot.item = item;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.slot_full[ring.index]));
    if (item.boxes == 0) return;
  }
}

// --- loader ---------------------------------------------------------------------------------------------------------

// Boxes of an operand: where the first lies, and how far the next box and the next depth are.
struct Boxes {
  const void* map;
  int2 place;
  int2 next;
  int2 step;

  __device__ void load(int count, std::uint32_t to, std::uint32_t full) const {
    for (int i = 0; i < count; ++i) load_box(to + i * kBoxBytes, map, place.x + i * next.x, place.y + i * next.y, full);
  }

  __device__ void advance() {
    place.x += step.x;
    place.y += step.y;
  }
};

// `along` is the first row of A or column of B.
__device__ Boxes operand_boxes(const void* map, bool depth_major, int along) {
  if (depth_major) return {map, make_int2(0, along), make_int2(0, kBox), make_int2(kBox, 0)};
  return {map, make_int2(along, 0), make_int2(kBox, 0), make_int2(0, kBox)};
}

struct Loader {
  Shared& shared;
  const TileProductArgs& args;
  StageRing stages;

  __device__ void wait_free(int index, unsigned parity) {
    barrier_wait(shared_address(&shared.stage_free[index]), parity ^ 1U);
  }

  // Stages of another size may only be written when all of the old ones are read.
  __device__ void cut(int width) {
    if (width == stages.width) return;
    for (int i = 0; i < stages.count; ++i) wait_free(i, (stages.parities >> i) & 1U);
    stages.cut(width);
  }

  // The next stage's barrier, with `boxes` boxes to come.
  __device__ std::uint32_t open_stage(int boxes) {
    wait_free(stages.index, stages.parity());
    const std::uint32_t full = shared_address(&shared.stage_full[stages.index]);
    barrier_arrive_expect(full, static_cast<unsigned>(boxes * kBoxBytes));
    return full;
  }

  __device__ void load_operands(const TileOp& op, const WorkItem& item) {
    Boxes a = operand_boxes(map_at(args, op.a), (op.depth_major & 1) != 0, item.block_row * kBlock);
    Boxes b = operand_boxes(map_at(args, op.b), (op.depth_major & 2) != 0, item.box_col * kBox);
    const int boxes = item.boxes;
    for (int step = steps_of(op.depth); step > 0; --step) {
      const std::uint32_t full = open_stage(kABoxes + boxes);
      a.load(kABoxes, stages.place, full);
      b.load(boxes, stages.place + kABoxes * kBoxBytes, full);
      a.advance();
      b.advance();
      stages.advance();
    }
  }

  // The boxes of C that the multipliers need after the last depth: c_columns() columns at a time, each of both rows.
  __device__ void load_c(const TileOp& op, const WorkItem& item) {
    const int columns = c_columns(item.boxes);
    for (int col = 0; col < item.boxes; col += columns) {
      const std::uint32_t full = open_stage(kMultipliers * columns);
      for (int i = 0; i < columns; ++i) {
        const int2 place = make_int2((item.box_col + col + i) * kBox, item.block_row * kBlock);
        const Boxes both{map_at(args, op.c), place, make_int2(0, kBox), {}};
        both.load(kMultipliers, stages.place + i * kMultipliers * kBoxBytes, full);
      }
      stages.advance();
    }
  }
};

__device__ void load(Shared& shared, const TileProductArgs& args) {
  Loader loader{shared, args, StageRing(shared)};
  for (Ring<kSlots> slots;; slots.advance()) {
    barrier_wait(shared_address(&shared.slot_full[slots.index]), slots.parity);
    const Slot& slot = shared.slots[slots.index];
    if (slot.item.boxes == 0) return;
    loader.cut(slot.op.width);
    fence_async();  // what the scheduler waited for was written by copy engines, and is read by this one
    loader.load_operands(slot.op, slot.item);
    if (slot.op.beta != 0.0F) loader.load_c(slot.op, slot.item);
    barrier_arrive(shared_address(&shared.slot_free[slots.index]));
  }
}

// --- what a multiplier's part of an item consists of ----------------------------------------------------------------

enum class BoxKind { kNone, kFull, kDiagonal };

// Output box (row, col), counted in boxes.  Of a symmetric product nothing above the diagonal is kept.
__device__ BoxKind kind_of_box(const TileOp& op, int row, int col) {
  if (row * kBox >= op.rows || col * kBox >= op.cols) return BoxKind::kNone;
  if (op.symmetric == 0 || row > col) return BoxKind::kFull;
  return row == col ? BoxKind::kDiagonal : BoxKind::kNone;
}

// --- storer ---------------------------------------------------------------------------------------------------------

// Takes the staged boxes in the order in which the multiplier stages them.
struct Storer {
  Shared& shared;
  const TileProductArgs& args;
  int which;
  Ring<kStagingBoxes> ring;
  int unread = -1;  // the box of the last store, which may still be read

  __device__ std::uint32_t wait_staged() {
    barrier_wait(shared_address(&shared.staged[which][ring.index]), ring.parity);
    return shared_address(shared.staging[which][ring.index]);
  }

  __device__ void free_unread() {
    if (unread >= 0) barrier_arrive(shared_address(&shared.stored[which][unread]));
  }

  // The box before this one is read by now, or soon.
  __device__ void commit() {
    store_commit();
    store_wait_read<1>();
    free_unread();
    unread = ring.index;
    ring.advance();
  }

  __device__ void finish() {
    store_wait_read<0>();
    free_unread();
    unread = -1;
    store_wait();
  }

  __device__ void store(const TileOp& op, BoxKind kind, int row, int col) {
    const bool both = op.d2 >= 0;
    std::uint32_t from = wait_staged();
    store_box(map_at(args, op.d), col * kBox, row * kBox, from);
    if (both && kind == BoxKind::kFull) store_box(map_at(args, op.d2), col * kBox, row * kBox, from);
    commit();
    if (op.symmetric == 0 || (kind == BoxKind::kDiagonal && !both)) return;
    from = wait_staged();
    if (kind == BoxKind::kDiagonal) {
      store_box(map_at(args, op.d2), col * kBox, row * kBox, from);
    } else {
      store_box(map_at(args, op.d), row * kBox, col * kBox, from);
      if (both) store_box(map_at(args, op.d2), row * kBox, col * kBox, from);
    }
    commit();
  }
};

// Tells the items that wait for these boxes.  Both storers do, each for its half of every block.  Of a symmetric product
// no item covers a block above the diagonal, so every panel is touched by as many blocks as there are panels.
__device__ void signal(const TileOp& op, const WorkItem& item, int* counters) {
  int count = 0;
  const int boxes = c_columns(item.boxes);  // of a panel
  for (int panel = item.box_col / 2; 2 * panel < item.box_col + item.boxes && panel < blocks_of(op.cols); ++panel) {
    count += boxes;
    if (op.signal_cols >= 0 && (op.symmetric == 0 || panel != item.block_row)) {
      add_relaxed(counters + op.signal_cols + panel, boxes);
    }
  }
  if (op.signal_rows >= 0) add_relaxed(counters + op.signal_rows + item.block_row, count);
  if (op.signal_all >= 0) add_relaxed(counters + op.signal_all, count);
}

__device__ void store(Shared& shared, const TileProductArgs& args, int which) {
  Storer storer{shared, args, which, {}};
  for (Ring<kSlots> slots;; slots.advance()) {
    barrier_wait(shared_address(&shared.slot_full[slots.index]), slots.parity);
    const Slot& slot = shared.slots[slots.index];
    if (slot.item.boxes == 0) return;
    const int row = slot.item.block_row * (kBlock / kBox) + which;
    for (int col = slot.item.box_col; col < slot.item.box_col + slot.item.boxes; ++col) {
      const BoxKind kind = kind_of_box(slot.op, row, col);
      if (kind != BoxKind::kNone) storer.store(slot.op, kind, row, col);
    }
    storer.finish();
    __threadfence();
    signal(slot.op, slot.item, args.counters);
    barrier_arrive(shared_address(&shared.slot_free[slots.index]));
  }
}

// --- multiplier -----------------------------------------------------------------------------------------------------

struct Multiplier {
  Shared& shared;
  int which;
  int warp;
  int lane;
  StageRing stages;
  Ring<kStagingBoxes> ring;

  __device__ std::uint32_t wait_stage() {
    barrier_wait(shared_address(&shared.stage_full[stages.index]), stages.parity());
    return stages.place;
  }

  // Tells the loader that this warpgroup has read a stage.
  __device__ void free_stage(int index) {
    if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(&shared.stage_free[index]));
  }

  template <bool kADepthMajor, bool kBDepthMajor, int kSums>
  __device__ void multiply(float (&sum)[kSums], int depth) {
    int previous = -1;
    for (int k = 0; k < depth; k += kBox, stages.advance()) {
      const std::uint32_t stage = wait_stage();
      const std::uint32_t a = stage + which * kBoxBytes;
      const std::uint32_t b = stage + kABoxes * kBoxBytes;
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma<kADepthMajor, kBDepthMajor>(sum, operand<kADepthMajor>(a, step), operand<kBDepthMajor>(b, step),
                                          k + step);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0) free_stage(previous);
      previous = stages.index;
    }
    wgmma_wait<0>();
    free_stage(previous);
  }

  __device__ std::uint32_t wait_free_box() {
    barrier_wait(shared_address(&shared.stored[which][ring.index]), ring.parity ^ 1U);
    return shared_address(shared.staging[which][ring.index]);
  }

  __device__ void pass_on_box() {
    fence_async_shared();
    barrier_arrive(shared_address(&shared.staged[which][ring.index]));
    ring.advance();
  }

  // A box as the copy engine reads it: 16-byte chunk `chunk` of line `line` lies at chunk ^ (line % 8).
  __device__ static std::uint32_t swizzled(std::uint32_t box, int line, int chunk) {
    return box + static_cast<std::uint32_t>(line * 128 + ((chunk ^ (line & 7)) * 16));
  }

  // The place of this lane's line among the 8x8 blocks of this warp, block columns j and j + 1.
  template <bool kTransposed>
  __device__ std::uint32_t place_in(std::uint32_t box, int j) const {
    const int in_block = lane % 8;
    const int half = lane / 8 % 2;
    const int column = j + lane / 16;
    return kTransposed ? swizzled(box, 8 * column + in_block, 2 * warp + half)
                       : swizzled(box, 16 * warp + 8 * half + in_block, column);
  }

  template <bool kTransposed>
  __device__ void stage(const std::uint32_t (&values)[16]) {
    const std::uint32_t box = wait_free_box();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const std::uint32_t place = place_in<kTransposed>(box, j);
      store_matrices<kTransposed>(place, {values[2 * j], values[2 * j + 1], values[2 * j + 2], values[2 * j + 3]});
    }
    pass_on_box();
  }

  // A box on the diagonal: what is on and below it, and its mirror image.
  __device__ void stage_diagonal(const std::uint32_t (&values)[16], float gamma) {
    const std::uint32_t box = wait_free_box();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
      const int col = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      if (row < col) continue;
      const std::uint32_t pair = values[i / 2];
      auto bits = static_cast<std::uint16_t>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16);
      if (row == col && gamma != 0.0F) {
        bits = __half_as_ushort(__float2half_rn(__half2float(__ushort_as_half(bits)) + gamma));
      }
      const std::uint32_t places[2] = {swizzled(box, row, col / 8) + 2U * (col % 8),
                                       swizzled(box, col, row / 8) + 2U * (row % 8)};
      for (const std::uint32_t place : places) {
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(place), "h"(bits) : "memory");
      }
    }
    pass_on_box();
  }

  // alpha * sum + beta * C, rounded.  c_box is the box of C in shared memory, or 0 for none.
  __device__ void combine(const float* sum, const TileOp& op, std::uint32_t c_box, std::uint32_t (&values)[16]) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      std::uint32_t c[4] = {};
      if (c_box != 0) load_matrices(place_in<false>(c_box, j), c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 old = __half22float2(*reinterpret_cast<const __half2*>(&c[i]));
        const float* pair = sum + 2 * (2 * j + i);
        const __half2 value =
            __floats2half2_rn(op.alpha * pair[0] + op.beta * old.x, op.alpha * pair[1] + op.beta * old.y);
        values[2 * j + i] = *reinterpret_cast<const std::uint32_t*>(&value);
      }
    }
  }

  __device__ void finish_box(const float* sum, const TileOp& op, BoxKind kind, std::uint32_t c_box) {
    if (kind == BoxKind::kNone) return;
    std::uint32_t values[16];
    combine(sum, op, c_box, values);
    if (kind == BoxKind::kDiagonal) {
      stage_diagonal(values, 0.0F);
      if (op.d2 >= 0) stage_diagonal(values, op.gamma);
      return;
    }
    stage<false>(values);
    if (op.symmetric != 0) stage<true>(values);
  }

  __device__ void finish(const float (&sum)[32 * kMaxBoxes], const TileOp& op, int row, int col, int boxes) {
    const bool with_c = op.beta != 0.0F;
    std::uint32_t stage = 0;
#pragma unroll
    for (int box = 0; box < kMaxBoxes; ++box) {
      if (box >= boxes) break;
      if (with_c && box % 2 == 0) stage = wait_stage();
      const std::uint32_t c_box = with_c ? stage + (box % 2 * kMultipliers + which) * kBoxBytes : 0U;
      finish_box(sum + 32 * box, op, kind_of_box(op, row, col + box), c_box);
      if (!with_c || (box % 2 == 0 && boxes > 1)) continue;
      warpgroup_sync(1 + which);  // all four warps have read it
      free_stage(stages.index);
      stages.advance();
    }
  }

  template <int kBoxes>
  __device__ void multiply_for(float (&sum)[32 * kBoxes], const TileOp& op) {
    if (op.depth_major == 3) {
      multiply<true, true>(sum, op.depth);
    } else if (op.depth_major == 1) {
      multiply<true, false>(sum, op.depth);
    } else {
      multiply<false, false>(sum, op.depth);
    }
  }

  __device__ void run(const Slot& slot) {
    const int row = slot.item.block_row * (kBlock / kBox) + which;
    const int boxes = slot.item.boxes;
    if (slot.op.width != stages.width) stages.cut(slot.op.width);
    float sum[32 * kMaxBoxes];
    if (boxes == 4) {
      multiply_for<4>(sum, slot.op);
    } else if (boxes == 2) {
      multiply_for<2>(reinterpret_cast<float(&)[64]>(sum), slot.op);
    } else {
      multiply_for<1>(reinterpret_cast<float(&)[32]>(sum), slot.op);
    }
    finish(sum, slot.op, row, slot.item.box_col, boxes);
  }
};

__device__ void multiply_items(Shared& shared, int which) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Multiplier multiplier{shared, which, static_cast<int>(threadIdx.x / 32 % 4), lane, StageRing(shared), {}};
  for (Ring<kSlots> slots;; slots.advance()) {
    barrier_wait(shared_address(&shared.slot_full[slots.index]), slots.parity);
    const Slot& slot = shared.slots[slots.index];
    if (slot.item.boxes == 0) return;
    multiplier.run(slot);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.slot_free[slots.index]));
  }
}

// --- the kernel -----------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1) tile_products(const TileProductArgs args) {
  extern __shared__ std::uint8_t raw[];
  const std::uint32_t misaligned = shared_address(raw) % kAlignment;
  auto& shared = *reinterpret_cast<Shared*>(raw + (misaligned == 0 ? 0 : kAlignment - misaligned));
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();

  const int group = static_cast<int>(threadIdx.x / 128);
  if (group == 0) {
    lower_registers<40>();
    const int warp = static_cast<int>(threadIdx.x / 32);
    const bool first_lane = threadIdx.x % 32 == 0;
    if (warp == 0) {
      schedule(shared, args);
    } else if (warp == 1 && first_lane) {
      load(shared, args);
    } else if (warp >= 2 && first_lane) {
      store(shared, args, warp - 2);
    }
  } else {
    raise_registers<232>();
    multiply_items(shared, group - 1);
  }
}

}  // namespace

bool tile_products_supported() {
  int device = 0;
  int major = 0;
  int minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
}

const char* encode_tensor_map(const TensorMapSpec& spec, void* out) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(result == cudaDriverEntryPointSuccess ? found : nullptr);
  }();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const std::array<cuuint64_t, 2> extents = {static_cast<cuuint64_t>(spec.cols), static_cast<cuuint64_t>(spec.rows)};
  const std::array<cuuint64_t, 1> stride = {static_cast<cuuint64_t>(spec.ld) * sizeof(__half)};
  const std::array<cuuint32_t, 2> steps = {1, 1};
  const std::array<cuuint32_t, 2> box = {kBox, kBox};
  const CUresult result =
      encode(static_cast<CUtensorMap*>(out), CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(spec.address),
             extents.data(), stride.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the matrix";
}

const char* run_tile_products(const TileProductArgs& args, cudaStream_t stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared)) + kAlignment;
  static_assert(kBytes <= kMaxSharedBytes);
  int device = 0;
  int multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  cudaError_t error = cudaFuncSetAttribute(tile_products, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const auto blocks = static_cast<unsigned>(std::min(multiprocessors, args.item_count));
  tile_products<<<blocks, kThreads, kBytes, stream>>>(args);
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace dmuon::kernels
