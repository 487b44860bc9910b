// The warpgroup matrix instructions of sm_90a ("wgmma"), one wrapper each: 64 rows of A by kColumns of B, 16 deep, f32
// sums. Lane l of warp w of the warpgroup holds rows 16 w + l / 4 and that + 8 of d; d[4 i], d[4 i + 1] are columns
// 8 i + 2 (l % 4) and the next one of the first row, d[4 i + 2], d[4 i + 3] those of the second.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace polyop::cuda {

/// "Matrix-descriptor": a tile of rows of 128 bytes whose 16-byte unit u of row r lies at unit u ^ (r % 8), at a
/// multiple of 1024 bytes. Groups of eight rows are 1024 bytes apart; `panel_bytes` lie between one panel of 64
/// elements and the next, which only an operand transposed by the instruction crosses.
__device__ inline uint64_t tile_descriptor(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupStride = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kGroupStride | uint64_t{panel_bytes >> 4} << 16 | (address & 0x3ffffu) >> 4;
}

/// "wgmma.fence": registers and shared memory written so far may be read by the next multiplication.
__device__ inline void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

/// "wgmma.commit_group".
__device__ inline void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

/// "wgmma.wait_group": all but the last kPending groups are done.
template <int kPending>
__device__ inline void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

/// "bar.sync" of a named barrier: returns when `threads` threads have come to it.
__device__ inline void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

/// "bar.arrive": comes to a named barrier and does not wait.
__device__ inline void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

/// Keeps the compiler from moving uses of sums across a fence or a wait.
template <int kCount>
__device__ inline void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// "fence.proxy.async": what was copied into shared memory may be read by the matrix units.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

/// "setmaxnreg".
template <int kRegisters>
__device__ inline void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Instructions differ in type and number of columns; the lists of their registers are written once.
#define POLYOP_REGISTERS_32                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define POLYOP_REGISTERS_64                                                            \
  POLYOP_REGISTERS_32                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define POLYOP_SUMS_8(d, i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define POLYOP_SUMS_32(d, i) \
  POLYOP_SUMS_8(d, i), POLYOP_SUMS_8(d, i + 8), POLYOP_SUMS_8(d, i + 16), POLYOP_SUMS_8(d, i + 24)
#define POLYOP_SUMS_64(d) POLYOP_SUMS_32(d, 0), POLYOP_SUMS_32(d, 32)
#define POLYOP_MULTIPLY_ROWS(type)                                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type \
               " {" POLYOP_REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"                                            \
               : POLYOP_SUMS_64(d)                                                                                    \
               : "l"(a), "l"(b), "r"(keep))
#define POLYOP_MULTIPLY_WEIGHTS(type, columns, keep_at, registers, operands, ...)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " keep_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns \
               "k16.f32." type "." type " {" registers "}, " operands ", p, 1, 1, 1;\n}\n"                   \
               : __VA_ARGS__                                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep))
#define POLYOP_MULTIPLY_WEIGHTS_64(type) \
  POLYOP_MULTIPLY_WEIGHTS(type, "128", "%69", POLYOP_REGISTERS_64, "{%64, %65, %66, %67}, %68", POLYOP_SUMS_64(d))
#define POLYOP_MULTIPLY_WEIGHTS_32(type) \
  POLYOP_MULTIPLY_WEIGHTS(type, "64", "%37", POLYOP_REGISTERS_32, "{%32, %33, %34, %35}, %36", POLYOP_SUMS_32(d, 0))

/// d (64, 128) = a (64, 16) b^T (128, 16), added to d when `keep` is not 0; both in shared memory, 16 deep along rows.
template <class T>
__device__ inline void multiply_rows(float (&d)[64], uint64_t a, uint64_t b, int keep) {
  if constexpr (std::is_same_v<T, __half>) {
    POLYOP_MULTIPLY_ROWS("f16");
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    POLYOP_MULTIPLY_ROWS("bf16");
  }
}

/// d (64, kColumns) += a (64, 16) b (16, kColumns), or d = a b when `keep` is 0: a as the lanes hold it for "mma"
/// m16n8k16, b in shared memory as rows of kColumns elements, 2 kCount of them.
template <class T, int kCount>
__device__ inline void multiply_weights(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int keep) {
  constexpr bool kIsF16 = std::is_same_v<T, __half>;
  static_assert(kIsF16 || std::is_same_v<T, __nv_bfloat16>);
  static_assert(kCount == 32 || kCount == 64);
  if constexpr (kIsF16 && kCount == 64) {
    POLYOP_MULTIPLY_WEIGHTS_64("f16");
  } else if constexpr (kCount == 64) {
    POLYOP_MULTIPLY_WEIGHTS_64("bf16");
  } else if constexpr (kIsF16) {
    POLYOP_MULTIPLY_WEIGHTS_32("f16");
  } else {
    POLYOP_MULTIPLY_WEIGHTS_32("bf16");
  }
}

#undef POLYOP_REGISTERS_32
#undef POLYOP_REGISTERS_64
#undef POLYOP_SUMS_8
#undef POLYOP_SUMS_32
#undef POLYOP_SUMS_64
#undef POLYOP_MULTIPLY_ROWS
#undef POLYOP_MULTIPLY_WEIGHTS
#undef POLYOP_MULTIPLY_WEIGHTS_64
#undef POLYOP_MULTIPLY_WEIGHTS_32

}  // namespace polyop::cuda
