// The warps that fetch: the scheduler takes tickets and waits for what an item reads; the loader fills the stages.
#pragma once

#include "kernels/tile_shared.cuh"

namespace dmuon::kernels::tiles {

// --- scheduler ------------------------------------------------------------------------------------------------------

__device__ inline void prefetch_maps(const TileProductArgs& args, const TileOp& op, int lane) {
  if (lane == 0) prefetch_map(map_at(args, op.a));
  if (lane == 1) prefetch_map(map_at(args, op.b));
  if (lane == 2) prefetch_map(map_at(args, op.c));
  if (lane == 3) prefetch_map(map_at(args, op.d));
}

// What lane `lane` waits for, as a counter and its target; -1 for nothing.
__device__ inline PanelWait wait_of_lane(const TileOp& op, const WorkItem& item, int lane) {
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

__device__ inline void wait_for(const int* counters, const PanelWait& wait) {
  bool reached = wait.base < 0;
  while (true) {
    if (!reached) reached = load_acquire(counters + wait.base) >= wait.target;
    if (__all_sync(~0U, reached)) return;
  }
}

__device__ inline void schedule(Shared& shared, const TileProductArgs& args) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int* tickets = args.counters + args.counter_count - 1;
  for (Ring<kSlots> ring;; ring.advance()) {
    Slot& slot = shared.slots[ring.index];
    barrier_wait(shared_address(&shared.slot_free[ring.index]), ring.parity ^ 1U);
    int ticket = lane == 0 ? atomicAdd(tickets, 1) : 0;
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
    barrier_arrive(shared_address(&shared.slot_full[ring.index]));
    if (item.boxes == 0) return;
  }
}

// --- loader ---------------------------------------------------------------------------------------------------------

// Boxes of an operand: where the first lies, and how far the next depth is; the next box is as far the other way.
struct Boxes {
  const void* map;
  int2 place;
  int2 step;

  __device__ int x_of(int box) const { return place.x + box * step.y; }
  __device__ int y_of(int box) const { return place.y + box * step.x; }

  template <int kCount>
  __device__ void load(std::uint32_t to, std::uint32_t full) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) load_box(to + i * kBoxBytes, map, x_of(i), y_of(i), full);
  }

  __device__ void advance() {
    place.x += step.x;
    place.y += step.y;
  }

  // From here on the operand is read the other way round.
  __device__ void turn() {
    place = make_int2(place.y, place.x);
    step = make_int2(step.y, step.x);
  }
};

// Of A (0) or B (1).  `along` is its first row or column, in boxes.
__device__ inline Boxes operand_boxes(const void* map, const TileOp& op, int which, int along) {
  if ((op.depth_major >> which & 1) != 0) return {map, make_int2(0, along * kBox), make_int2(kBox, 0)};
  return {map, make_int2(along * kBox, 0), make_int2(0, kBox)};
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

  // So many steps in depth.  This one thread keeps both multipliers busy: there is no room for more arithmetic, nor for
  // fetching a long loop's code.
  template <int kBoxes>
  __device__ void load_steps(Boxes& a, Boxes& b, int steps) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      const std::uint32_t full = open_stage(kABoxes + kBoxes);
      a.load<kABoxes>(stages.place, full);
      b.load<kBoxes>(stages.place + kABoxes * kBoxBytes, full);
      a.advance();
      b.advance();
      stages.advance();
    }
  }

  __device__ void load_operands(const TileOp& op, const WorkItem& item) {
    Boxes a = operand_boxes(map_at(args, op.a), op, 0, item.block_row * kABoxes);
    Boxes b = operand_boxes(map_at(args, op.b), op, 1, item.box_col);
    const Turns turns(op, item);
    for (int done = 0; done < turns.steps;) {
      const int until = turns.next(done);
      if (item.boxes == 4) {
        load_steps<4>(a, b, until - done);
      } else if (item.boxes == 2) {
        load_steps<2>(a, b, until - done);
      } else {
        load_steps<1>(a, b, until - done);
      }
      if (until == turns.a) a.turn();
      if (until == turns.b) b.turn();
      done = until;
    }
  }

  // The boxes of C that the multipliers need after the last depth: c_columns() columns at a time, each of both rows.
  __device__ void load_c(const TileOp& op, const WorkItem& item) {
    const int columns = c_columns(item.boxes);
    for (int col = 0; col < item.boxes; col += columns) {
      const std::uint32_t full = open_stage(kMultipliers * columns);
      for (int i = 0; i < columns; ++i) {
        const int2 place = make_int2((item.box_col + col + i) * kBox, item.block_row * kBlock);
        const Boxes both{map_at(args, op.c), place, make_int2(kBox, 0)};
        both.load<kMultipliers>(stages.place + i * kMultipliers * kBoxBytes, full);
      }
      stages.advance();
    }
  }
};

__device__ inline void load(Shared& shared, const TileProductArgs& args) {
  Loader loader{shared, args, StageRing(shared)};
  for (Ring<kSlots> slots;; slots.advance()) {
    barrier_wait(shared_address(&shared.slot_full[slots.index]), slots.parity);
    const Slot& slot = shared.slots[slots.index];
    if (slot.item.boxes == 0) return;
    loader.cut(slot.op.width);
    fence_async_global();  // what the scheduler waited for was written by copy engines, and is read by this one
    loader.load_operands(slot.op, slot.item);
    if (slot.op.beta != 0.0F) loader.load_c(slot.op, slot.item);
    barrier_arrive(shared_address(&shared.slot_free[slots.index]));
  }
}

}  // namespace dmuon::kernels::tiles
