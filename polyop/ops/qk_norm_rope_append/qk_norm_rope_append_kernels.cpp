// The kernels of qk_norm_rope_append in the order they are tried.
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop {
#ifdef POLYOP_CUDA
namespace {

Status supports_cuda_heads(const QkNormRopeAppendProblem& problem) {
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max() - 64;  // numbers of a grid's warps are i32
  if (problem.append.num_tokens <= kMostTokens) return Status::ok();
  return unsupported("T is " + std::to_string(problem.append.num_tokens) + ", at most " + std::to_string(kMostTokens) +
                     " tokens are taken");
}

}  // namespace
#endif

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
       .supports = supports_cuda_heads,
       .workspace_bytes = nullptr,
       .launch = cuda::qk_norm_rope_append_heads},
#endif
  };
  return kKernels;
}

}  // namespace polyop
