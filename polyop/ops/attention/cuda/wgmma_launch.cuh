// The launch of cuda_wgmma; included by the files that instantiate it.
#pragma once

#include "polyop/cuda/launch.h"
#include "polyop/ops/attention/cuda/wgmma_kernel.cuh"

namespace polyop::cuda {

template <class T, int kHeadDim>
Status launch_wgmma(const AttentionProblem& p, const SplitPlan& plan, const SplitScratch& scratch, int lanes,
                    int num_blocks, Stream stream) {
  constexpr int kBytes = WgmmaShared<kHeadDim>::kBytes;
  auto* kernel = wgmma_kernel<T, kHeadDim>;
  POLYOP_RETURN_IF_ERROR(runtime_status(
      "attention: cuda_wgmma", cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)));
  kernel<<<static_cast<unsigned>(num_blocks), kWgmmaThreads, kBytes, stream_of(stream)>>>(p, plan, attention_flags(),
                                                                                          scratch, lanes);
  return launch_status("attention: cuda_wgmma");
}

template <class T, int kHeadDim>
bool wgmma_is_built() {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, wgmma_kernel<T, kHeadDim>) == cudaSuccess)
    return attributes.sharedSizeBytes > 0;
  (void)cudaGetLastError();  // no image for the device
  return false;
}

}  // namespace polyop::cuda
