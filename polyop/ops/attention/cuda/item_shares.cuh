// How the items of a batch, in their order, are shared out to the blocks of a launch, from lengths on the device.
// Blocks come in teams of neighbours, which get the same items: each member has a head of its own, or a row tile.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "polyop/cuda/ragged.cuh"

namespace polyop::cuda {

__host__ __device__ inline int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

/// a / b, rounded down; the division of 64 bits is slow.
[[nodiscard]] __device__ inline int64_t quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

[[nodiscard]] __device__ inline int32_t quotient(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

/// First item of a sequence, whose items begin at `before`, that begins at `cost` or later.
template <class Cost>
[[nodiscard]] __device__ inline int32_t first_item_from(Cost cost, Cost before, int32_t item_cost) {
  return cost <= before ? 0 : static_cast<int32_t>(quotient(cost - before + item_cost - 1, Cost{item_cost}));
}

/// A team's share of the items: neighbours in the list of all items, of `share` cost together; an item is the team's in
/// whose share it begins. Cost: int32_t or int64_t, which holds the cost of all items and a share more.
template <class Cost>
struct ItemShare {
  Cost share = 1;
  Cost begin = 0;             // of this team's
  Cost end = 0;               // and no more than all items cost
  Cost before = 0;            // cost of the sequences before `sequence`
  int32_t sequence = 0;       // where the share begins; num_sequences: it is empty
  int32_t num_sequences = 0;  // that have items

  [[nodiscard]] __device__ bool is_empty() const { return sequence >= num_sequences; }
};

/// What a sequence is cut into: `count` items of equal cost.
struct SequenceCost {
  int32_t count = 0;
  int32_t item_cost = 0;
};

/// Finds where items from `cost` on begin: sets `sequence` and `before`, which is the cost of the sequences before it;
/// `sequence` becomes `num_sequences` when no item ends behind `cost`. `cost_of(sequence)` is that of a sequence's
/// items; all lanes of a warp call it together, each for the sequences lane, lane + 32, ...
template <class Cost, class CostOf>
__device__ inline void find_cost(Cost cost, int32_t num_sequences, CostOf&& cost_of, int32_t* sequence, Cost* before) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  *before = 0;
  *sequence = num_sequences;
#pragma unroll 1
  for (int32_t first = 0; first < num_sequences; first += 32) {
    const Cost own = first + lane < num_sequences ? cost_of(first + lane) : 0;
    const Cost sum = warp_prefix_sum(own);
    const uint32_t reached = __ballot_sync(0xffffffffu, *before + sum > cost);
    if (reached != 0) {
      const int at = __ffs(static_cast<int>(reached)) - 1;
      *sequence = first + at;
      *before += __shfl_sync(0xffffffffu, sum - own, at);
      return;
    }
    *before += __shfl_sync(0xffffffffu, sum, 31);
  }
}

}  // namespace polyop::cuda
