// The 64 rows of one multiplying warpgroup: scores, weights and sums of a segment.
#pragma once

#include <cstdint>

#include "polyop/ops/attention/cuda/wgmma_ptx.cuh"
#include "polyop/ops/attention/cuda/wgmma_ring.cuh"
#include "polyop/ops/attention/cuda/wgmma_sums.cuh"
#include "polyop/ops/attention/cuda/wgmma_visibility.cuh"

namespace polyop::cuda {

/// A row's sums are rescaled only when a score exceeds the reference by this much, so that weights stay below 2^8.
inline constexpr float kWgmmaSlack = 8.0f;

/// The two warpgroups start their products in turns, so that one makes weights while the other one's scores are
/// multiplied.
class WarpgroupTurns {
 public:
  __device__ explicit WarpgroupTurns(int group) : group_(group) {}
  __device__ void start() const {
    if (group_ == 1) pass_on();
  }
  __device__ void wait() const { named_barrier_sync(kFirstBarrier + group_, kRowGroups * kGroupThreads); }
  __device__ void pass_on() const { named_barrier_arrive(kFirstBarrier + 1 - group_, kRowGroups * kGroupThreads); }

 private:
  static constexpr int kFirstBarrier = 4;  // of the named barriers; those before are each warpgroup's own
  static_assert(kRowGroups == 2);
  int group_;
};

/// Shared memory of one multiplying warpgroup, beside its walk.
template <int kHeadDim>
struct WgmmaGroupMemory {
  using QueryTile = SwizzledTile<kHeadDim, kGroupRows>;
  uint32_t queries;  // QueryTile
  float4* total;  // [D / 8, kGroupThreads] sums of the chunks before the one that is multiplied, as the lanes hold them
  int* is_last;
};

/// A lane has rows lane / 4 and lane / 4 + 8 of its warp's sixteen, and of each eight channels or keys two.
template <class T, int kHeadDim>
class WgmmaRows : WgmmaSums<T, kHeadDim> {
  using Sums = WgmmaSums<T, kHeadDim>;
  using Sums::call_, Sums::count_chunks, Sums::gather_parts, Sums::group_, Sums::join_quad, Sums::kOut, Sums::kQuads,
      Sums::out_, Sums::part_of, Sums::quad, Sums::row, Sums::s, Sums::segment, Sums::store_part, Sums::store_results,
      Sums::sum_, Sums::sync_group, Sums::thread, Sums::walk_;

 public:
  using Ring = WgmmaRing<kHeadDim>;
  using Memory = WgmmaGroupMemory<kHeadDim>;
  static constexpr int kWeightSteps = kWgmmaTileKeys / 16;

  __device__ WgmmaRows(const SplitCall& call, const WgmmaWalk& walk, const Memory& memory, int group, int32_t lanes)
      : Sums(call, walk, group, lanes, memory.is_last),
        memory_(memory),
        turns_(group),
        visibility_(call, walk, row(0)) {
    const float scale = call.score_scale(segment().kv_head);
    is_negative_ = scale < 0.0f;
    scale_ = fmaxf(fabsf(scale), 1e-35f);  // times the -inf of a hidden key it must not be NaN
    load_queries();
  }

  /// All chunks of the segment, to results or to parts.
  __device__ void run(Ring* ring) {
    const SplitSegment& at = segment();
    const int32_t first = walk_.first_tile();
    const int32_t end = walk_.end_tile();
    if (is_idle(group_)) {
      for (int32_t tile = first; tile < end; ++tile) pass(ring);
      return;
    }
#pragma unroll
    for (int i = 0; i < kOut; ++i) out_[i] = 0.0f;
    sum_[0] = sum_[1] = {};
    if (at.chunk_begin > 0) {
      for (int32_t chunk = at.chunk_begin; chunk < at.chunk_end; ++chunk) {
        const bool has_keys = first < end && max(at.key_begin, walk_.begin_of_chunk(chunk)) <
                                                 min(at.key_end, walk_.begin_of_chunk(chunk + 1));
        if (!has_keys) store_part(own_part(chunk), sum_);
      }
    }
    if (first < end) attend(ring, first, end);
    if (at.chunk_end - at.chunk_begin < s().num_chunks) {
      if (at.chunk_begin == 0) store_part(part_of(static_cast<int32_t>(blockIdx.x), call_.scratch.most_leading), sum_);
      if (!count_chunks()) return;
      gather_parts();
    }
    store_results();
  }

