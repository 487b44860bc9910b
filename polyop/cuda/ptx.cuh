// One wrapper for each PTX instruction; the section names are those of the PTX ISA manual.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace polyop::cuda {

/// Address in the shared window, as the instructions below want it.
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// "cp.async": 16 bytes from global to shared memory past the first-level cache; zeros when `valid` is false, and then
/// nothing is read.
__device__ inline void copy_async_16(uint32_t to_shared, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to_shared), "l"(from), "r"(bytes) : "memory");
}

/// "cp.async.commit_group": the copies of this thread since the last commit are one group.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// "cp.async.wait_group": all but this thread's last kPending groups have arrived.
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// "cp.async.wait_all": every copy of this thread has arrived.
__device__ inline void copy_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

/// "prefetch" of the line at `address` into the second-level cache: its page is known sooner, too.
__device__ inline void prefetch_line(const void* address) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(address)); }

/// "ld.global" under a predicate: *from where `valid`, else `otherwise`. Without a branch, behind which the value would
/// have to have arrived.
__device__ inline int32_t load_if(bool valid, const int32_t* from, int32_t otherwise) {
  int32_t value = otherwise;
  asm volatile("{\n.reg .pred valid;\nsetp.ne.s32 valid, %2, 0;\n@valid ld.global.s32 %0, [%1];\n}\n"
               : "+r"(value)
               : "l"(from), "r"(static_cast<int32_t>(valid)));
  return value;
}

/// "mbarrier.init": `count` arrivals complete a phase.
__device__ inline void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

/// "mbarrier.arrive".
__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}

/// "cp.async.mbarrier.arrive.noinc": this thread's arrival, made once all its copies so far have landed.
__device__ inline void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}

/// "mbarrier.test_wait" in a loop: returns when the phase of this parity is complete.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT%=:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@done bra DONE%=;\nbra "
      "WAIT%=;\n"
      "DONE%=:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// "ldmatrix": four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&registers)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row_address));
}

/// "ldmatrix" with .trans.
__device__ inline void load_matrices_transposed(uint32_t (&registers)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row_address));
}

/// "mma" m16n8k16, f32 sums: d += a b.
template <class T>
__device__ inline void multiply_accumulate(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<T, __nv_bfloat16>);
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// "movmatrix": the transpose of an 8x8 matrix of 16-bit elements that the lanes hold as ldmatrix hands it out.
__device__ inline uint32_t transpose_matrix(uint32_t matrix) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(matrix));
  return result;
}

/// "cvt" .rni.sat to s8: nearest even, saturated to [-128, 127], 0 for a NaN.
__device__ inline int8_t round_to_int8(float x) {
  int32_t result;
  asm("cvt.rni.sat.s8.f32 %0, %1;\n" : "=r"(result) : "f"(x));
  return static_cast<int8_t>(result);
}

/// "ex2": 2^x, 2 units in the last place; 0 for -inf.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

/// "atom" with .acq_rel at device scope: adds `count` and returns the old value; what the thread wrote before is seen
/// by who reads the sum afterwards.
__device__ inline uint32_t fetch_add(uint32_t* counter, uint32_t count) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(old) : "l"(counter), "r"(count) : "memory");
  return old;
}

/// "rsqrt.approx.ftz": 1 / sqrt(x) within 2^-22.9 of it; infinity for zeros and subnormal numbers.
__device__ inline float reciprocal_root(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

/// "fence" .acq_rel at device scope.
__device__ inline void fence_device() { asm volatile("fence.acq_rel.gpu;\n" ::: "memory"); }

/// fetch_add with .release alone: what others wrote is seen behind a fence_device only.
__device__ inline uint32_t fetch_add_released(uint32_t* counter, uint32_t count) {
  uint32_t old;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(old) : "l"(counter), "r"(count) : "memory");
  return old;
}

}  // namespace polyop::cuda
