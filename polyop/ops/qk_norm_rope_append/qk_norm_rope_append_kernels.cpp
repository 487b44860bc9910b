// The kernels of qk_norm_rope_append in the order they are tried.
#include <span>

#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop {

std::span<const Kernel<QkNormRopeAppendProblem>> qk_norm_rope_append_kernels() {
  static constexpr Kernel<QkNormRopeAppendProblem> kKernels[] = {
      {.name = "cpu_tokens",
       .device = DeviceType::kCpu,
       .supports = [](const QkNormRopeAppendProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = cpu::qk_norm_rope_append_tokens},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const QkNormRopeAppendProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = qk_norm_rope_append_reference},
#ifdef POLYOP_CUDA
      {.name = "cuda_heads",
       .device = DeviceType::kCuda,
       .supports = [](const QkNormRopeAppendProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = cuda::qk_norm_rope_append_heads},
#endif
  };
  return kKernels;
}

}  // namespace polyop