 private:
  // ---- rows ---------------------------------------------------------------------------------------------------------

  /// q into shared memory; rows that do not attend are zeros.
  __device__ void load_queries() {
    using Tile = typename Memory::QueryTile;
    const AttentionProblem& p = call_.p;
    constexpr int kRowsPerStep = kGroupThreads / Tile::kRowUnits;
    const int unit = thread() % Tile::kRowUnits;
    const int32_t group_size = call_.plan.group_size;
    const int32_t first = segment().row_begin + group_ * kGroupRows + thread() / Tile::kRowUnits;
    int32_t query_row = first / group_size;
    int32_t head = first - query_row * group_size;  // of the kv head's
    const int32_t rows_per_step = kRowsPerStep / group_size;
    const int32_t heads_per_step = kRowsPerStep - rows_per_step * group_size;
#pragma unroll 2
    for (int step = 0; step < kGroupRows / kRowsPerStep; ++step) {
      const bool valid = query_row < s().geometry.query_rows;
      const int64_t offset =
          valid ? row_offset(p, p.q, s().geometry, query_row, int64_t{segment().kv_head} * group_size + head) : 0;
      copy_async_16(memory_.queries + Tile::unit_offset(step * kRowsPerStep + thread() / Tile::kRowUnits, unit),
                    static_cast<const T*>(p.q.data) + offset + unit * 8, valid);
      query_row += rows_per_step;
      head += heads_per_step;
      if (head >= group_size) {
        head -= group_size;
        ++query_row;
      }
    }
    copy_async_wait_all();
    fence_async_proxy();
    sync_group();  // queries of all warps
  }

  // ---- tiles of keys ------------------------------------------------------------------------------------------------

  [[nodiscard]] __device__ bool is_idle(int group) const {
    return segment().row_begin + group * kGroupRows >= s().num_rows;
  }

