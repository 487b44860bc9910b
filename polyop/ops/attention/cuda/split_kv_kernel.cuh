// split_kv: attention of few query rows over long keys at the speed of memory, in one launch.
// Math      o = softmax(scale q k^T) v in one pass, base 2; parts of a row, one for each chunk of keys, are joined by
//           their references in the order of the chunks
// Shapes    q [T, Hq, D] | [B, S, Hq, D] f16, bf16 · k, v paged, packed or padded, q's dtype, f8e4m3 or i8 · out, lse
// Layout    D contiguous; rows of k and v 16-byte aligned with equal strides; page_table [B, W] i32
// Work      item = the rows of one tile (up to 8, 16 or 64: query row x head of one kv head) x one chunk of keys, for
//           each head of a team: blocks side by side that read neighbouring heads of the same keys. A team takes an
//           equal share of all items, neighbours, found from the lengths on the device (split_queue.cuh). Each warp of
//           a block copies tiles of 16 keys into its own ring of stages, across the ends of segments (split_ring.cuh).
//           Up to 16 rows: it multiplies its own tiles and the warps meet at a chunk's end (split_narrow.cuh); more: 16
//           rows a warp, and the warps meet at every 64 keys (split_wide.cuh). A tile that blocks share is finished by
//           the one that is last (a semaphore, zero again afterwards). One kernel for each kind of rows: the host picks
//           by the average, each takes all
// Memory    global: k and v once for each row tile; parts only of tiles that blocks share, rows x (D + 2) x 4 bytes
//           for each chunk that stands alone · shared: stages x 128 or 256 rows of D, 32 D x 4 to meet in
// Roofline  bandwidth-bound while G S stays under the ridge, about 200 FLOP per byte of k and v on H200: 4 G S / (2
//           bytes of dtype) < 200, so up to 100 G S rows in 16 bits; target 92% of a copy once k and v exceed 256 MB
//           (docs/performance.md)
// Numerics  q k^T and p v in the matrix units with f32 sums; p, at most 2^8, is rounded to 16 bits (f16 for 8-bit
//           caches, whose q is scaled by a power of two into f16's range); chunks are joined in their order by the same
//           operations in registers and from memory, so that a row's bits depend on its own sequence only; keys inside
//           a sequence's length must be finite, also where a tree hides them; no visible key: out 0, lse -inf
// Limits    D = Dv in {64, 80, 96, 128, 192, 256}, no dense mask, softmax; sm_80 or newer
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "polyop/core/kernel_list.h"
#include "polyop/cuda/early_launch.cuh"
#include "polyop/cuda/launch.h"
#include "polyop/ops/attention/cuda/split_joining.cuh"
#include "polyop/ops/attention/cuda/split_wide.cuh"

