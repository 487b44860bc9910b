// The kernels of attention in the order they are tried.
#include "polyop/ops/attention/attention_kernels.h"

#include <span>

namespace polyop {

std::span<const Kernel<AttentionProblem>> attention_kernels() {
  static constexpr Kernel<AttentionProblem> kKernels[] = {
      {.name = "cpu_amx_attention",
       .device = DeviceType::kCpu,
       .supports = cpu::supports_amx_attention,
       .workspace_bytes = cpu::amx_attention_workspace_bytes,
       .launch = cpu::amx_attention},
      {.name = "cpu_flash_attention",
       .device = DeviceType::kCpu,
       .supports = cpu::supports_flash_attention,
       .workspace_bytes = cpu::flash_attention_workspace_bytes,
       .launch = cpu::flash_attention},
      {.name = "cpu_row_attention",
       .device = DeviceType::kCpu,
       .supports = cpu::supports_row_attention,
       .workspace_bytes = cpu::row_attention_workspace_bytes,
       .launch = cpu::row_attention},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const AttentionProblem&) { return Status::ok(); },
       .workspace_bytes = attention_reference_workspace_bytes,
       .launch = attention_reference},
#ifdef POLYOP_CUDA
      {.name = "cuda_wgmma",
       .device = DeviceType::kCuda,
       .supports = cuda::supports_wgmma,
       .workspace_bytes = cuda::wgmma_workspace_bytes,
       .launch = cuda::wgmma},
      {.name = "cuda_split_kv",
       .device = DeviceType::kCuda,
       .supports = cuda::supports_split_kv,
       .workspace_bytes = cuda::split_kv_workspace_bytes,
       .launch = cuda::split_kv},
      {.name = "cuda_rows",
       .device = DeviceType::kCuda,
       .supports = cuda::supports_attention_rows,
       .workspace_bytes = nullptr,
       .launch = cuda::attention_rows},
#endif
  };
  return kKernels;
}

}  // namespace polyop
