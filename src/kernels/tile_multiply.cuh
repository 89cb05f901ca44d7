// The warpgroups that multiply: sums over the depth, box after box handed to the finisher.
#pragma once

#include "kernels/tile_finish.cuh"
#include "kernels/tile_shared.cuh"
#include "kernels/wgmma.cuh"

namespace dmuon::kernels::tiles {

// Over the last steps of a large tile the multipliers take turns, the first one first: its finishing runs beside the
// second one's products, and the second one's finishing beside its next ones.
constexpr int kLead = 3;        // such steps, less than there are stages
constexpr int kLeastSteps = 8;  // of a tile for that, more than there are stages: neither gets a tile ahead
static_assert(kLead < kStageBoxes / (kABoxes + kMaxBoxes) && kStageBoxes / (kABoxes + kMaxBoxes) < kLeastSteps);
__device__ constexpr bool take_turns(int boxes, int steps) { return boxes == kMaxBoxes && steps >= kLeastSteps; }

struct Multiplier {
  Shared& shared;
  int which;
  Finisher finisher;
  StageRing stages;
  unsigned through_parity = 0;

  __device__ std::uint32_t wait_stage() {
    barrier_wait(shared_address(&shared.stage_full[stages.index]), stages.parity());
    return stages.place;
  }

  // Tells the loader that this warpgroup has read a stage.
  __device__ void free_stage(int index) {
    if (threadIdx.x % 128 == 0) barrier_arrive(shared_address(&shared.stage_free[index]));
  }

  // Steps [first, last) of the depth.  Leaves the last one in work; `previous` is its stage.
  template <bool kADepthMajor, bool kBDepthMajor, int kSums>
  __device__ void multiply(float (&sum)[kSums], int first, int last, int& previous) {
#pragma unroll 1
    for (int k = first; k < last; ++k, stages.advance()) {
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
  }

  __device__ void finish(float (&sum)[32 * kMaxBoxes], const TileOp& op, int row, int col, int boxes) {
    const Ending ending(op);
    const bool with_c = ending.beta != 0.0F;
    std::uint32_t stage = 0;
#pragma unroll
    for (int box = 0; box < kMaxBoxes; ++box) {
      if (box >= boxes) break;
      if (with_c && box % 2 == 0) stage = wait_stage();
      const std::uint32_t c_box = with_c ? stage + (box % 2 * kMultipliers + which) * kBoxBytes : 0U;
      float(&of_box)[32] = reinterpret_cast<float(&)[32]>(sum[32 * box]);
      finisher.finish(of_box, ending, row, col + box, c_box);
      if (!with_c || (box % 2 == 0 && boxes > 1)) continue;
      warpgroup_sync(1 + which);  // all four warps have read it
      free_stage(stages.index);
      stages.advance();
    }
  }

  // The second multiplier waits here until the first has queued all of its products.
  __device__ void let_first_through(int& previous) {
    wgmma_wait<0>();
    free_stage(previous);
    previous = -1;
    barrier_wait(shared_address(&shared.first_through), through_parity);
    through_parity ^= 1U;
  }

  // Steps [first, last), in which neither operand turns.
  template <int kSums>
  __device__ void multiply_range(float (&sum)[kSums], const TileOp& op, const Turns& turns, int first, int last,
                                 int& previous) {
    const bool a_depth_major = (op.depth_major & 1) != 0 && first < turns.a;
    const bool b_depth_major = (op.depth_major & 2) != 0 && first < turns.b;
    if (a_depth_major && b_depth_major) {
      multiply<true, true>(sum, first, last, previous);
    } else if (a_depth_major) {
      multiply<true, false>(sum, first, last, previous);
    } else if (b_depth_major) {
      multiply<false, true>(sum, first, last, previous);
    } else {
      multiply<false, false>(sum, first, last, previous);
    }
  }

  // The whole depth.
  template <int kBoxes>
  __device__ void multiply_for(float (&sum)[32 * kBoxes], const TileOp& op, const WorkItem& item) {
    const Turns turns(op, item);
    const bool in_turn = take_turns(item.boxes, turns.steps);
    const int pause = in_turn && which == 1 ? turns.steps - kLead : turns.steps;
    int previous = -1;
    for (int first = 0; first < turns.steps;) {
      if (first == pause) let_first_through(previous);
      const int last = first < pause ? min(pause, turns.next(first)) : turns.next(first);
      multiply_range(sum, op, turns, first, last, previous);
      first = last;
    }
    if (in_turn && which == 0 && threadIdx.x % 128 == 0) barrier_arrive(shared_address(&shared.first_through));
    wgmma_wait<0>();
    free_stage(previous);
  }

  // Boxes of this multiplier that need products: of a diagonal block the first one's second box is not kept.
  __device__ int kept_boxes(const TileOp& op, const WorkItem& item, int row) const {
    const bool last_above = op.symmetric != 0 && which == 0 && item.box_col + item.boxes == row + 2;
    return item.boxes > 1 && last_above ? item.boxes - 1 : item.boxes;
  }

  __device__ void run(const Slot& slot) {
    const int row = slot.item.block_row * (kBlock / kBox) + which;
    const int boxes = slot.item.boxes;
    const int kept = kept_boxes(slot.op, slot.item, row);
    if (slot.op.width != stages.width) stages.cut(slot.op.width);
    float sum[32 * kMaxBoxes];
    if (kept == 4) {
      multiply_for<4>(sum, slot.op, slot.item);
    } else if (kept == 3) {
      multiply_for<3>(reinterpret_cast<float(&)[96]>(sum), slot.op, slot.item);
    } else if (kept == 2) {
      multiply_for<2>(reinterpret_cast<float(&)[64]>(sum), slot.op, slot.item);
    } else {
      multiply_for<1>(reinterpret_cast<float(&)[32]>(sum), slot.op, slot.item);
    }
    finish(sum, slot.op, row, slot.item.box_col, boxes);
  }
};

__device__ inline void multiply_items(Shared& shared, int which) {
  Multiplier multiplier{shared, which, Finisher(shared, which), StageRing(shared)};
  for (Ring<kSlots> slots;; slots.advance()) {
    barrier_wait(shared_address(&shared.slot_full[slots.index]), slots.parity);
    const Slot& slot = shared.slots[slots.index];
    if (slot.item.boxes == 0) return;
    multiplier.run(slot);
    barrier_arrive(shared_address(&shared.slot_free[slots.index]));
  }
}

}  // namespace dmuon::kernels::tiles
