// cuda_wgmma: attention of many query rows with the warpgroup matrix instructions of sm_90a, in one launch.
// Math      o = softmax(scale q k^T) v in one pass, base 2; parts of a row, one for each chunk of keys, are joined by
//           their references in the order of the chunks
// Shapes    q [T, Hq, D] | [B, S, Hq, D] f16, bf16 · k, v paged, packed or padded, q's dtype · out, lse
// Layout    D contiguous; rows of q, k and v 16-byte aligned, k and v with equal strides; page_table [B, W] i32
// Work      item = 128 rows (query row x head of one kv head) x one chunk of keys; a block takes an equal share of
//           neighbouring items, found from the lengths on the device, and joins the chunks of a tile in shared memory.
//           Two blocks side by side take different tiles against the same keys, which the second finds in the
//           second-level cache. One warpgroup copies tiles of 128 keys (wgmma_ring.cuh), two multiply 64 rows each
//           (wgmma_rows.cuh): the scores of a tile are multiplied while the weights of the one before meet their
//           values. A tile that blocks share is finished by the warpgroup that is last (a semaphore, zero afterwards)
// Memory    global: k and v once for each 128 rows; parts only of tiles that blocks share, 128 x (D + 2) x 4 bytes for
//           each chunk that stands alone · shared: q 256 D, k and v 128 KB, sums 512 D bytes
// Roofline  the larger of bytes of k and v over the bandwidth and 4 rows L D FLOP over the matrix units
//           (docs/performance.md)
// Numerics  as split_kv (split_kv_kernel.cuh)
// Limits    D = Dv in {64, 128}, no dense mask, softmax; sm_90 built for sm_90a
#pragma once

#include <cuda_runtime.h>

#include "polyop/core/kernel_list.h"
#include "polyop/ops/attention/cuda/wgmma_rows.cuh"

namespace polyop::cuda {

template <int kHeadDim>
struct WgmmaShared {
  static constexpr int kQueryBytes = kWgmmaTileRows * kHeadDim * 2;
  static constexpr int kTotalBytes = kWgmmaTileRows * kHeadDim * 4;
  static constexpr int kBytes = kQueryBytes + WgmmaRing<kHeadDim>::kBytes + kTotalBytes;
  static constexpr int kAlignment = 1024;  // of a swizzled tile
};

/// The static shared memory. A build without sm_90a has a kernel without any, which is how the host knows.
template <int kHeadDim>
struct WgmmaControl {
  uint64_t barriers[WgmmaRing<kHeadDim>::kBarriers];
  WgmmaWalk walks[kRowGroups + 1];  // the copying warpgroup's is the last one
  int is_last[kRowGroups];
};

// 168 registers each at the start: 128 x 40 + 256 x 232 are no more.
inline constexpr int kCopierRegisters = 40;
inline constexpr int kRowsRegisters = 232;

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    wgmma_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ SplitPlan plan,
                 const __grid_constant__ AttentionFlags flags, const __grid_constant__ SplitScratch scratch,
                 const int32_t lanes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shared = WgmmaShared<kHeadDim>;
  extern __shared__ __align__(Shared::kAlignment) char wgmma_shared[];
  using Control = WgmmaControl<kHeadDim>;
  __shared__ __align__(alignof(Control)) char control_bytes[sizeof(Control)];
  Control& control = *reinterpret_cast<Control*>(control_bytes);
  const SplitCall call{{p, flags, plan.group_size}, plan, scratch};
  const uint32_t queries = shared_address(wgmma_shared);
  WgmmaRing<kHeadDim> ring{.tiles = queries + Shared::kQueryBytes, .barriers = shared_address(control.barriers)};
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads - 1;  // -1: copies
  if (threadIdx.x < 32) {
    auto* kept = reinterpret_cast<int64_t*>(wgmma_shared);
    SequenceItems items;
    const ItemShare<int64_t> share = find_wgmma_share(p, plan, lanes, flags, kept, Shared::kBytes / 8, &items);
    if (share.num_sequences > 32 && !share.is_empty()) items = read_wgmma_items(p, plan, lanes, share.sequence, flags);
    if (static_cast<int32_t>(threadIdx.x) == share.sequence % 32) {  // it has read the sequence
      for (WgmmaWalk& walk : control.walks) walk.start(share, items);
    }
    if (threadIdx.x == 0) ring.init();
  }
  __syncthreads();  // walks and barriers to all
  if (group < 0) {
    give_registers_back<kCopierRegisters>();
    WgmmaWalk& walk = control.walks[kRowGroups];
    WgmmaCopier<kHeadDim> copier(call, ring);
    while (true) {
      sync_warpgroup(group);  // the segment is copied
      if (threadIdx.x == 0) walk.step(p, plan, lanes, flags);
      sync_warpgroup(group);  // the walk to all
      if (!walk.has_segment) break;
      copier.copy_segment(walk);
    }
    copy_async_wait_all();
    call.clear_rows_of_nobody(kWarps, num_owned_rows(p, walk.share.num_sequences));
  } else {
    take_registers<kRowsRegisters>();
    WgmmaWalk& walk = control.walks[group];
    const WgmmaGroupMemory<kHeadDim> memory{
        .queries = queries + group * (Shared::kQueryBytes / kRowGroups),
        .total = reinterpret_cast<float4*>(wgmma_shared + Shared::kQueryBytes + WgmmaRing<kHeadDim>::kBytes +
                                           group * (Shared::kTotalBytes / kRowGroups)),
        .is_last = &control.is_last[group]};
    WarpgroupTurns(group).start();
    while (true) {
      sync_warpgroup(group);  // all warps are done with the segment and its queries
      if (threadIdx.x % kGroupThreads == 0) walk.step(p, plan, lanes, flags);
      sync_warpgroup(group);  // the walk to all
      if (!walk.has_segment) break;
      WgmmaRows<T, kHeadDim> rows(call, walk, memory, group, lanes);
      rows.run(&ring);
    }
  }
#endif
}

/// Launches the kernel of one type and head size.
template <class T, int kHeadDim>
Status launch_wgmma(const AttentionProblem& p, const SplitPlan& plan, const SplitScratch& scratch, int lanes,
                    int num_blocks, Stream stream);

/// Whether this build has the kernel for the current device.
template <class T, int kHeadDim>
bool wgmma_is_built();

}  // namespace polyop::cuda