  /// All tiles of the segment, of which there are some; out_ and sum_ are then those of all its chunks, or of its last
  /// one when the block does not have the first one of the tile, and then they are stored, too.
  __device__ void attend(Ring* ring, int32_t first, int32_t end) {
    const int32_t chunk_tiles = s().chunk / kWgmmaTileKeys;
    int32_t chunk = first / chunk_tiles - s().first_chunk;
    int32_t next_chunk = (s().first_chunk + chunk + 1) * chunk_tiles;  // its first tile
    const bool takes_turns = !is_idle(1);
    has_total_ = false;
    bool keeps = false;   // out_ holds sums of the chunk
    Ring values = *ring;  // one tile behind
    float shrink[2];
    clear_sums();
#pragma unroll
    for (auto& step : weights_) {
#pragma unroll
      for (uint32_t& pair : step) pair = 0;
    }
    barrier_wait(ring->k_full(), ring->parity);
#pragma unroll 1
    for (int32_t tile = first; tile < end; ++tile) {
      // The first time there are no weights yet: the product is not kept. Another copy of all this would cost a short
      // segment more, by the fetching of instructions.
      const bool has_weights = tile > first;
      fence_async_proxy();
      if (takes_turns) turns_.wait();
      pin_registers(score_);
      pin_registers(out_);
      warpgroup_fence();
      multiply_keys(ring->k_tile());
      if (has_weights) barrier_wait(values.v_full(), values.parity);
      fence_async_proxy();
      warpgroup_fence();
      multiply_values(values.v_tile(), keeps);
      if (takes_turns) turns_.pass_on();
      warpgroup_wait<1>();
      pin_registers(score_);
      release(ring->k_free());
      ring->advance();
      const bool begins = tile == next_chunk;
      RowSum done[2];
      if (begins) {
        close_sums(done);
        clear_sums();
      }
      const bool shrinks = weigh(tile * kWgmmaTileKeys, shrink);
      Ring next_values = values;
      if (has_weights) next_values.advance();
      wait_for_next(*ring, next_values, tile + 1 < end);
      warpgroup_wait<0>();
      pin_registers(out_);
      if (has_weights) release(values.v_free());
      values = next_values;
      keeps = has_weights && !begins;
      if (begins) {
        end_chunk(chunk, done);
        ++chunk;
        next_chunk += chunk_tiles;
      } else if (shrinks) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) out_[i] *= shrink[i / 2 % 2];
      }
      pack_weights();
    }
    barrier_wait(values.v_full(), values.parity);
    fence_async_proxy();
    pin_registers(out_);
    warpgroup_fence();
    multiply_values(values.v_tile(), keeps);
    warpgroup_wait<0>();
    pin_registers(out_);
    release(values.v_free());
    RowSum done[2];
    close_sums(done);
    if (segment().chunk_begin > 0) {
      store_part(own_part(chunk), done);
      return;
    }
    if (has_total_) {
      join_total(done);
      done[0] = total_sum_[0];
      done[1] = total_sum_[1];
    }
    sum_[0] = done[0];
    sum_[1] = done[1];
  }

  /// The chunks before join the one in out_; total_sum_ becomes that of all.
  __device__ void join_total(const RowSum (&done)[2]) {
    const float2 factors[2] = {total_sum_[0].join(done[0]), total_sum_[1].join(done[1])};
    const float4* total = memory_.total + thread();
#pragma unroll
    for (int i = 0; i < kQuads; ++i) join_quad(i, total[i * kGroupThreads], factors);
  }

  __device__ void clear_sums() {
    sum_[0] = sum_[1] = {.reference = 0.0f, .denominator = 0.0f};
    limit_[0] = limit_[1] = -INFINITY;
  }

  /// The sums of the lane's rows over a chunk.
  __device__ void close_sums(RowSum (&done)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      done[half] = sum_[half];
      done[half].denominator += __shfl_xor_sync(0xffffffffu, done[half].denominator, 1);
      done[half].denominator += __shfl_xor_sync(0xffffffffu, done[half].denominator, 2);
      if (limit_[half] == -INFINITY) done[half].reference = -INFINITY;
      if (!visibility_.attends(half)) done[half] = {};
    }
  }

  /// Part of a chunk that the block has without the tile's first one.
  [[nodiscard]] __device__ float* own_part(int32_t chunk) const {
    return part_of(static_cast<int32_t>(blockIdx.x), chunk - segment().chunk_begin);
  }

  /// out_ holds the sums of a chunk that is not the segment's last one.
  __device__ void end_chunk(int32_t chunk, const RowSum (&done)[2]) {
    if (segment().chunk_begin > 0) {
      store_part(own_part(chunk), done);
      return;
    }
    if (has_total_) {
      join_total(done);
    } else {
      total_sum_[0] = done[0];
      total_sum_[1] = done[1];
      has_total_ = true;
    }
    float4* total = memory_.total + thread();
#pragma unroll
    for (int i = 0; i < kQuads; ++i) total[i * kGroupThreads] = quad(i);
  }

  /// A tile that concerns no row of the warpgroup.
  __device__ void pass(Ring* ring) const {
    barrier_wait(ring->k_full(), ring->parity);
    release(ring->k_free());
    barrier_wait(ring->v_full(), ring->parity);
    release(ring->v_free());
    ring->advance();
  }

  /// Waits for what is multiplied next: the next keys, or the last values. Sums are never negative, so the parity is
  /// the ring's; but it depends on them, and the compiler cannot move the making of the weights behind the products
  /// that are to hide it.
  __device__ void wait_for_next(const Ring& keys, const Ring& values, bool has_keys) const {
    const uint32_t none = sum_[0].denominator + sum_[1].denominator < 0.0f ? 1 : 0;
    barrier_wait(has_keys ? keys.k_full() : values.v_full(), (has_keys ? keys.parity : values.parity) ^ none);
  }

  /// The warp is done with a tile.
  __device__ void release(uint32_t barrier) const {
    __syncwarp();  // all lanes have waited for the products
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  }

  /// score_ (64, kWgmmaTileKeys) = q k^T, one group of products.
  __device__ void multiply_keys(uint32_t tile) {
    using Query = typename Memory::QueryTile;
    using Key = typename Ring::Tile;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint32_t in_row = step % 4 * 32;
      multiply_rows<T>(score_, tile_descriptor(memory_.queries + step / 4 * Query::kPanelBytes + in_row, 16),
                       tile_descriptor(tile + step / 4 * Key::kPanelBytes + in_row, 16), step > 0);
    }
    warpgroup_commit();
  }

  /// out_ (64, D) += weights v, one group of products; nothing is added to when `keeps` is false.
  __device__ void multiply_values(uint32_t tile, bool keeps) {
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      multiply_weights<T>(out_, weights_[step], tile_descriptor(tile + step * 16 * 128, Ring::Tile::kPanelBytes),
                          step > 0 || keeps);
    }
    warpgroup_commit();
  }

  /// Scores to weights in f32. True when a row of the warp has a new reference: sums so far are multiplied by `shrink`.
  /// Whether a row does so depends on its own scores alone.
  __device__ bool weigh(int32_t key, float (&shrink)[2]) {
    if (is_negative_) {
#pragma unroll
      for (int i = 0; i < 64; ++i) score_[i] = -score_[i];
    }
    visibility_.hide(key, score_);
    float largest[2] = {score_[0], score_[2]};
#pragma unroll
    for (int i = 0; i < 64; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], score_[i]);
    const bool exceeds = largest[0] * scale_ > limit_[0] || largest[1] * scale_ > limit_[1];
    const bool shrinks = __any_sync(0xffffffffu, exceeds);
    if (shrinks) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = largest[half];
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * scale_;
        shrink[half] = 1.0f;
        if (most > limit_[half]) {
          shrink[half] = limit_[half] == -INFINITY ? 0.0f : exp2_approximate(sum_[half].reference - most);
          sum_[half].reference = most;
          limit_[half] = most + kWgmmaSlack;
          sum_[half].denominator *= shrink[half];
        }
      }
    }
    float odd[2] = {};  // two chains of sums are done sooner than one
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int half = i / 2 % 2;
      score_[i] = exp2_approximate(fmaf(score_[i], scale_, -sum_[half].reference));
      if (i % 2 == 0) {
        sum_[half].denominator += score_[i];
      } else {
        odd[half] += score_[i];
      }
    }
    sum_[0].denominator += odd[0];
    sum_[1].denominator += odd[1];
    return shrinks;
  }

  __device__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < 32; ++i) weights_[i / 4][i % 4] = narrow_pair<T>(score_[2 * i], score_[2 * i + 1]);
  }

  const Memory& memory_;
  const WarpgroupTurns turns_;
  const WgmmaVisibility visibility_;
  float scale_;  // of the scores, to base 2
  bool is_negative_;
  RowSum total_sum_[2];  // of the chunks in memory_.total
  bool has_total_;
  // sum_ is that of the chunk, and its references are 0 until a key was seen
  float limit_[2];  // reference + slack; -inf until a key was seen
  float score_[64];
  uint32_t weights_[kWeightSteps][4];
};

}  // namespace polyop::cuda
