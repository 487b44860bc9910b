// The launch of split_kv; included by the files that instantiate it, one for each type and head size.
#pragma once

#include "polyop/cuda/early_launch.cuh"
#include "polyop/ops/attention/cuda/split_kv_kernel.cuh"

namespace polyop::cuda {

template <class Compute, class Kv, int kHeadDim>
Status launch_split_kv(const AttentionProblem& p, const SplitPlan& plan, const SplitScratch& scratch, RowKind main,
                       int num_blocks, int shared_bytes, Stream stream) {
  const auto launch = [&](auto* kernel) {
    POLYOP_RETURN_IF_ERROR(
        runtime_status("attention: cuda_split_kv",
                       cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)));
    launch_early(kernel, dim3(static_cast<unsigned>(num_blocks)), kBlockThreads, shared_bytes, stream, p, plan,
                 attention_flags(), scratch);
    return launch_status("attention: cuda_split_kv");
  };
  if constexpr (kHeadDim <= kWidestHeadDim) {
    if (main == RowKind::kWide) return launch(split_kv_kernel<Compute, Kv, kHeadDim, RowKind::kWide>);
  }
  if constexpr (kMostGroups<kHeadDim> == 2) {
    if (main == RowKind::kSixteen) return launch(split_kv_kernel<Compute, Kv, kHeadDim, RowKind::kSixteen>);
  }
  return launch(split_kv_kernel<Compute, Kv, kHeadDim, RowKind::kEight>);
}

}  // namespace polyop::cuda
