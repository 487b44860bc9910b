// The kernels of kv_cache_update in the order they are tried.
#include <span>

#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop {

std::span<const Kernel<KvCacheUpdateProblem>> kv_cache_update_kernels() {
  static constexpr Kernel<KvCacheUpdateProblem> kKernels[] = {
      {.name = "cpu_runs",
       .device = DeviceType::kCpu,
       .supports = [](const KvCacheUpdateProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = cpu::kv_cache_update_runs},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const KvCacheUpdateProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = kv_cache_update_reference},
#ifdef POLYOP_CUDA
      {.name = "cuda_tokens",
       .device = DeviceType::kCuda,
       .supports = cuda::supports_store_tokens,
       .workspace_bytes = nullptr,
       .launch = cuda::kv_cache_update_tokens},
#endif
  };
  return kKernels;
}

}  // namespace polyop
