// How the items of a batch, in their order, are shared out to the blocks of a launch, from lengths on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "polyop/cuda/ragged.cuh"

namespace polyop::cuda {

__host__ __device__ inline int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

/// The items of all sequences, in their order, are shared out: equal counts, the first blocks one more.
struct ItemShares {
  int32_t base = 0;
  int32_t extra = 0;

  [[nodiscard]] __device__ int32_t start(int32_t block) const { return block * base + min(block, extra); }
  [[nodiscard]] __device__ int32_t count(int32_t block) const { return base + (block < extra ? 1 : 0); }
  [[nodiscard]] __device__ int32_t block_of(int32_t item) const {
    const int32_t larger = extra * (base + 1);  // items of the first blocks
    return item < larger ? item / (base + 1) : extra + (item - larger) / base;
  }
};

/// Where a block's share begins.
struct BlockShare {
  ItemShares all;
  int32_t sequence = 0;
  int32_t local = 0;                      // item of the sequence
  int32_t most_rows = 0;                  // of a sequence of the batch, in rows x G
  int32_t least_rows = int32_t{1} << 30;  // of those that have any
};

/// A whole warp computes it. `read(sequence)` gives a sequence's items (`count`, `num_rows`); `kept`, shared memory of
/// `most_kept` words, holds their counts from the first pass over the sequences to the second.
template <class Read>
__device__ inline BlockShare find_share(int32_t num_sequences, Read&& read, int32_t* kept, int32_t most_kept) {
  const int lane = threadIdx.x % 32;
  const auto blocks = static_cast<int32_t>(gridDim.x);
  const auto block = static_cast<int32_t>(blockIdx.x);
  BlockShare share;
  int32_t total = 0;
  int32_t before = 0;  // items of the sequences before `first`
  for (int pass = 0; pass < 2; ++pass) {
    const int32_t start = share.all.start(block);
    for (int32_t first = 0; first < num_sequences; first += 32) {
      const int32_t sequence = first + lane;
      int32_t own = 0;
      if (sequence < num_sequences) {
        if (pass == 1 && sequence < most_kept) {
          own = kept[sequence];
        } else {
          const auto items = read(sequence);
          own = items.count;
          share.most_rows = max(share.most_rows, items.num_rows);
          if (items.num_rows > 0) share.least_rows = min(share.least_rows, items.num_rows);
          if (sequence < most_kept) kept[sequence] = own;
        }
      }
      if (pass == 0) {
        total += own;
        continue;
      }
      const int32_t sum = warp_prefix_sum(own);
      const uint32_t reached = __ballot_sync(0xffffffffu, before + sum > start);
      if (reached != 0) {
        const int at = __ffs(static_cast<int>(reached)) - 1;
        share.sequence = first + at;
        share.local = start - before - __shfl_sync(0xffffffffu, sum - own, at);
        return share;
      }
      before += __shfl_sync(0xffffffffu, sum, 31);
    }
    if (pass == 1) break;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, step);
      share.most_rows = max(share.most_rows, __shfl_xor_sync(0xffffffffu, share.most_rows, step));
      share.least_rows = min(share.least_rows, __shfl_xor_sync(0xffffffffu, share.least_rows, step));
    }
    share.all.base = total / blocks;
    share.all.extra = total - share.all.base * blocks;
    if (share.all.count(block) == 0) return share;
  }
  return share;
}

}  // namespace polyop::cuda
