// The warps that store: they write the boxes that a multiplier has staged and signal the finished blocks.
#pragma once

#include "kernels/tile_shared.cuh"

namespace dmuon::kernels::tiles {

// Takes the staged boxes in the order in which the multiplier stages them.
struct Storer {
  Shared& shared;
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

  // A box of D; `second` is nullptr without a second output.
  __device__ void store(const Output& output, const void* d, const void* second, int row, int col) {
    const BoxKind kind = output.kind(row, col);
    if (kind == BoxKind::kNone) return;
    const bool both = second != nullptr;
    std::uint32_t from = wait_staged();
    store_box(d, col * kBox, row * kBox, from);
    if (both && kind == BoxKind::kFull) store_box(second, col * kBox, row * kBox, from);
    commit();
    if (kind == BoxKind::kDiagonal ? !both : !output.is_mirrored(row, col)) return;
    from = wait_staged();
    if (kind == BoxKind::kDiagonal) {
      store_box(second, col * kBox, row * kBox, from);
    } else {
      store_box(d, row * kBox, col * kBox, from);
      if (both) store_box(second, row * kBox, col * kBox, from);
    }
    commit();
  }
};

// What the items that wait for an item's boxes are told.  Both storers tell, each of its half of every block.  Of a
// symmetric product no item covers a block above the diagonal, so every panel is touched by as many blocks as there are
// panels.  Worked out before the stores end, so that nothing but the sums is left to do then.
struct Signals {
  int* columns[2] = {};
  int* row = nullptr;
  int* all = nullptr;
  int boxes;  // of a column of blocks
  int count = 0;

  __device__ Signals(const TileOp& op, const WorkItem& item, int* counters) : boxes(c_columns(item.boxes)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int panel = item.box_col / 2 + i;
      if (2 * i >= item.boxes || panel >= blocks_of(op.cols)) continue;
      count += boxes;
      const bool told_by_row = op.symmetric != 0 && panel == item.block_row;
      if (op.signal_cols >= 0 && !told_by_row) columns[i] = counters + op.signal_cols + panel;
    }
    if (op.signal_rows >= 0) row = counters + op.signal_rows + item.block_row;
    if (op.signal_all >= 0) all = counters + op.signal_all;
  }

  __device__ void send() const {
    if (row != nullptr) add_relaxed(row, count);
    if (columns[0] != nullptr) add_relaxed(columns[0], boxes);
    if (columns[1] != nullptr) add_relaxed(columns[1], boxes);
    if (all != nullptr) add_relaxed(all, count);
  }
};

__device__ inline void store(Shared& shared, const TileProductArgs& args, int which) {
  Storer storer{shared, which, {}};
  for (Ring<kSlots> slots;; slots.advance()) {
    barrier_wait(shared_address(&shared.slot_full[slots.index]), slots.parity);
    const Slot& slot = shared.slots[slots.index];
    if (slot.item.boxes == 0) return;
    const Signals signals(slot.op, slot.item, args.counters);
    const Output output(slot.op);
    const void* d = map_at(args, slot.op.d);
    const void* second = slot.op.d2 >= 0 ? map_at(args, slot.op.d2) : nullptr;
    const int row = slot.item.block_row * (kBlock / kBox) + which;
    const int end = slot.item.box_col + slot.item.boxes;
#pragma unroll 1
    for (int col = slot.item.box_col; col < end; ++col) storer.store(output, d, second, row, col);
    storer.finish();
    fence_release();
    signals.send();
    barrier_arrive(shared_address(&shared.slot_free[slots.index]));
  }
}

}  // namespace dmuon::kernels::tiles
