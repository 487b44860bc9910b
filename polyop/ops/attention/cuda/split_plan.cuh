// How split_kv cuts a batch: sequence -> row tiles x kv heads x chunks of keys. Every number depends on the sequence
// alone (and on the device), so that its bits do not depend on its neighbours.
#pragma once

#include <cstdint>

#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/cuda/item_shares.cuh"
#include "polyop/ops/attention/cuda/kv_tile.cuh"
#include "polyop/ops/attention/cuda/sequence_geometry.cuh"

namespace polyop::cuda {

inline constexpr int kWarps = 4;  // of a block
inline constexpr int kKeysPerRound = kWarps * kKeysPerTile;
inline constexpr int kRowsPerWarp = 16;  // of a wide tile
inline constexpr int kLeastTileRows = 8;
inline constexpr int kLeastChunk = 256;  // keys; below, joining the parts costs more than the parallelism gives

/// Of the ring. More copies on their way bring no more bandwidth, and every other access to memory waits behind them.
inline constexpr int kNumStages = 2;

/// Sequences of up to eight and up to sixteen rows (query row x head of one kv head), and of more.
enum class RowKind : uint8_t { kEight, kSixteen, kWide };

/// The host's part of the plan, the same for all sequences.
struct SplitPlan {
  int32_t group_size = 1;      // G
  int32_t narrow_rows = 16;    // of a narrow tile: more do not fit the registers
  int32_t rows_per_tile = 64;  // of a sequence with more than narrow_rows rows; narrow_rows: there are no wide tiles
  int32_t target_items = 264;  // row tiles x kv heads x chunks of one sequence that fill the device
  int32_t wide_target_items = 132;  // of wide tiles, whose parts are large
  int64_t row_bytes = 0;            // between rows of k, and of v
  int64_t page_bytes = 0;           // between pages
  uint32_t page_size = 0;           // R; 0: k and v are not paged
  uint32_t num_pages = 0;           // P
  int32_t page_shift = -1;          // of a page size that is a power of two
  bool tiles_are_dense = true;      // sixteen keys from a multiple of sixteen on lie at equal distances
  bool splits_wide = true;          // false: sequences of wide tiles are one chunk
};

/// Keys of one chunk of a sequence with `num_tiles` row tiles.
__host__ __device__ inline int32_t chunk_keys(const SplitPlan& plan, int32_t num_kv_heads, int32_t num_tiles,
                                              bool narrow, int32_t kv_length) {
  const int32_t target = narrow ? plan.target_items : plan.wide_target_items;
  const int32_t wanted = narrow || plan.splits_wide ? divide_up(target, num_kv_heads * num_tiles) : 1;
  const int32_t rounds = divide_up(kv_length > 0 ? kv_length : 1, kKeysPerRound);
  const int32_t keys = divide_up(rounds, wanted) * kKeysPerRound;
  return keys < kLeastChunk ? kLeastChunk : keys;
}

/// A sequence's share of the items.
struct SequenceItems {
  SequenceGeometry geometry;
  int32_t num_rows = 0;  // query rows x G
  int32_t tile_rows = 16;
  int32_t num_tiles = 0;
  int32_t chunk = 0;        // keys
  int32_t first_chunk = 0;  // the first one that any row sees
  int32_t num_chunks = 0;   // from there on
  int32_t count = 0;
};

__device__ inline SequenceItems read_items(const AttentionProblem& p, const SplitPlan& plan, int32_t sequence,
                                           const AttentionFlags& flags) {
  SequenceItems s;
  s.geometry = read_geometry(p, sequence, flags);
  s.num_rows = s.geometry.allotted * plan.group_size;
  if (s.num_rows == 0) return s;
  const bool narrow = s.num_rows <= plan.narrow_rows;
  s.tile_rows = narrow ? plan.narrow_rows : plan.rows_per_tile;
  s.num_tiles = divide_up(s.num_rows, s.tile_rows);
  const auto heads = static_cast<int32_t>(p.num_kv_heads);
  s.chunk = chunk_keys(plan, heads, s.num_tiles, narrow, s.geometry.kv_length);
  // A semaphore for each tile and head; where they run out, one chunk needs none.
  const int64_t semaphores = (sequence + (int64_t{s.geometry.row_begin} * plan.group_size) / kLeastTileRows +
                              divide_up(s.num_rows, kLeastTileRows)) *
                             int64_t{heads};
  if (semaphores > kNumSemaphores) s.chunk = divide_up(max(s.geometry.kv_length, 1), kKeysPerRound) * kKeysPerRound;
  const int32_t begin = s.geometry.query_rows > 0 ? s.geometry.visible(p, 0).begin : 0;
  const int32_t end = s.geometry.query_rows > 0 ? s.geometry.visible(p, s.geometry.query_rows - 1).end : 0;
  s.first_chunk = begin / s.chunk;
  s.num_chunks = max(1, divide_up(max(end, 0), s.chunk) - s.first_chunk);
  s.count = s.num_tiles * heads * s.num_chunks;
  return s;
}

/// Chunks chunk_begin .. chunk_end - 1 of the rows of one tile and one kv head: what a block does in one go. Of a wide
/// tile it is one chunk.
struct SplitSegment {
  int32_t kv_head = 0;
  int32_t row_begin = 0;    // first row of the tile in its sequence, in rows x G
  int32_t chunk_begin = 0;  // in 0 .. num_chunks
  int32_t chunk_end = 0;
  int32_t tile_item = 0;  // number of the tile's chunk 0 among all items
  int32_t key_begin = 0;  // first key that a row of the tile may see in the chunks
  int32_t key_end = 0;
  int32_t tile_begin = 0;  // key_begin rounded down to the grid of rounds
  bool is_final = false;   // of its block

