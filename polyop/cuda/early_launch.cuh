// Launches that overlap their own beginning with the end of the work before them (Hopper's programmatic dependent
// launch): blocks take their places while the last ones of the kernel before still run, and wait there.
#pragma once

#include <cuda_runtime.h>

#include "polyop/cuda/launch.h"

namespace polyop::cuda {

/// "griddepcontrol.wait": all work before this kernel in its stream is done and seen. A kernel launched by launch_early
/// calls it before it reads or writes memory (a prefetch is neither); nothing below sm_90, where such launches are
/// plain ones.
__device__ inline void wait_for_earlier_work() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

/// "griddepcontrol.launch_dependents": the next kernel may take its places from now on.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

/// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...), early. launch_status tells how it went.
template <class... Parameters, class... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared_bytes, Stream stream,
                  Arguments&&... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream_of(stream);
  config.attrs = &early;
  config.numAttrs = device_numbers().launches_early ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace polyop::cuda
