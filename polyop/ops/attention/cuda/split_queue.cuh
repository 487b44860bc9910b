// Which items a block of split_kv has, from lengths on the device, and the segments that it makes of them.
#pragma once

#include <cstdint>

#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/attention/cuda/split_plan.cuh"

namespace polyop::cuda {

/// Chunks chunk_begin .. chunk_end - 1 of the rows of one tile and one kv head: what a block does in one go. Of a wide
/// tile it is one chunk.
struct SplitSegment {
  int32_t kv_head = 0;
  int32_t row_begin = 0;    // first row of the tile in its sequence, in rows x G
  int32_t chunk_begin = 0;  // in 0 .. num_chunks
  int32_t chunk_end = 0;
  int32_t tile_item = 0;  // number of the tile's chunk 0 among the sequence's items
  int32_t key_begin = 0;  // first key that a row of the tile may see in the chunks
  int32_t key_end = 0;
  int32_t tile_begin = 0;  // key_begin rounded down to the grid of rounds
  int32_t num_rounds = 1;  // that cover the keys; one without keys when there are none
  bool is_final = false;   // of its block
};

/// A segment and the sequence that it belongs to.
struct SplitWork {
  SequenceItems sequence;
  SplitSegment segment;
  int32_t before = 0;  // cost of the sequences before

  /// Whether the block has all chunks from the tile's first one on, and joins them itself.
  [[nodiscard]] __device__ bool joins_chunks() const { return segment.chunk_begin == 0; }
  [[nodiscard]] __device__ bool has_tile() const { return joins_chunks() && segment.chunk_end == sequence.num_chunks; }
  /// Rows of the tile.
  [[nodiscard]] __device__ int32_t num_rows() const {
    return min(sequence.tile_rows, sequence.num_rows - segment.row_begin);
  }
};

/// Not inlined: few batches need it, and a block begins sooner when it has less code to fetch.
__device__ __noinline__ inline SequenceCost read_cost(const AttentionProblem& p, const SplitPlan& plan,
                                                      int32_t sequence, const AttentionFlags& flags) {
  const SequenceItems s = read_items(p, plan, sequence, flags);
  return {s.count, s.item_cost};
}

/// What the sequences of a batch are cut into, together.
struct SequenceSums {
  int32_t count = 0;  // items
  int32_t cost = 0;   // of all of them
  int32_t least_cost = INT32_MAX;
  int32_t most_cost = 0;
  int32_t least_rows = INT32_MAX;
  int32_t most_rows = 0;
  int32_t owned_rows = 0;
  bool fit = true;

  __device__ void add(const SequenceItems& s) {
    fit = fit && s.geometry.fits;
    if (s.num_rows == 0) return;
    add({s.count, s.count * s.item_cost, s.item_cost, s.item_cost, s.num_rows, s.num_rows,
         s.geometry.row_begin + s.geometry.allotted, true});
  }

  __device__ void add(const SequenceSums& other) {
    count += other.count;
    cost += other.cost;
    least_cost = min(least_cost, other.least_cost);
    most_cost = max(most_cost, other.most_cost);
    least_rows = min(least_rows, other.least_rows);
    most_rows = max(most_rows, other.most_rows);
    owned_rows = max(owned_rows, other.owned_rows);
    fit = fit && other.fit;
  }

  /// Those of all lanes of a warp.
  __device__ void join_lanes() {
    constexpr uint32_t kAll = 0xffffffffu;
    count = __reduce_add_sync(kAll, count);
    cost = __reduce_add_sync(kAll, cost);
    least_cost = __reduce_min_sync(kAll, least_cost);
    most_cost = __reduce_max_sync(kAll, most_cost);
    least_rows = __reduce_min_sync(kAll, least_rows);
    most_rows = __reduce_max_sync(kAll, most_rows);
    owned_rows = __reduce_max_sync(kAll, owned_rows);
    fit = __all_sync(kAll, fit) != 0;
  }

  [[nodiscard]] __device__ static SequenceSums of_warps(const SequenceSums (&warps)[kWarps]) {
    SequenceSums all = warps[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) all.add(warps[i]);
    return all;
  }
};

/// Shared memory of `kBytes` in which the blocks' threads meet while they find their share.
template <int kBytes>
struct QueueStart {
  static constexpr int kMostKept =
      (kBytes - kWarps * static_cast<int>(sizeof(SequenceSums))) / static_cast<int>(sizeof(SequenceCost));
  SequenceSums sums[kWarps];
  SequenceCost kept[kMostKept];
};

/// The block's segments in their order, in shared memory: one thread, the finder, finds them some time before they are
/// used.
struct WorkQueue {
  /// More than the stages of any ring, each of which may be a segment, and three.
  static constexpr int kSlots = 16;

  SplitWork slots[kSlots];
  ItemShare<int32_t> share;
  int32_t finder;        // a thread
  int32_t local;         // next item, in the sequence of the last segment found
  int32_t found;         // segments
  int32_t rounds_ahead;  // of the segments found behind the one that is multiplied
  int32_t most_rows;     // of a sequence of the batch, in rows x G
  int32_t least_rows;    // of those that have any
  int32_t owned_rows;    // packed rows that belong to a sequence
  bool is_complete;      // all segments are found

  [[nodiscard]] __device__ const SplitWork& at(int32_t index) const {
    return slots[static_cast<uint32_t>(index) % kSlots];
  }
  [[nodiscard]] __device__ bool is_finder() const { return static_cast<int32_t>(threadIdx.x) == finder; }

  /// The finder calls it, and a barrier follows, before segment `index` is multiplied: those behind it get more rounds
  /// than the ring has stages, `num_stages`.
  __device__ void look_ahead(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags,
                             int32_t index, int32_t num_stages) {
    if (index < found) rounds_ahead -= at(index).segment.num_rounds;
#pragma unroll 1
    while (!is_complete && rounds_ahead <= num_stages) {
      find_next(p, plan, flags);
      if (found - 1 > index) rounds_ahead += at(found - 1).segment.num_rounds;
    }
  }

