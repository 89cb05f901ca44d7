// The warpgroups that multiply: sums over the depth, then alpha * sum + beta * C, rounded and staged for the storer.
#pragma once

#include "kernels/tile_shared.cuh"
#include "kernels/wgmma.cuh"

namespace dmuon::kernels::tiles {

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

  // Steps [first, last) of the depth.  Leaves the last one in work; `previous` is its stage.
  template <bool kADepthMajor, bool kBDepthMajor, int kSums>
  __device__ void multiply(float (&sum)[kSums], int first, int last, int& previous) {
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
  __device__ void stage_diagonal(const std::uint32_t (&values)[16]) {
    const std::uint32_t box = wait_free_box();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2);
      const int col = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      if (row < col) continue;
      const std::uint32_t pair = values[i / 2];
      const auto bits = static_cast<std::uint16_t>(i % 2 == 0 ? pair & 0xFFFFU : pair >> 16);
      const std::uint32_t places[2] = {swizzled(box, row, col / 8) + 2U * (col % 8),
                                       swizzled(box, col, row / 8) + 2U * (row % 8)};
      for (const std::uint32_t place : places) {
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(place), "h"(bits) : "memory");
      }
    }
    pass_on_box();
  }

  __device__ static std::uint32_t rounded(const TileOp& op, float x, float y) {
    if (op.to_bfloat16 != 0) {
      const __nv_bfloat162 value = __floats2bfloat162_rn(x, y);
      return *reinterpret_cast<const std::uint32_t*>(&value);
    }
    const __half2 value = __floats2half2_rn(x, y);
    return *reinterpret_cast<const std::uint32_t*>(&value);
  }

  // alpha * sum + beta * C + gamma * I, rounded once.  c_box is the box of C in shared memory, or 0 for none; gamma is
  // 0 but for a box on the diagonal.
  __device__ void combine(const float* sum, const TileOp& op, std::uint32_t c_box, float gamma,
                          std::uint32_t (&values)[16]) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      std::uint32_t c[4] = {};
      if (c_box != 0) load_matrices(place_in<false>(c_box, j), c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 old = __half22float2(*reinterpret_cast<const __half2*>(&c[i]));
        const float* pair = sum + 2 * (2 * j + i);
        const int beyond = 16 * warp + lane / 4 + 8 * (i % 2) - (8 * (j + i / 2) + 2 * (lane % 4));  // row - column
        values[2 * j + i] = rounded(op, op.alpha * pair[0] + op.beta * old.x + (beyond == 0 ? gamma : 0.0F),
                                    op.alpha * pair[1] + op.beta * old.y + (beyond == 1 ? gamma : 0.0F));
      }
    }
  }

  __device__ void finish_box(const float* sum, const TileOp& op, BoxKind kind, bool mirrored, std::uint32_t c_box) {
    if (kind == BoxKind::kNone) return;
    std::uint32_t values[16];
    combine(sum, op, c_box, 0.0F, values);
    if (kind == BoxKind::kDiagonal) {
      stage_diagonal(values);
      if (op.d2 < 0) return;
      combine(sum, op, c_box, op.gamma, values);
      return stage_diagonal(values);
    }
    stage<false>(values);
    if (mirrored) stage<true>(values);
  }

  __device__ void finish(const float (&sum)[32 * kMaxBoxes], const TileOp& op, int row, int col, int boxes) {
    const bool with_c = op.beta != 0.0F;
    std::uint32_t stage = 0;
#pragma unroll
    for (int box = 0; box < kMaxBoxes; ++box) {
      if (box >= boxes) break;
      if (with_c && box % 2 == 0) stage = wait_stage();
      const std::uint32_t c_box = with_c ? stage + (box % 2 * kMultipliers + which) * kBoxBytes : 0U;
      finish_box(sum + 32 * box, op, kind_of_box(op, row, col + box), is_mirrored(op, row, col + box), c_box);
      if (!with_c || (box % 2 == 0 && boxes > 1)) continue;
      warpgroup_sync(1 + which);  // all four warps have read it
      free_stage(stages.index);
      stages.advance();
    }
  }

  // The whole depth, in ranges where both operands are read the same way.
  template <int kBoxes>
  __device__ void multiply_for(float (&sum)[32 * kBoxes], const TileOp& op, const WorkItem& item) {
    const Turns turns(op, item);
    int previous = -1;
    for (int first = 0; first < turns.steps;) {
      const bool a_depth_major = (op.depth_major & 1) != 0 && first < turns.a;
      const bool b_depth_major = (op.depth_major & 2) != 0 && first < turns.b;
      const int last = turns.next(first);
      if (a_depth_major && b_depth_major) {
        multiply<true, true>(sum, first, last, previous);
      } else if (a_depth_major) {
        multiply<true, false>(sum, first, last, previous);
      } else if (b_depth_major) {
        multiply<false, true>(sum, first, last, previous);
      } else {
        multiply<false, false>(sum, first, last, previous);
      }
      first = last;
    }
    wgmma_wait<0>();
    free_stage(previous);
  }

  __device__ void run(const Slot& slot) {
    const int row = slot.item.block_row * (kBlock / kBox) + which;
    const int boxes = slot.item.boxes;
    if (slot.op.width != stages.width) stages.cut(slot.op.width);
    float sum[32 * kMaxBoxes];
    if (boxes == 4) {
      multiply_for<4>(sum, slot.op, slot.item);
    } else if (boxes == 2) {
      multiply_for<2>(reinterpret_cast<float(&)[64]>(sum), slot.op, slot.item);
    } else {
      multiply_for<1>(reinterpret_cast<float(&)[32]>(sum), slot.op, slot.item);
    }
    finish(sum, slot.op, row, slot.item.box_col, boxes);
  }
};

__device__ inline void multiply_items(Shared& shared, int which) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Multiplier multiplier{shared, which, static_cast<int>(threadIdx.x / 32 % 4), lane, StageRing(shared), {}};
  for (Ring<kSlots> slots;; slots.advance()) {
    barrier_wait(shared_address(&shared.slot_full[slots.index]), slots.parity);
    const Slot& slot = shared.slots[slots.index];
    if (slot.item.boxes == 0) return;
    multiplier.run(slot);
    barrier_arrive(shared_address(&shared.slot_free[slots.index]));
  }
}

}  // namespace dmuon::kernels::tiles
