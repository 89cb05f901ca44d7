// What the multiplying warpgroups do with a box of sums: alpha * sum + beta * C, rounded, and staged for the storer.
#pragma once

#include "kernels/tile_shared.cuh"

namespace dmuon::kernels::tiles {

// How a product ends, in registers.
struct Ending {
  Output output;
  float alpha;
  float beta;
  float gamma;
  bool second;  // D + gamma * I is stored, too
  bool to_bfloat16;

  __device__ explicit Ending(const TileOp& op)
      : output(op),
        alpha(op.alpha),
        beta(op.beta),
        gamma(op.gamma),
        second(op.d2 >= 0),
        to_bfloat16(op.to_bfloat16 != 0) {}
};

// One for each multiplier.  In a box, this thread has rows 16 * warp + lane / 4 (+ 8): see wgmma.
struct Finisher {
  Shared& shared;
  int which;  // multiplier
  int warp;
  int lane;
  Ring<kStagingBoxes> ring;

  __device__ Finisher(Shared& shared_memory, int multiplier)
      : shared(shared_memory),
        which(multiplier),
        warp(static_cast<int>(threadIdx.x / 32 % kWarps)),
        lane(static_cast<int>(threadIdx.x % 32)) {}

  __device__ std::uint32_t wait_free_box() {
    barrier_wait(shared_address(&shared.stored[which][ring.index]), ring.parity ^ 1U);
    return shared_address(shared.staging[which][ring.index]);
  }

  __device__ void pass_on_box() {
    fence_async_shared();
    __syncwarp();  // once for all lanes: arrivals of single threads would queue up
    if (lane == 0) barrier_arrive(shared_address(&shared.staged[which][ring.index]));
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
  __device__ void write(std::uint32_t box, const std::uint32_t (&values)[16]) const {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const std::uint32_t place = place_in<kTransposed>(box, j);
      store_matrices<kTransposed>(place, {values[2 * j], values[2 * j + 1], values[2 * j + 2], values[2 * j + 3]});
    }
  }

  template <bool kTransposed>
  __device__ void stage(const std::uint32_t (&values)[16]) {
    write<kTransposed>(wait_free_box(), values);
    pass_on_box();
  }

  // A box on the diagonal: what is on and below it, and its mirror image.  In units of 8 x 8 blocks, of which this warp
  // has rows 2 * warp and 2 * warp + 1.
  __device__ void stage_diagonal(const std::uint32_t (&values)[16]) {
    const std::uint32_t box = wait_free_box();
    write<false>(box, values);
    warpgroup_sync(1 + which);  // what lies above the diagonal is written a second time
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const std::uint32_t blocks[4] = {values[2 * j], values[2 * j + 1], values[2 * j + 2], values[2 * j + 3]};
      if (j < 2 * warp) store_matrices<true>(place_in<true>(box, j), blocks);
      if (j == 2 * warp) {
        stage_diagonal_block(box, j, blocks[0]);
        store_matrix_transposed(swizzled(box, 8 * j + lane % 8, j + 1), blocks[1]);
        stage_diagonal_block(box, j + 1, blocks[3]);
      }
    }
    pass_on_box();
  }

  // What lies below the diagonal of 8 x 8 block (j, j), a second time above it.
  __device__ void stage_diagonal_block(std::uint32_t box, int j, std::uint32_t pair) {
    const int row = lane / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = 2 * (lane % 4) + i;
      const auto bits = static_cast<std::uint16_t>(i == 0 ? pair & 0xFFFFU : pair >> 16);
      if (col < row) store_half(swizzled(box, 8 * j + col, j) + 2U * row, bits);
    }
  }

  // alpha * sum + beta * C in fp32, in place of the sums.  c_box is the box of C in shared memory, or 0 for none.
  __device__ void add_c(float (&sum)[32], const Ending& ending, std::uint32_t c_box) {
    std::uint32_t c[16] = {};
    if (c_box != 0) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) load_matrices(place_in<false>(c_box, j), c + 2 * j);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 old = __half22float2(*reinterpret_cast<const __half2*>(&c[i]));
      sum[2 * i] = ending.alpha * sum[2 * i] + ending.beta * old.x;
      sum[2 * i + 1] = ending.alpha * sum[2 * i + 1] + ending.beta * old.y;
    }
  }

  // Rounded to 16 bits, in pairs.
  __device__ static void round_off(const float (&sum)[32], const Ending& ending, std::uint32_t (&values)[16]) {
    if (ending.to_bfloat16) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const __nv_bfloat162 value = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
        values[i] = *reinterpret_cast<const std::uint32_t*>(&value);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const __half2 value = __floats2half2_rn(sum[2 * i], sum[2 * i + 1]);
      values[i] = *reinterpret_cast<const std::uint32_t*>(&value);
    }
  }

  // gamma * I added to a box on the diagonal.
  __device__ void add_gamma(float (&sum)[32], float gamma) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int beyond = 16 * warp + lane / 4 + 8 * (i % 2) - (8 * (i / 2) + 2 * (lane % 4));  // row - column
      if (beyond == 0) sum[2 * i] += gamma;
      if (beyond == 1) sum[2 * i + 1] += gamma;
    }
  }

  // Output box (row, col).
  __device__ void finish(float (&sum)[32], const Ending& ending, int row, int col, std::uint32_t c_box) {
    const BoxKind kind = ending.output.kind(row, col);
    if (kind == BoxKind::kNone) return;
    std::uint32_t values[16];
    add_c(sum, ending, c_box);
    round_off(sum, ending, values);
    if (kind == BoxKind::kDiagonal) {
      stage_diagonal(values);
      if (!ending.second) return;
      add_gamma(sum, ending.gamma);
      round_off(sum, ending, values);
      return stage_diagonal(values);
    }
    stage<false>(values);
    if (ending.output.is_mirrored(row, col)) stage<true>(values);
  }
};

}  // namespace dmuon::kernels::tiles