  /// A round for each kWarps tiles of keys; one without keys when there are none.
  [[nodiscard]] __device__ int32_t num_rounds() const {
    return key_end > key_begin ? divide_up(key_end - tile_begin, kKeysPerRound) : 1;
  }
};

/// A segment and the sequence that it belongs to.
struct SplitWork {
  SequenceItems sequence;
  SplitSegment segment;
};

/// The block's segments in their order, in shared memory: one thread finds them some time before they are used.
struct WorkQueue {
  static constexpr int kSlots = 16;  // the ring is kNumStages rounds ahead

  SplitWork slots[kSlots];
  ItemShares shares;
  int32_t left;          // items not yet found
  int32_t found;         // segments
  int32_t local;         // next item, in the sequence of the last segment found
  int32_t rounds_ahead;  // of the segments found behind the one that is multiplied
  int32_t most_rows;     // see BlockShare
  int32_t least_rows;
  int32_t num_sequences;  // that have rows

  [[nodiscard]] __device__ const SplitWork& at(int32_t index) const { return slots[index % kSlots]; }

  /// Finds the next segment; items must be left.
  __device__ void find_next(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags) {
    SplitWork& work = slots[found % kSlots];
    SequenceItems s = slots[(found + kSlots - 1) % kSlots].sequence;
    while (found == 0 ? s.count == 0 : local >= s.count) {
      if (found > 0) local = 0;
      s = read_items(p, plan, s.geometry.sequence + 1, flags);
    }
    work.sequence = s;
    SplitSegment segment;
    const auto num_kv_heads = static_cast<int32_t>(p.num_kv_heads);
    const int32_t tile_head = local / s.num_chunks;
    segment.chunk_begin = local - tile_head * s.num_chunks;
    const int32_t count = s.tile_rows > plan.narrow_rows ? 1 : min(left, s.num_chunks - segment.chunk_begin);
    segment.chunk_end = segment.chunk_begin + count;
    segment.is_final = count == left;
    const auto block = static_cast<int32_t>(blockIdx.x);
    segment.tile_item = shares.start(block) + shares.count(block) - left - segment.chunk_begin;
    const int32_t tile = tile_head / num_kv_heads;
    segment.kv_head = tile_head - tile * num_kv_heads;
    segment.row_begin = tile * s.tile_rows;
    const SequenceGeometry& g = s.geometry;
    const int32_t first = segment.row_begin / plan.group_size;
    const int32_t last =
        (min(min(segment.row_begin + s.tile_rows, s.num_rows), g.query_rows * plan.group_size) - 1) / plan.group_size;
    if (first < g.query_rows && last >= first) {
      segment.key_begin = max(g.visible(p, first).begin, (s.first_chunk + segment.chunk_begin) * s.chunk);
      segment.key_end = min(g.visible(p, last).end, (s.first_chunk + segment.chunk_end) * s.chunk);
    }
    segment.tile_begin = segment.key_begin / kKeysPerRound * kKeysPerRound;
    work.segment = segment;
    ++found;
    left -= count;
    local += count;
  }

  /// One thread calls it before segment `index` is multiplied: those behind it get more rounds than the ring has
  /// stages.
  __device__ void look_ahead(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags,
                             int32_t index) {
    if (index < found) rounds_ahead -= at(index).segment.num_rounds();
    while (left > 0 && rounds_ahead <= kNumStages) {
      find_next(p, plan, flags);
      if (found - 1 > index) rounds_ahead += at(found - 1).segment.num_rounds();
    }
  }

  /// Called by the first warp; the others see the queue after a barrier.
  __device__ void start(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags, int32_t* kept,
                        int32_t most_kept) {
    const auto read = [&](int32_t sequence) { return read_items(p, plan, sequence, flags); };
    const int32_t with_rows = sequences_with_rows(p, flags);
    const BlockShare share = find_share(with_rows, read, kept, most_kept);
    if (threadIdx.x != 0) return;
    num_sequences = with_rows;
    SequenceItems& before = slots[kSlots - 1].sequence;  // find_next begins with the one that follows it
    before.geometry.sequence = share.sequence - 1;
    before.count = 0;
    shares = share.all;
    left = share.all.count(static_cast<int32_t>(blockIdx.x));
    local = share.local;
    found = rounds_ahead = 0;
    most_rows = share.most_rows;
    least_rows = share.least_rows;
    look_ahead(p, plan, flags, 0);
  }
};

}  // namespace polyop::cuda
