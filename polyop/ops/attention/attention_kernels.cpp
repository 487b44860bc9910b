// The kernels of attention in the order they are tried.
#include "polyop/ops/attention/attention_kernels.h"

#include <span>

namespace polyop {

std::span<const Kernel<AttentionProblem>> attention_kernels() {
  static constexpr Kernel<AttentionProblem> kKernels[] = {
      {.name = "cpu_flash_attention",
       .device = DeviceType::kCpu,
       .supports = cpu::supports_flash_attention,
       .workspace_bytes = cpu::flash_attention_workspace_bytes,
       .launch = cpu::flash_attention},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const AttentionProblem&) { return Status::ok(); },
       .workspace_bytes = attention_reference_workspace_bytes,
       .launch = attention_reference},
  };
  return kKernels;
}

}  // namespace polyop
