// The launch of split_kv; included by the files that instantiate it, one for each type and head size.
#pragma once

#include <algorithm>

#include "polyop/cuda/launch.h"
#include "polyop/ops/attention/cuda/split_kv_kernel.cuh"

namespace polyop::cuda {

template <class Compute, class Kv, int kHeadDim>
Status launch_split_kv(const AttentionProblem& p, SplitPlan plan, const SplitScratch& scratch, int64_t blocks,
                       Stream stream) {
  using Shared = SplitShared<Kv, kHeadDim>;
  constexpr int kReservedBytes = 1024;  // of each block, by the runtime
  constexpr int kBlocksWanted = kHeadDim <= 128 ? 2 : 1;
  const DeviceNumbers& device = device_numbers();
  const auto stages_in = [](int bytes) { return (bytes - Shared::kFixedBytes) / Shared::kStageBytes; };
  int blocks_each = kBlocksWanted;
  int stages = stages_in(
      std::min(device.shared_bytes_per_block, device.shared_bytes_per_multiprocessor / kBlocksWanted - kReservedBytes));
  if (stages < 2) {
    blocks_each = 1;
    stages = stages_in(device.shared_bytes_per_block);
  }
  if (stages < 2) return unsupported("attention: cuda_split_kv: too little shared memory for two stages");
  plan.num_stages = std::min(stages, kMostStages);
  const int shared_bytes = Shared::kFixedBytes + plan.num_stages * Shared::kStageBytes;
  auto* kernel = split_kv_kernel<Compute, Kv, kHeadDim>;
  POLYOP_RETURN_IF_ERROR(
      runtime_status("attention: cuda_split_kv",
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes)));
  const auto grid = static_cast<unsigned>(
      std::max<int64_t>(1, std::min<int64_t>(blocks, int64_t{blocks_each} * device.num_multiprocessors)));
  kernel<<<grid, kBlockThreads, static_cast<size_t>(shared_bytes), stream_of(stream)>>>(p, plan, attention_flags(),
                                                                                        scratch);
  return launch_status("attention: cuda_split_kv");
}

}  // namespace polyop::cuda
