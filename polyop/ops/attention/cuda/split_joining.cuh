// Narrow tiles that blocks share: a block counts the parts it has stored, and learns at its next segment's end, when
// the answer is there, whether none was missing; then it joins them.
#pragma once

#include <cstdint>

#include "polyop/ops/attention/cuda/split_narrow.cuh"

namespace polyop::cuda {

/// What a block knows of its last count.
struct CountedParts {
  int32_t index = -1;    // of the segment in the queue; -1: it waits for no answer
  uint32_t counted = 0;  // thread 0: the count
};

template <int kHeadDim>
class NarrowJoining {
 public:
  __device__ NarrowJoining(const SplitCall& call, const WorkQueue& queue, NarrowShared<kHeadDim>* shared, int* is_last)
      : call_(call), queue_(queue), shared_(shared), is_last_(is_last) {}

  /// At the end of segment `index`, called by all threads: counts the segment's parts, if blocks share its tile, and
  /// finishes the tile of the count before, if that was the last one; behind the final segment its own, too.
  __device__ void run(int32_t index, CountedParts* before) const {
    const SplitWork& work = queue_.at(index);
    bool counts = call_.shares_narrow(work);
#pragma unroll 1
    while (counts || before->index >= 0) {
      __syncthreads();  // parts to thread 0; the sums that lay in the slots' place have been read
      uint32_t counted = 0;
      if (threadIdx.x == 0 && counts) counted = call_.count_parts(work);
      if (before->index >= 0) {
        const SplitWork& tile = queue_.at(before->index);
        if (threadIdx.x == 0) *is_last_ = call_.takes_tile(tile, before->counted) ? 1 : 0;
        if (threadIdx.x >= 32) find_slots(tile);
        __syncthreads();  // is_last and slots to all
        if (*is_last_ != 0) join_parts(tile);
      }
      *before = {counts ? index : -1, counted};
      if (!work.segment.is_final) break;
      counts = false;
    }
  }

 private:
  /// Slots of the tile's parts in the order of their chunks, behind them their number. By all warps but the first.
  __device__ void find_slots(const SplitWork& work) const {
    const SplitPlan& plan = call_.plan;
    const SplitScratch& scratch = call_.scratch;
    const SplitSegment& segment = work.segment;
    const int32_t share = queue_.share.share;
    const int32_t item_cost = work.sequence.item_cost;
    const int32_t num_chunks = work.sequence.num_chunks;
    const int32_t begin = work.before + segment.tile_item * item_cost;
    const int32_t member = static_cast<int32_t>(blockIdx.x) % plan.team;
    // Chunks of the team that begins the tile: they are one part.
    const int32_t first_team = quotient(begin, share);
    const int32_t first_chunks = min(num_chunks, first_item_from((first_team + 1) * share, begin, item_cost));
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - 32;
    for (int32_t chunk = first_chunks + thread; chunk < num_chunks; chunk += kBlockThreads - 32) {
      const int32_t team = quotient(begin + chunk * item_cost, share);
      const int32_t leading = chunk - first_item_from(team * share, begin, item_cost);
      shared_->slots[1 + chunk - first_chunks] = scratch.narrow_slot(team * plan.team + member, leading);
    }
    if (thread != 0) return;
    shared_->slots[0] = scratch.narrow_slot(first_team * plan.team + member, scratch.most_leading);
    shared_->slots[kMostChunks] = 1 + num_chunks - first_chunks;
  }

  /// Joins the parts in their order and stores the results.
  __device__ void join_parts(const SplitWork& work) const {
    constexpr int kQuads = kHeadDim / 4;
    constexpr int kTogether = 16;  // parts on their way at a time
    const SplitScratch& scratch = call_.scratch;
    const int32_t num_parts = shared_->slots[kMostChunks];
    const int32_t num_quads = work.num_rows() * kQuads;
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < num_quads; i += kBlockThreads) {
      const int32_t row = i / kQuads;
      const int32_t channel = i % kQuads * 4;
      RowSum sum;
      float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int32_t first = 0; first < num_parts; first += kTogether) {
        float4 values[kTogether];
        float2 sums[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {  // behind the last one it is read again, and not used
          const float* part = scratch.narrow_part(shared_->slots[min(first + j, num_parts - 1)], kHeadDim);
          values[j] = __ldcg(reinterpret_cast<const float4*>(part + row * kHeadDim + channel));
          sums[j] = __ldcg(reinterpret_cast<const float2*>(part + scratch.narrow_rows * kHeadDim) + row);
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (first + j < num_parts) total = join_quads(total, values[j], sum.join({sums[j].x, sums[j].y}));
        }
      }
      call_.store_result(work, row, channel, total, sum);
    }
  }

  const SplitCall& call_;
  const WorkQueue& queue_;
  NarrowShared<kHeadDim>* shared_;
  int* is_last_;  // in shared memory
};

}  // namespace polyop::cuda
