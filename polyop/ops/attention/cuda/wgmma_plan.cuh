// How cuda_wgmma cuts a batch: sequence -> (row tile, kv head) -> chunks of keys, and which block gets which. What a
// sequence is cut into depends on the sequence alone (and on the device), who computes it on the batch.
#pragma once

#include <cstdint>

#include "polyop/cuda/ragged.cuh"
#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/cuda/split_plan.cuh"

namespace polyop::cuda {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kRowGroups = 2;       // warpgroups that multiply, each its own rows
inline constexpr int kGroupRows = 64;      // M of the matrix instruction
inline constexpr int kWgmmaTileRows = kRowGroups * kGroupRows;
inline constexpr int kWgmmaTileKeys = 128;
inline constexpr int kWgmmaThreads = (kRowGroups + 1) * kGroupThreads;

inline constexpr int kItemOverhead = 2;  // tiles that could be multiplied while an item begins and ends

/// A sequence's units, the tiles of all heads, are dealt out to `lanes` blocks side by side, so that two blocks read
/// the same keys at the same time; one item is one chunk of a unit of every lane. Its cost counts tiles of keys.
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
  const KeyRange first = g.query_rows > 0 ? g.visible(p, 0) : KeyRange{};
  const KeyRange last = g.query_rows > 0 ? g.visible(p, g.query_rows - 1) : KeyRange{};
  const int32_t end = max(last.end, 0);
  int32_t wanted = plan.splits_wide ? divide_up(plan.wide_target_items, heads * s.num_tiles) : 1;
  // A semaphore for each tile, head and warpgroup; where they run out, one chunk needs none.
  const int64_t tiles_before = sequence + int64_t{g.row_begin} * plan.group_size / kWgmmaTileRows;
  if ((tiles_before + s.num_tiles) * heads * kRowGroups > kNumSemaphores) wanted = 1;
  const int32_t span = wanted > 1 ? max(end - first.begin, 1) : max(end, 1);
  s.chunk = max(divide_up(divide_up(span, kWgmmaTileKeys), wanted) * kWgmmaTileKeys, kLeastChunk);
  s.first_chunk = wanted > 1 ? first.begin / s.chunk : 0;
  s.num_chunks = max(1, divide_up(end, s.chunk) - s.first_chunk);
  s.count = ((s.num_tiles * heads + lanes - 1) >> (lanes - 1)) * s.num_chunks;                 // one lane or two
  const int32_t seen = (max(first.end - first.begin, 0) + max(last.end - last.begin, 0)) / 2;  // of a row, on average
  s.item_cost = kItemOverhead + divide_up(seen, kWgmmaTileKeys * s.num_chunks);
  return s;
}

/// The share of the block's group of lanes; a whole warp computes it. `kept` holds costs from the first pass over the
/// sequences to the second; `items` is what the lane read last.
__device__ inline ItemShare<int64_t> find_wgmma_share(const AttentionProblem& p, const SplitPlan& plan, int32_t lanes,
                                                      const AttentionFlags& flags, int64_t* kept, int32_t most_kept,
                                                      SequenceItems* items) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t num_sequences = sequences_with_rows(p, flags);
  const auto cost_of = [&](int32_t sequence) {
    *items = read_wgmma_items(p, plan, lanes, sequence, flags);
    return int64_t{items->count} * items->item_cost;
  };
  int64_t total = 0;
  int64_t count = 0;
  int32_t least = INT32_MAX;  // item_cost
  int32_t most = 0;
  for (int32_t sequence = lane; sequence < num_sequences; sequence += 32) {
    const int64_t own = cost_of(sequence);
    if (sequence < most_kept) kept[sequence] = own;
    if (items->count == 0) continue;
    total += own;
    count += items->count;
    least = min(least, items->item_cost);
    most = max(most, items->item_cost);
  }
  total = warp_sum(total);
  count = warp_sum(count);
  least = __reduce_min_sync(0xffffffffu, least);
  most = __reduce_max_sync(0xffffffffu, most);
  // Whole items where all cost the same, so that fewer tiles are shared.
  const bool is_even = least == most;
  const int64_t groups = static_cast<int32_t>(gridDim.x) / lanes;
  ItemShare<int64_t> share;
  share.num_sequences = num_sequences;
  share.share = max(int64_t{1}, quotient((is_even ? count : total) + groups - 1, groups) * (is_even ? most : 1));
  share.begin = static_cast<int32_t>(blockIdx.x) / lanes * share.share;
  share.end = min(share.begin + share.share, total);
  find_cost(
      share.begin, num_sequences,
      [&](int32_t sequence) { return sequence < most_kept ? kept[sequence] : cost_of(sequence); }, &share.sequence,
      &share.before);
  return share;
}

