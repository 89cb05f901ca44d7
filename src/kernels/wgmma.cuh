// Hopper's matrix instruction: a warpgroup multiplies a 64 x 16 by a 16 x N tile, both fp16 in shared memory with
// 128-byte swizzle, and adds to fp32 sums in its registers (wgmma, PTX ISA 9.0).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmuon::kernels::hopper {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// At most kPending committed groups are left unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Boxes of 64 x 64 fp16, 8 KiB each, as the copy engine writes them: 64 lines of 128 bytes, swizzled.  kDepthMajor: a
/// line holds 64 depth indices of one row or column; otherwise 64 rows or columns of one depth index.  `address` is the
/// start of the operand's first box, `step` the place of the 16 depth indices within the boxes (0 to 3).
template <bool kDepthMajor>
__device__ __forceinline__ std::uint64_t operand(std::uint32_t address, int step) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightLines = std::uint64_t{1024 >> 4} << 32;
  constexpr std::uint64_t kNextBox = std::uint64_t{kDepthMajor ? 1 : 8192 >> 4} << 16;
  const std::uint32_t start = address + static_cast<std::uint32_t>(step) * (kDepthMajor ? 32U : 2048U);
  return kSwizzle128 | kEightLines | kNextBox | ((start & 0x3FFFFU) >> 4);
}

// Texts and operands of sixteen registers.
#define DMUON_REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DMUON_REGISTERS_1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DMUON_REGISTERS_2 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DMUON_REGISTERS_3 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DMUON_REGISTERS_4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define DMUON_REGISTERS_5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DMUON_REGISTERS_6 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define DMUON_REGISTERS_7 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DMUON_SUMS(i)                                                                                               \
  "+f"(sum[i]), "+f"(sum[(i) + 1]), "+f"(sum[(i) + 2]), "+f"(sum[(i) + 3]), "+f"(sum[(i) + 4]), "+f"(sum[(i) + 5]), \
      "+f"(sum[(i) + 6]), "+f"(sum[(i) + 7]), "+f"(sum[(i) + 8]), "+f"(sum[(i) + 9]), "+f"(sum[(i) + 10]),          \
      "+f"(sum[(i) + 11]), "+f"(sum[(i) + 12]), "+f"(sum[(i) + 13]), "+f"(sum[(i) + 14]), "+f"(sum[(i) + 15])

// The instruction for `columns` columns, whose `sums` sums a thread are the asm's first operands.  `a_at` and so on are
// the texts of those after them.
#define DMUON_WGMMA(columns, sums, registers, a_at, b_at, keep_at, a_order_at, b_order_at, ...)                       \
  template <bool kADepthMajor, bool kBDepthMajor>                                                                     \
  __device__ __forceinline__ void wgmma(float(&sum)[sums], std::uint64_t a, std::uint64_t b, int accumulate) {        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns       \
                 "k16.f32.f16.f16 {" registers "}, " a_at ", " b_at ", p, 1, 1, " a_order_at ", " b_order_at ";\n}\n" \
                 : __VA_ARGS__                                                                                        \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kADepthMajor ? 0 : 1), "n"(kBDepthMajor ? 0 : 1));            \
  }

/// sum[4 j + 2 h + e] is row lane / 4 + 8 h of the warp's 16, column 8 j + 2 (lane % 4) + e, of 64, 128, 192 or 256
/// columns.  The old sum counts only when `accumulate` is not 0.
DMUON_WGMMA(64, 32, DMUON_REGISTERS_0 DMUON_REGISTERS_1, "%32", "%33", "%34", "%35", "%36", DMUON_SUMS(0),
            DMUON_SUMS(16))
DMUON_WGMMA(128, 64, DMUON_REGISTERS_0 DMUON_REGISTERS_1 DMUON_REGISTERS_2 DMUON_REGISTERS_3, "%64", "%65", "%66",
            "%67", "%68", DMUON_SUMS(0), DMUON_SUMS(16), DMUON_SUMS(32), DMUON_SUMS(48))
DMUON_WGMMA(192, 96,
            DMUON_REGISTERS_0 DMUON_REGISTERS_1 DMUON_REGISTERS_2 DMUON_REGISTERS_3 DMUON_REGISTERS_4 DMUON_REGISTERS_5,
            "%96", "%97", "%98", "%99", "%100", DMUON_SUMS(0), DMUON_SUMS(16), DMUON_SUMS(32), DMUON_SUMS(48),
            DMUON_SUMS(64), DMUON_SUMS(80))
DMUON_WGMMA(256, 128,
            DMUON_REGISTERS_0 DMUON_REGISTERS_1 DMUON_REGISTERS_2 DMUON_REGISTERS_3 DMUON_REGISTERS_4 DMUON_REGISTERS_5
                DMUON_REGISTERS_6 DMUON_REGISTERS_7,
            "%128", "%129", "%130", "%131", "%132", DMUON_SUMS(0), DMUON_SUMS(16), DMUON_SUMS(32), DMUON_SUMS(48),
            DMUON_SUMS(64), DMUON_SUMS(80), DMUON_SUMS(96), DMUON_SUMS(112))

#undef DMUON_WGMMA
#undef DMUON_SUMS
#undef DMUON_REGISTERS_0
#undef DMUON_REGISTERS_1
#undef DMUON_REGISTERS_2
#undef DMUON_REGISTERS_3
#undef DMUON_REGISTERS_4
#undef DMUON_REGISTERS_5
#undef DMUON_REGISTERS_6
#undef DMUON_REGISTERS_7

}  // namespace dmuon::kernels::hopper
