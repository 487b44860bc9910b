// The kernels of int4_groupwise_gemm in the order they are tried.
#include <span>

#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm_problem.h"

namespace polyop {

std::span<const Kernel<Int4GroupwiseGemmProblem>> int4_groupwise_gemm_kernels() {
  static constexpr Kernel<Int4GroupwiseGemmProblem> kKernels[] = {
      {.name = "cpu_amx",
       .device = DeviceType::kCpu,
       .supports = cpu::supports_int4_groupwise_gemm_amx,
       .workspace_bytes = cpu::int4_groupwise_gemm_amx_workspace_bytes,
       .launch = cpu::int4_groupwise_gemm_amx},
      {.name = "cpu_simd",
       .device = DeviceType::kCpu,
       .supports = cpu::supports_int4_groupwise_gemm_simd,
       .workspace_bytes = cpu::int4_groupwise_gemm_simd_workspace_bytes,
       .launch = cpu::int4_groupwise_gemm_simd},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const Int4GroupwiseGemmProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = int4_groupwise_gemm_reference},
  };
  return kKernels;
}

}  // namespace polyop
