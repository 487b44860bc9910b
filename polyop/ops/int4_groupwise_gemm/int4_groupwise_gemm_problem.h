// Int4GroupwiseGemmProblem: one bound call of int4_groupwise_gemm; the only thing its kernels receive.
#pragma once

#include <cstdint>

#include "polyop/core/dtype.h"
#include "polyop/core/kernel_list.h"
#include "polyop/ops/int4_groupwise_gemm/row_axes.h"

namespace polyop {

struct Int4GroupwiseGemmProblem {
  int64_t m = 0;           // rows of x and out
  int64_t n = 0;           // columns of out
  int64_t k = 0;           // depth
  int64_t group_size = 0;  // Kg: consecutive k that share a scale

  const void* x = nullptr;  // [M, K] of x_dtype, last stride 1
  DType x_dtype = DType::kF32;
  RowAxes x_rows;
  const uint8_t* qweight = nullptr;  // fragments of packing.h, contiguous
  const void* scales = nullptr;      // [ceil(K / Kg), N] of scales_dtype, last stride 1
  DType scales_dtype = DType::kF16;
  int64_t scales_row_stride = 0;  // elements
  void* out = nullptr;            // [M, N] of x_dtype, last stride 1
  RowAxes out_rows;
};

/// Sums in double, element by element; the specification in code. Any group size.
Status int4_groupwise_gemm_reference(const Int4GroupwiseGemmProblem& problem, Workspace workspace, Stream stream);

namespace cpu {

/// Vectorised and multi-threaded; the derivation stands in cpu/int4_groupwise_gemm_simd.cpp. A row of `out` has the
/// same bits whatever M, the thread count and the other rows are.
Status int4_groupwise_gemm_simd(const Int4GroupwiseGemmProblem& problem, Workspace workspace, Stream stream);
Status supports_int4_groupwise_gemm_simd(const Int4GroupwiseGemmProblem& problem);
int64_t int4_groupwise_gemm_simd_workspace_bytes(const Int4GroupwiseGemmProblem& problem);

/// Integer products on AMX tiles; the derivation stands in cpu/int4_groupwise_gemm_amx.cpp. A row of `out` has the same
/// bits whatever M, the thread count and the other rows are; other bits than int4_groupwise_gemm_simd gives.
Status int4_groupwise_gemm_amx(const Int4GroupwiseGemmProblem& problem, Workspace workspace, Stream stream);
Status supports_int4_groupwise_gemm_amx(const Int4GroupwiseGemmProblem& problem);
int64_t int4_groupwise_gemm_amx_workspace_bytes(const Int4GroupwiseGemmProblem& problem);

}  // namespace cpu
}  // namespace polyop
