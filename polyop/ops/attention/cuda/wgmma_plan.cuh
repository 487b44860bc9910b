// How cuda_wgmma cuts a batch: sequence -> (row tile, kv head) -> chunks of keys, and which block gets which. What a
// sequence is cut into depends on the sequence alone (and on the device), who computes it on the batch.
#pragma once

#include <cstdint>

#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/cuda/split_plan.cuh"

namespace polyop::cuda {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kRowGroups = 2;       // warpgroups that multiply, each its own rows
inline constexpr int kGroupRows = 64;      // M of the matrix instruction
inline constexpr int kWgmmaTileRows = kRowGroups * kGroupRows;
inline constexpr int kWgmmaTileKeys = 128;
inline constexpr int kWgmmaThreads = (kRowGroups + 1) * kGroupThreads;

/// A sequence's share of the items. Its units, the tiles of all heads, are dealt out to `lanes` blocks side by side, so
/// that two blocks read the same keys at the same time; one item is one chunk of a unit of every lane.
__device__ inline SequenceItems read_wgmma_items(const AttentionProblem& p, const SplitPlan& plan, int32_t lanes,
                                                 int32_t sequence, const AttentionFlags& flags) {
  SequenceItems s;
  s.geometry = read_geometry(p, sequence, flags);
  s.num_rows = s.geometry.allotted * plan.group_size;
  if (s.num_rows == 0) return s;
  const SequenceGeometry& g = s.geometry;
  const auto heads = static_cast<int32_t>(p.num_kv_heads);
  s.tile_rows = kWgmmaTileRows;
  s.num_tiles = divide_up(s.num_rows, kWgmmaTileRows);
  const int32_t begin = g.query_rows > 0 ? g.visible(p, 0).begin : 0;
  const int32_t end = g.query_rows > 0 ? max(g.visible(p, g.query_rows - 1).end, 0) : 0;
  int32_t wanted = plan.splits_wide ? divide_up(plan.wide_target_items, heads * s.num_tiles) : 1;
  // A semaphore for each tile, head and warpgroup; where they run out, one chunk needs none.
  const int64_t tiles_before = sequence + int64_t{g.row_begin} * plan.group_size / kWgmmaTileRows;
  if ((tiles_before + s.num_tiles) * heads * kRowGroups > kNumSemaphores) wanted = 1;
  const int32_t span = wanted > 1 ? max(end - begin, 1) : max(end, 1);
  s.chunk = max(divide_up(divide_up(span, kWgmmaTileKeys), wanted) * kWgmmaTileKeys, kLeastChunk);
  s.first_chunk = wanted > 1 ? begin / s.chunk : 0;
  s.num_chunks = max(1, divide_up(end, s.chunk) - s.first_chunk);
  s.count = divide_up(s.num_tiles * heads, lanes) * s.num_chunks;
  return s;
}

/// Where the items of a block begin. `share` neighbours in the list of all items belong to one group of lanes.
struct WgmmaShare {
  int32_t share = 0;
  int32_t start = 0;
  int32_t count = 0;
  int32_t sequence = 0;
  int32_t local = 0;  // item of the sequence
};

/// A whole warp computes it. `kept` holds numbers of items from the first pass over the sequences to the second.
__device__ inline WgmmaShare find_wgmma_share(const AttentionProblem& p, const SplitPlan& plan, int32_t lanes,
                                              const AttentionFlags& flags, int32_t* kept, int32_t most_kept) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto num_sequences = static_cast<int32_t>(p.num_sequences);
  const auto count_of = [&](int32_t sequence) {
    return sequence < num_sequences ? read_wgmma_items(p, plan, lanes, sequence, flags).count : 0;
  };
  int32_t total = 0;
  for (int32_t sequence = lane; sequence < num_sequences; sequence += 32) {
    const int32_t own = count_of(sequence);
    if (sequence < most_kept) kept[sequence] = own;
    total += own;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  WgmmaShare share;
  share.share = max(1, divide_up(total, static_cast<int32_t>(gridDim.x) / lanes));
  share.start = static_cast<int32_t>(blockIdx.x) / lanes * share.share;
  share.count = min(share.share, max(0, total - share.start));
  if (share.count == 0) return share;
  int32_t before = 0;  // items of the sequences before `first`
  for (int32_t first = 0; first < num_sequences; first += 32) {
    const int32_t sequence = first + lane;
    const int32_t own = sequence < min(most_kept, num_sequences) ? kept[sequence] : count_of(sequence);
    int32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, before + sum > share.start);
    if (reached != 0) {
      const int at = __ffs(static_cast<int>(reached)) - 1;
      share.sequence = first + at;
      share.local = share.start - before - __shfl_sync(0xffffffffu, sum - own, at);
      return share;
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  return share;
}

/// Walks over a block's share, a segment at a time; each warpgroup has its own walk in shared memory.
struct WgmmaWalk {
  SplitWork work;  // the segment
  int32_t share;
  int32_t local;  // next item, in the segment's sequence
  int32_t next;   // the same, in the list of all
  int32_t left;
  bool has_segment;

  __device__ void start(const WgmmaShare& from) {
    work.sequence = SequenceItems{};
    work.sequence.geometry.sequence = from.sequence - 1;  // the first step begins with the one that follows it
    share = from.share;
    local = from.local;
    next = from.start;
    left = from.count;
    has_segment = false;
  }

  /// To the next segment, by one thread; has_segment is false behind the last one.
  __device__ void step(const AttentionProblem& p, const SplitPlan& plan, int32_t lanes, const AttentionFlags& flags) {
    bool is_first = !has_segment;
    has_segment = false;
    while (left > 0) {
      SequenceItems s = work.sequence;
      while (local >= s.count) {
        if (!is_first) local = 0;
        s = read_wgmma_items(p, plan, lanes, s.geometry.sequence + 1, flags);
        is_first = false;
      }
      work.sequence = s;
      SplitSegment segment;
      const int32_t row = local / s.num_chunks;
      segment.chunk_begin = local - row * s.num_chunks;
      const int32_t count = min(left, s.num_chunks - segment.chunk_begin);
      segment.chunk_end = segment.chunk_begin + count;
      segment.tile_item = next - segment.chunk_begin;
      local += count;
      next += count;
      left -= count;
      // Neighbouring units are the first and the last tile of a head, and lanes take turns: a causal mask makes tiles
      // of unequal cost.
      const int32_t unit = row * lanes + static_cast<int32_t>((blockIdx.x + static_cast<unsigned>(row)) % lanes);
      segment.kv_head = unit / s.num_tiles;
      if (segment.kv_head >= p.num_kv_heads) continue;
      const int32_t place = unit - segment.kv_head * s.num_tiles;
      segment.row_begin = (place % 2 == 0 ? place / 2 : s.num_tiles - 1 - place / 2) * kWgmmaTileRows;
      const SequenceGeometry& g = s.geometry;
      const int32_t first = segment.row_begin / plan.group_size;
      const int32_t end = min(min(segment.row_begin + kWgmmaTileRows, s.num_rows), g.query_rows * plan.group_size);
      const int32_t last = (end - 1) / plan.group_size;
      if (end > segment.row_begin && first < g.query_rows) {
        segment.key_begin = g.visible(p, first).begin;
        segment.key_end = g.visible(p, last).end;
      }
      work.segment = segment;
      has_segment = true;
      return;
    }
  }

  /// Keys of one chunk that a row of the tile sees.
  [[nodiscard]] __device__ KeyRange keys_of(int32_t chunk) const {
    const int32_t begin = (work.sequence.first_chunk + chunk) * work.sequence.chunk;
    return {max(work.segment.key_begin, begin), min(work.segment.key_end, begin + work.sequence.chunk)};
  }

  /// Tiles of keys that cover a range; they stand at multiples of their size.
  [[nodiscard]] __device__ static int32_t first_tile(KeyRange keys) { return keys.begin / kWgmmaTileKeys; }
  [[nodiscard]] __device__ static int32_t end_tile(KeyRange keys) {
    return keys.end > keys.begin ? divide_up(keys.end, kWgmmaTileKeys) : first_tile(keys);
  }
};

}  // namespace polyop::cuda
