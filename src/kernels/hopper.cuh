// Hopper's (sm_90a) instructions for barriers in shared memory and the bulk tensor copy engine (TMA), one function
// each.  Names follow PTX ISA 9.0, where each is specified.  Shared memory is addressed by 32-bit addresses.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmuon::kernels::hopper {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarrier -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Arrives and lets the phase wait for `bytes` more from the copy engine.
__device__ __forceinline__ void barrier_arrive_expect(std::uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Returns when the phase of this parity is over.  Waiting for parity 1 on a fresh barrier returns at once.
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- copies ---------------------------------------------------------------------------------------------------------

/// A box of a two-dimensional tensor map to shared memory; x is the contiguous index.
__device__ __forceinline__ void load_box(std::uint32_t to, const void* map, int x, int y, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

/// Brings a tensor map close to the copy engine before its first use.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Shared memory to a box; the part outside the tensor is left out.
__device__ __forceinline__ void store_box(const void* map, int x, int y, std::uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y)
               : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// All but the last kPending of this thread's committed stores have read their shared memory.
template <int kPending>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// This thread's stores are written.
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Orders ordinary accesses of this thread and those of the copy engine and the tensor cores, to global memory or to
/// the block's shared memory.  Without either name the fence also waits for device memory: 700 cycles.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- between thread blocks, through device memory -------------------------------------------------------------------

__device__ __forceinline__ int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

/// Before an add_relaxed() that tells of what this thread, or a store that it waited for, has written.  Cheaper than
/// __threadfence(), which also orders it among all threads' fences.
__device__ __forceinline__ void fence_release() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void add_relaxed(int* address, int value) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// --- inside a warpgroup ---------------------------------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Waits for the 128 threads of a warpgroup.  `id` is one of the block's named barriers, 1 to 15.
__device__ __forceinline__ void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }

/// The reverse of store_matrices<false>, to blocks[0..3].
__device__ __forceinline__ void load_matrices(std::uint32_t address, std::uint32_t* blocks) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
               : "r"(address)
               : "memory");
}

/// Four 8x8 blocks of fp16 from a warp's registers to shared memory: lane i gives the address of row i % 8 of block
/// i / 8.  kTransposed writes each block transposed.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t (&blocks)[4]) {
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(blocks[0]), "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(blocks[0]),
                 "r"(blocks[1]), "r"(blocks[2]), "r"(blocks[3])
                 : "memory");
  }
}

/// One such block, transposed.  Lanes 0 to 7 give the addresses.
__device__ __forceinline__ void store_matrix_transposed(std::uint32_t address, std::uint32_t block) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(block) : "memory");
}

__device__ __forceinline__ void store_half(std::uint32_t address, std::uint16_t bits) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bits) : "memory");
}

}  // namespace dmuon::kernels::hopper
