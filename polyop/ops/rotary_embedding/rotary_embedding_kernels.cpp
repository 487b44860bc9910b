// The kernels of rotary_embedding in the order they are tried.
#include <span>

#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

namespace polyop {

std::span<const Kernel<RotaryEmbeddingProblem>> rotary_embedding_kernels() {
  static constexpr Kernel<RotaryEmbeddingProblem> kKernels[] = {
      {.name = "cpu_rows",
       .device = DeviceType::kCpu,
       .supports = [](const RotaryEmbeddingProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = cpu::rotary_embedding_rows},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const RotaryEmbeddingProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = rotary_embedding_reference},
#ifdef POLYOP_CUDA
      {.name = "cuda_tokens",
       .device = DeviceType::kCuda,
       .supports = [](const RotaryEmbeddingProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = cuda::rotary_embedding_tokens},
#endif
  };
  return kKernels;
}

}  // namespace polyop