  /// Called by all threads, before a barrier. `sums` and `kept`, of `most_kept` sequences, are shared memory.
  __device__ void start(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags,
                        SequenceSums (&sums)[kWarps], SequenceCost* kept, int32_t most_kept) {
    const auto num_sequences = static_cast<int32_t>(p.num_sequences);
    const auto thread = static_cast<int32_t>(threadIdx.x);
    SequenceItems items;
    SequenceSums own;
#pragma unroll 1
    for (int32_t sequence = thread; sequence < num_sequences; sequence += 32 * kWarps) {
      items = read_items(p, plan, sequence, flags);
      own.add(items);
      if (sequence < most_kept) kept[sequence] = {items.count, items.item_cost};
    }
    own.join_lanes();
    if (thread % 32 == 0) sums[thread / 32] = own;
    __syncthreads();  // sums and costs of all warps
    const SequenceSums all = SequenceSums::of_warps(sums);
    ItemShare<int32_t> own_share;
    own_share.sequence = own_share.num_sequences = all.fit ? num_sequences : 0;
    const int32_t total = all.fit ? all.cost : 0;
    // Few items go to the first teams, whose blocks have a multiprocessor each; whole items where all cost the same, so
    // that fewer tiles are shared.
    const int32_t used = max(min(static_cast<int32_t>(gridDim.x) / plan.team, all.count), 1);
    const bool is_even = all.least_cost == all.most_cost;
    own_share.share = max(((is_even ? all.count : total) + used - 1) / used, 1) * (is_even ? all.most_cost : 1);
    own_share.begin = static_cast<int32_t>(blockIdx.x) / plan.team * own_share.share;
    own_share.end = min(own_share.begin + own_share.share, total);
    const bool is_empty = !all.fit || own_share.begin >= own_share.end;
    if (!is_empty) {
      find_cost(
          own_share.begin, num_sequences,
          [&](int32_t sequence) {
            const SequenceCost cost = sequence < most_kept ? kept[sequence] : read_cost(p, plan, sequence, flags);
            return cost.count * cost.item_cost;
          },
          &own_share.sequence, &own_share.before);
    }
    const int32_t who = own_share.sequence % (32 * kWarps);  // it has read the first sequence
    if (thread != who) return;
    if (num_sequences > 32 * kWarps && !is_empty) items = read_items(p, plan, own_share.sequence, flags);
    share = own_share;
    finder = who;
    found = rounds_ahead = 0;
    most_rows = all.most_rows;
    least_rows = all.least_rows;
    owned_rows = all.fit ? all.owned_rows : 0;
    is_complete = is_empty;
    if (is_empty) return;
    local = first_item_from(share.begin, share.before, items.item_cost);
    is_complete = share.before + local * items.item_cost >= share.end;  // no item begins in the share
    SplitWork& work = slots[kSlots - 1];                                // find_next goes on from there
    work.sequence = items;
    work.before = share.before;
  }

 private:
  __device__ void find_next(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags) {
    SplitWork work;
    work.sequence = slots[(found + kSlots - 1) % kSlots].sequence;
    work.before = slots[(found + kSlots - 1) % kSlots].before;
    SequenceItems& s = work.sequence;
    SplitSegment& segment = work.segment;
#pragma unroll 1
    while (local >= s.count) {
      work.before += s.count * s.item_cost;
      local = 0;
      s = read_items(p, plan, s.geometry.sequence + 1, flags);
    }
    const int32_t tile_heads = s.num_chunks == 1 ? local : local / s.num_chunks;
    segment.tile_item = tile_heads * s.num_chunks;
    segment.chunk_begin = local - segment.tile_item;
    const int32_t left = share.end - work.before - local * s.item_cost;  // in costs
    int32_t count = s.tile_rows > plan.narrow_rows ? 1 : s.num_chunks - segment.chunk_begin;
    if ((count - 1) * s.item_cost >= left) count = small_quotient(left + s.item_cost - 1, s.item_cost);
    segment.chunk_end = segment.chunk_begin + count;
    segment.is_final = count * s.item_cost >= left;
    const int32_t tile = s.num_tiles == 1 ? 0 : tile_heads / plan.head_groups;
    segment.kv_head = (tile_heads - tile * plan.head_groups) * plan.team + static_cast<int32_t>(blockIdx.x) % plan.team;
    segment.row_begin = tile * s.tile_rows;
    KeyRange seen = s.seen;
    if (s.num_tiles > 1) {
      const SequenceGeometry& g = s.geometry;
      const int32_t first_row = plan.by_group_size.quotient(segment.row_begin);
      const int32_t end = min(min(segment.row_begin + s.tile_rows, s.num_rows), g.query_rows * plan.group_size);
      seen = {};
      if (end > segment.row_begin)
        seen = {g.visible(p, first_row).begin, g.visible(p, plan.by_group_size.quotient(end - 1)).end};
    }
    segment.key_begin = max(seen.begin, (s.first_chunk + segment.chunk_begin) * s.chunk);
    segment.key_end = min(seen.end, (s.first_chunk + segment.chunk_end) * s.chunk);
    segment.tile_begin = segment.key_begin >> plan.round_shift << plan.round_shift;
    if (segment.key_end > segment.key_begin)
      segment.num_rounds = (segment.key_end - segment.tile_begin + (1 << plan.round_shift) - 1) >> plan.round_shift;
    slots[found % kSlots] = work;
    ++found;
    local += count;
    is_complete = segment.is_final;
  }
};

}  // namespace polyop::cuda
