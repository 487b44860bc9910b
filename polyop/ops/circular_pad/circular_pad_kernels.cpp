// The kernels of circular_pad in the order they are tried.
#include <span>

#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop {

std::span<const Kernel<CircularPadProblem>> circular_pad_kernels() {
  static constexpr Kernel<CircularPadProblem> kKernels[] = {
      {.name = "cpu_row_pieces",
       .device = DeviceType::kCpu,
       .supports = cpu::supports_circular_pad_row_pieces,
       .workspace_bytes = nullptr,
       .launch = cpu::circular_pad_row_pieces},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const CircularPadProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = circular_pad_reference},
#ifdef POLYOP_CUDA
      {.name = "cuda_rows",
       .device = DeviceType::kCuda,
       .supports = [](const CircularPadProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = cuda::circular_pad_rows},
#endif
  };
  return kKernels;
}

}  // namespace polyop
