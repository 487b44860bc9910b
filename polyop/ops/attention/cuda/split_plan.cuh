// How split_kv cuts a sequence: row tiles x kv heads x chunks of keys. Every number depends on the sequence alone (and
// on the device), so that its bits do not depend on its neighbours, as long as there are semaphores for all tiles.
#pragma once

#include <cstdint>

#include "polyop/cuda/division.h"
#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/cuda/item_shares.cuh"
#include "polyop/ops/attention/cuda/kv_tile.cuh"
#include "polyop/ops/attention/cuda/sequence_geometry.cuh"

namespace polyop::cuda {

inline constexpr int kWarps = 4;         // of a block
inline constexpr int kRowsPerWarp = 16;  // of a wide tile
inline constexpr int kLeastTileRows = 8;
inline constexpr int kLeastChunk = 256;  // keys; below, joining the parts costs more than the parallelism gives
inline constexpr int kMostChunks = 512;  // of a row tile

/// Sequences of up to eight and up to sixteen rows (query row x head of one kv head), and of more.
enum class RowKind : uint8_t { kEight, kSixteen, kWide };

/// The host's part of the plan, the same for all sequences.
struct SplitPlan {
  int32_t group_size = 1;      // G
  int32_t team = 1;            // blocks side by side that read neighbouring kv heads of the same keys
  int32_t head_groups = 1;     // Hkv / team
  int32_t narrow_rows = 16;    // of a narrow tile: more do not fit the registers
  int32_t rows_per_tile = 64;  // of a sequence with more than narrow_rows rows; narrow_rows: there are no wide tiles
  int32_t most_chunks = 33;    // of a sequence with one row tile: its items then fill the device
  int32_t round_shift = 6;     // a round of the ring has 2^round_shift keys
  int32_t cost_shift = 0;      // costs count 2^cost_shift rounds, so that those of all items fit 32 bits
  FixedDivisor by_group_size;
  FixedDivisor by_most_chunks;
  int32_t wide_target_items = 132;  // of a sequence with several row tiles, whose parts are large
  int64_t row_bytes = 0;            // between rows of k, and of v
  int64_t page_bytes = 0;           // between pages
  uint32_t page_size = 0;           // R; 0: k and v are not paged
  uint32_t num_pages = 0;           // P
  int32_t page_shift = -1;          // of a page size that is a power of two
  bool tiles_are_dense = true;      // sixteen keys from a multiple of sixteen on lie at equal distances
  bool splits_wide = true;          // false: sequences of wide tiles are one chunk
};

/// A sequence's share of the items.
struct SequenceItems {
  SequenceGeometry geometry;
  KeyRange seen;         // from the first key that any row sees to the last
  int32_t num_rows = 0;  // query rows x G
  int32_t tile_rows = 16;
  int32_t num_tiles = 0;
  int32_t chunk = 0;        // keys
  int32_t first_chunk = 0;  // the first one that any row sees
  int32_t num_chunks = 0;   // from there on
  int32_t count = 0;        // items: one chunk of a tile, for each member of a team
  int32_t item_cost = 0;    // of an item
};

/// Whether a semaphore is there for each of a sequence's tiles and heads; where they run out, one chunk needs none.
__device__ inline bool has_semaphores(const AttentionProblem& p, const SplitPlan& plan, const SequenceItems& s) {
  const int32_t first_row = s.geometry.row_begin * plan.group_size;
  const int32_t tiles =
      s.geometry.sequence + (first_row / kLeastTileRows) + (s.num_rows + kLeastTileRows - 1) / kLeastTileRows;
  return tiles * p.num_kv_heads <= kNumSemaphores;
}

__device__ inline SequenceItems read_items(const AttentionProblem& p, const SplitPlan& plan, int32_t sequence,
                                           const AttentionFlags& flags) {
  SequenceItems s;
  s.geometry = read_geometry(p, sequence, flags);
  const SequenceGeometry& g = s.geometry;
  s.num_rows = g.allotted * plan.group_size;
  if (s.num_rows == 0) return s;
  if (g.query_rows > 0) s.seen = {g.visible(p, 0).begin, max(g.visible(p, g.query_rows - 1).end, 0)};
  const int32_t rounds = max((g.kv_length + (1 << plan.round_shift) - 1) >> plan.round_shift, 1);
  int32_t chunk_rounds = plan.by_most_chunks.quotient_up(rounds, plan.most_chunks);
  s.tile_rows = plan.narrow_rows;
  s.num_tiles = 1;
  if (s.num_rows > plan.narrow_rows) {
    s.tile_rows = plan.rows_per_tile;
    s.num_tiles = divide_up(s.num_rows, s.tile_rows);
    const auto tile_heads = static_cast<int32_t>(p.num_kv_heads) * s.num_tiles;
    chunk_rounds =
        plan.splits_wide ? divide_up(rounds, min(divide_up(plan.wide_target_items, tile_heads), kMostChunks)) : rounds;
  }
  chunk_rounds = has_semaphores(p, plan, s) ? max(chunk_rounds, kLeastChunk >> plan.round_shift) : rounds;
  s.chunk = chunk_rounds << plan.round_shift;
  if (s.seen.begin > 0) s.first_chunk = s.seen.begin / s.chunk;
  s.num_chunks = max(small_quotient(s.seen.end + s.chunk - 1, s.chunk) - s.first_chunk, 1);
  s.count = s.num_tiles * plan.head_groups * s.num_chunks;
  // A chunk's end takes as long as a round.
  const int32_t item_rounds = s.num_chunks > 1 ? chunk_rounds : max(s.seen.end - s.seen.begin, 0) >> plan.round_shift;
  s.item_cost = 1 + (item_rounds >> plan.cost_shift);
  return s;
}

}  // namespace polyop::cuda