namespace polyop::cuda {

/// Bytes of shared memory: the stages' and what stands before them.
template <class Kv, int kHeadDim>
struct SplitShared {
  static constexpr int kStageBytes = kWarps * SplitRing<Kv, kHeadDim>::kStageBytes;
  static constexpr int kIsLastBytes = 16;
  static constexpr int kQueueBytes = (static_cast<int>(sizeof(WorkQueue)) + 15) / 16 * 16;
  static constexpr int kJoiningBytes = static_cast<int>(sizeof(NarrowShared<kHeadDim>));
  static constexpr int kFixedBytes = (kIsLastBytes + kQueueBytes + kJoiningBytes + 127) / 128 * 128;
};

/// Blocks that share a multiprocessor's registers and, where it is large enough, its shared memory.
template <int kHeadDim>
inline constexpr int kBlocksPerMultiprocessor = kHeadDim <= 192 ? 2 : 1;

/// Largest head size with wide tiles: above, the sums of a lane exceed its registers and all tiles are narrow.
inline constexpr int kWidestHeadDim = 192;

/// Groups of eight rows of a narrow tile.
template <int kHeadDim>
inline constexpr int kMostGroups = kHeadDim <= 128 ? 2 : 1;

/// What a launch needs of the device.
struct SplitResources {
  int num_blocks = 0;  // that the device holds at a time; 0: not one
  int round_keys = 64;
  int shared_bytes = 0;  // of a block
};

template <class Kv, int kHeadDim>
SplitResources split_resources() {
  using Shared = SplitShared<Kv, kHeadDim>;
  static_assert(SplitRing<Kv, kHeadDim>::kNumStages + 3 <= WorkQueue::kSlots);
  constexpr int kReservedBytes = 1024;  // of each block, by the runtime
  const DeviceNumbers& device = device_numbers();
  for (int blocks = kBlocksPerMultiprocessor<kHeadDim>; blocks > 0; --blocks) {
    const int bytes =
        std::min(device.shared_bytes_per_block, device.shared_bytes_per_multiprocessor / blocks - kReservedBytes);
    constexpr int kBytes = Shared::kFixedBytes + SplitRing<Kv, kHeadDim>::kNumStages * Shared::kStageBytes;
    if (kBytes > bytes) continue;
    return {.num_blocks = blocks * device.num_multiprocessors,
            .round_keys = SplitRing<Kv, kHeadDim>::kKeysPerRound,
            .shared_bytes = kBytes};
  }
  return {};
}

/// What the warps of a block share beside the arguments.
template <class Kv, int kHeadDim>
struct SplitBlock {
  SplitCall call;
  WorkQueue* queue;
  NarrowShared<kHeadDim>* joining;
  int* is_last;
  uint32_t stages;
};

template <int kGroups, class Compute, class Kv, int kHeadDim>
__device__ inline void run_narrow(const SplitBlock<Kv, kHeadDim>& block, SplitRing<Kv, kHeadDim>* ring,
                                  const SplitWork& work) {
  NarrowRows<Compute, Kv, kHeadDim, kGroups> rows(block.call, work, block.joining);
  rows.attend(ring);
  rows.finish();
}

template <class Compute, class Kv, int kHeadDim>
__device__ inline void run_wide(const SplitBlock<Kv, kHeadDim>& block, SplitRing<Kv, kHeadDim>* ring,
                                const SplitWork& work) {
  WideRows<Compute, Kv, kHeadDim> rows(block.call, work);
  rows.attend(ring);
  rows.finish(block.is_last);
}

/// One segment of any kind. Not inlined: together in one function the kinds leave too few registers for each.
template <class Compute, class Kv, int kHeadDim, RowKind kKind>
__device__ __noinline__ void run_rows(const SplitBlock<Kv, kHeadDim>& block, const SplitWork& work, RingState* state) {
  SplitRing<Kv, kHeadDim> ring(block.call, block.stages, *block.queue);
  ring.resume(*state);
  if constexpr (kKind == RowKind::kWide) {
    run_wide<Compute>(block, &ring, work);
  } else {
    run_narrow<kKind == RowKind::kEight ? 1 : kMostGroups<kHeadDim>, Compute>(block, &ring, work);
  }
  *state = ring.state();
}

/// All segments of the block; `run(work, is_first)` does one.
template <class Kv, int kHeadDim, class Run>
__device__ inline void run_segments(const SplitBlock<Kv, kHeadDim>& block, Run&& run) {
  const NarrowJoining<kHeadDim> joining(block.call, *block.queue, block.joining, block.is_last);
  WorkQueue& queue = *block.queue;
  CountedParts counted;
#pragma unroll 1
  for (int32_t index = 0;; ++index) {
    if (queue.is_finder())
      queue.look_ahead(block.call.p, block.call.plan, block.call.flags, index, SplitRing<Kv, kHeadDim>::kNumStages);
    __syncthreads();  // the segment to all
    if (queue.found == 0) break;
    const SplitWork& work = queue.at(index);
    run(work, index == 0);
    joining.run(index, &counted);
    if (work.segment.is_final) break;
  }
}

/// The block's share when its kernel is not made for the batch.
template <class Compute, class Kv, int kHeadDim>
__device__ __noinline__ void run_mixed(const SplitBlock<Kv, kHeadDim>& block) {
  RingState state;
  run_segments(block, [&](const SplitWork& work, bool is_first) {
    if (is_first) {
      SplitRing<Kv, kHeadDim> ring(block.call, block.stages, *block.queue);
      ring.start();
      state = ring.state();
    }
    if (work.sequence.tile_rows > block.call.plan.narrow_rows) {
      if constexpr (kHeadDim <= kWidestHeadDim) run_rows<Compute, Kv, kHeadDim, RowKind::kWide>(block, work, &state);
    } else if (kMostGroups<kHeadDim> == 1 || work.sequence.num_rows <= 8) {
      run_rows<Compute, Kv, kHeadDim, RowKind::kEight>(block, work, &state);
    } else {
      run_rows<Compute, Kv, kHeadDim, RowKind::kSixteen>(block, work, &state);
    }
  });
}

/// Asks for what a block reads first, and for pages of what it reads and writes later: a first access to a page takes
/// some thousand cycles. Nothing of it is used before earlier work is done.
__device__ inline void prefetch_first_reads(const SplitCall& call) {
  constexpr int kLineInts = 32;
  const AttentionProblem& p = call.p;
  const auto lane = static_cast<int64_t>(threadIdx.x % 32);
  const auto prefetch_lines = [&](const int32_t* numbers, int64_t count) {
    if (numbers != nullptr && lane * kLineInts < count) prefetch_line(numbers + lane * kLineInts);
  };
  switch (threadIdx.x / 32) {
    case 0:
      prefetch_lines(p.query_offsets, p.num_sequences + 1);
      break;
    case 1:
      prefetch_lines(p.kv_lengths, p.num_sequences);
      prefetch_lines(p.kv_offsets, p.num_sequences + 1);
      break;
    case 2:
      if (p.page_size > 0)
        prefetch_lines(p.page_table, (p.num_sequences - 1) * p.page_table_stride + p.kv_capacity / p.page_size);
      break;
    default:
      if (lane == 0) prefetch_line(p.q.data);
      if (lane == 1) prefetch_line(p.out.data);
      if (lane == 2) prefetch_line(call.scratch.semaphores);
      if (lane == 3) prefetch_line(call.scratch.narrow);
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <class Compute, class Kv, int kHeadDim, RowKind kMain>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerMultiprocessor<kHeadDim>)
    split_kv_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ SplitPlan plan,
                    const __grid_constant__ AttentionFlags flags, const __grid_constant__ SplitScratch scratch) {
  let_next_kernel_start();
  extern __shared__ __align__(128) char shared[];
  using Layout = SplitShared<Kv, kHeadDim>;
  const SplitBlock<Kv, kHeadDim> block{
      .call = {{p, flags, plan.group_size}, plan, scratch},
      .queue = reinterpret_cast<WorkQueue*>(shared + Layout::kIsLastBytes),
      .joining = reinterpret_cast<NarrowShared<kHeadDim>*>(shared + Layout::kIsLastBytes + Layout::kQueueBytes),
      .is_last = reinterpret_cast<int*>(shared),
      .stages = shared_address(shared) + Layout::kFixedBytes};
  prefetch_first_reads(block.call);
  wait_for_earlier_work();
  WorkQueue& queue = *block.queue;
  auto* start = reinterpret_cast<QueueStart<sizeof(NarrowShared<kHeadDim>)>*>(block.joining);
  queue.start(p, plan, flags, start->sums, start->kept, start->kMostKept);
  __syncthreads();  // the queue to all
  constexpr int kGroups = kMain == RowKind::kEight ? 1 : kMostGroups<kHeadDim>;
  const bool is_mixed = kMain == RowKind::kWide ? queue.least_rows <= plan.narrow_rows
                                                : kHeadDim <= kWidestHeadDim && queue.most_rows > 8 * kGroups;
  if (is_mixed) {
    const SplitBlock<Kv, kHeadDim> copy = block;  // what a call may see lies in memory
    run_mixed<Compute>(copy);
  } else {
    SplitRing<Kv, kHeadDim> ring(block.call, block.stages, queue);
    run_segments(block, [&](const SplitWork& work, bool is_first) {
      if (is_first) ring.start();
      if constexpr (kMain == RowKind::kWide) {
        run_wide<Compute>(block, &ring, work);
      } else {
        run_narrow<kGroups, Compute>(block, &ring, work);
      }
    });
  }
  copy_async_wait_all();
  block.call.clear_rows_of_nobody(kWarps, queue.owned_rows);
}

/// Launches a kernel of one type and head size: that for sequences of the kind of `main`, which takes all others, too,
/// only slower.
template <class Compute, class Kv, int kHeadDim>
Status launch_split_kv(const AttentionProblem& p, const SplitPlan& plan, const SplitScratch& scratch, RowKind main,
                       int num_blocks, int shared_bytes, Stream stream);

}  // namespace polyop::cuda