/// Walks over a block's share, a segment at a time; each warpgroup has its own walk in shared memory.
struct WgmmaWalk {
  SequenceItems sequence;
  SplitSegment segment;
  ItemShare<int64_t> share;  // its `before` and `sequence` follow the walk
  int32_t local;             // next item, in the sequence
  bool has_segment;

  /// `items` is that of the share's sequence, if there is one.
  __device__ void start(const ItemShare<int64_t>& from, const SequenceItems& items) {
    share = from;
    sequence = items;
    local = 0;
    if (!share.is_empty()) local = first_item_from(share.begin, share.before, items.item_cost);
  }

  /// To the next segment, by one thread; has_segment is false behind the last one.
  __device__ void step(const AttentionProblem& p, const SplitPlan& plan, int32_t lanes, const AttentionFlags& flags) {
    has_segment = false;
    while (share.sequence < share.num_sequences) {
      const SequenceItems& s = sequence;
      if (local >= s.count) {
        share.before += int64_t{s.count} * s.item_cost;
        local = 0;
        if (++share.sequence < share.num_sequences) sequence = read_wgmma_items(p, plan, lanes, share.sequence, flags);
        continue;
      }
      const int64_t left = share.end - share.before - int64_t{local} * s.item_cost;  // in costs
      if (left <= 0) return;
      segment = SplitSegment{};
      const int32_t row = s.num_chunks == 1 ? local : local / s.num_chunks;
      segment.chunk_begin = local - row * s.num_chunks;
      segment.tile_item = local - segment.chunk_begin;
      int32_t count = s.num_chunks - segment.chunk_begin;
      if (int64_t{count - 1} * s.item_cost >= left)
        count = static_cast<int32_t>(quotient(left + s.item_cost - 1, int64_t{s.item_cost}));
      segment.chunk_end = segment.chunk_begin + count;
      local += count;
      // Neighbouring units are the first and the last tile of a head, and lanes take turns: a causal mask makes tiles
      // of unequal cost.
      const int32_t unit = row * lanes + (static_cast<int32_t>(blockIdx.x) + row) % 2 % lanes;
      segment.kv_head = unit / s.num_tiles;
      if (segment.kv_head >= p.num_kv_heads) continue;
      const int32_t place = unit - segment.kv_head * s.num_tiles;
      segment.row_begin = (place % 2 == 0 ? place / 2 : s.num_tiles - 1 - place / 2) * kWgmmaTileRows;
      const SequenceGeometry& g = s.geometry;
      const int32_t end = min(min(segment.row_begin + kWgmmaTileRows, s.num_rows), g.query_rows * plan.group_size);
      if (end > segment.row_begin) {
        segment.key_begin =
            max(g.visible(p, segment.row_begin / plan.group_size).begin, begin_of_chunk(segment.chunk_begin));
        segment.key_end = min(g.visible(p, (end - 1) / plan.group_size).end, begin_of_chunk(segment.chunk_end));
      }
      has_segment = true;
      return;
    }
  }

  [[nodiscard]] __device__ int32_t begin_of_chunk(int32_t chunk) const {
    return (sequence.first_chunk + chunk) * sequence.chunk;
  }

  /// Tiles that cover the segment's keys; they stand at multiples of their size.
  [[nodiscard]] __device__ int32_t first_tile() const { return segment.key_begin / kWgmmaTileKeys; }
  [[nodiscard]] __device__ int32_t end_tile() const {
    return segment.key_end > segment.key_begin ? divide_up(segment.key_end, kWgmmaTileKeys) : first_tile();
  }
};

/// Which team has which item of a tile, one after the other.
class ItemOwners {
 public:
  /// Begins with the tile's first item, which begins at `cost`. `team`, that of `share`, has an item of the tile.
  __device__ ItemOwners(const ItemShare<int64_t>& share, int64_t cost, int32_t item_cost, int32_t team)
      : share_(share.share), item_cost_(item_cost), cost_(cost), end_(share.begin + share.share), team_(team) {
    while (cost_ < end_ - share_) {
      end_ -= share_;
      --team_;
    }
  }

  __device__ void advance() {
    cost_ += item_cost_;
    ++place_;
    while (cost_ >= end_) {
      end_ += share_;
      ++team_;
      place_ = 0;
    }
  }

  [[nodiscard]] __device__ int32_t team() const { return team_; }
  [[nodiscard]] __device__ int32_t place() const { return place_; }  // among the team's items of the tile

 private:
  int64_t share_;
  int64_t item_cost_;
  int64_t cost_;
  int64_t end_;
  int32_t team_;
  int32_t place_ = 0;
};

}  // namespace polyop::cuda
