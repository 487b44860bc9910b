// Items of up to 64 rows: each warp has sixteen of them and multiplies all keys of a round, its own and those that the
// other warps copied.
#pragma once

#include <cstdint>
#include <type_traits>

#include "polyop/ops/attention/cuda/split_parts.cuh"
#include "polyop/ops/attention/cuda/split_ring.cuh"

namespace polyop::cuda {

/// Sixteen rows of a wide item. A lane has rows lane / 4 and lane / 4 + 8.
template <class Compute, class Kv, int kHeadDim>
class WideRows {
 public:
  using Tile = KvTile<Kv, kHeadDim>;
  using Ring = SplitRing<Kv, kHeadDim>;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kOutTiles = kHeadDim / 8;
  static constexpr int kTilesPerPass = 2;  // 64 keys of scores at once would not fit the registers
  static constexpr int kScoreTiles = 2 * kTilesPerPass;

  __device__ WideRows(const SplitCall& call, const SplitWork& work)
      : call_(call), work_(work), s_(work.sequence), segment_(work.segment) {
    load_rows();
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[tile][i] = 0.0f;
    }
  }

  __device__ void attend(Ring* ring) {
    ring->fill();
    const int num_rounds = segment_.num_rounds;
#pragma unroll 1
    for (int round = 0; round < num_rounds; ++round) {
      ring->wait();
      __syncthreads();  // the copies of all warps
#pragma unroll 1
      for (int first = 0; first < kWarps * Ring::kTiles; first += kTilesPerPass) {
        attend_tiles(*ring, first, segment_.tile_begin + round * Ring::kKeysPerRound + first * kKeysPerTile);
      }
      __syncthreads();  // all warps have read the stage
      ring->advance();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half].denominator += __shfl_xor_sync(0xffffffffu, sum_[half].denominator, 1);
      sum_[half].denominator += __shfl_xor_sync(0xffffffffu, sum_[half].denominator, 2);
    }
  }

  /// Stores results or parts; called by all threads.
  __device__ void finish(int* is_last) const {
    if (s_.num_chunks == 1) {
      store_results();
    } else {
      store_parts();
      if (call_.count_chunks(work_, is_last)) join_chunks();
    }
  }

 private:
  __device__ void load_rows() {
    const AttentionProblem& p = call_.p;
    const int lane = threadIdx.x % 32;
    const float scale = call_.score_scale(segment_.kv_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_[half] = segment_.row_begin + static_cast<int32_t>(threadIdx.x) / 32 * kRowsPerWarp + lane / 4 + half * 8;
      const int32_t query_row = row_[half] / call_.plan.group_size;
      begin_[half] = end_[half] = 0;
      scale_[half] = scale;
      const bool attends = row_[half] < s_.num_rows && query_row < s_.geometry.query_rows;
      if (attends) {
        const KeyRange visible = s_.geometry.visible(p, query_row);
        begin_[half] = max(visible.begin, segment_.key_begin);
        end_[half] = min(visible.end, segment_.key_end);
      }
      const int64_t offset =
          attends ? row_offset(p, p.q, s_.geometry, query_row, call_.head_of(segment_.kv_head, row_[half])) : 0;
      const auto* base = static_cast<const uint16_t*>(p.q.data) + offset;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          q_[step][half + 2 * part] =
              attends ? *reinterpret_cast<const uint32_t*>(base + Tile::query_channel(step, part)) : 0u;
        }
      }
      if constexpr (kIsByte<Kv>) scale_[half] *= scale_into_f16(half);
    }
  }

  /// Turns q's 16-bit pairs of one row into scaled f16 pairs; returns the inverse of the scale.
  __device__ float scale_into_f16(int half) {
    float most = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float2 pair = widen_query(call_.p.q.dtype == DType::kF16, q_[step][half + 2 * part]);
        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const QueryScale scale(most);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float2 pair = widen_query(call_.p.q.dtype == DType::kF16, q_[step][half + 2 * part]);
        q_[step][half + 2 * part] = narrow_pair<__half>(pair.x * scale.factor, pair.y * scale.factor);
      }
    }
    return scale.inverse;
  }

  /// The tiles first .. first + kTilesPerPass - 1 of a stage; `key` is the first one's first key.
  __device__ void attend_tiles(const Ring& ring, int first, int32_t key) {
    float score[kScoreTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTilesPerPass; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[2 * tile][i] = score[2 * tile + 1][i] = 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; step += Tile::kStepsPerLoad) {
        uint32_t b[4 * Tile::kStepsPerLoad];
        Tile::load_key_columns(ring.tile(first + tile), step, b);
#pragma unroll
        for (int inner = 0; inner < Tile::kStepsPerLoad; ++inner) {
          if (step + inner >= kSteps) break;
          multiply_accumulate<Compute>(score[2 * tile], q_[step + inner], b[4 * inner], b[4 * inner + 1]);
          multiply_accumulate<Compute>(score[2 * tile + 1], q_[step + inner], b[4 * inner + 2], b[4 * inner + 3]);
        }
      }
    }
    weigh(key, score);
#pragma unroll
    for (int tile = 0; tile < kTilesPerPass; ++tile) {
      const float(&low)[4] = score[2 * tile];
      const float(&high)[4] = score[2 * tile + 1];
      const uint32_t weights[4] = {narrow_pair<Compute>(low[0], low[1]), narrow_pair<Compute>(low[2], low[3]),
                                   narrow_pair<Compute>(high[0], high[1]), narrow_pair<Compute>(high[2], high[3])};
      const uint32_t values = ring.tile(first + tile) + Tile::kBytes;
#pragma unroll
      for (int out_tile = 0; out_tile < kOutTiles; out_tile += Tile::kTilesPerLoad) {
        uint32_t b[2 * Tile::kTilesPerLoad];
        Tile::load_value_columns(values, out_tile, b);
#pragma unroll
        for (int inner = 0; inner < Tile::kTilesPerLoad; ++inner) {
          if (out_tile + inner >= kOutTiles) break;
          multiply_accumulate<Compute>(out_[out_tile + inner], weights, b[2 * inner], b[2 * inner + 1]);
        }
      }
    }
  }

  /// Scores to weights, with the sums so far rescaled to their new largest score.
  __device__ void weigh(int32_t key, float (&score)[kScoreTiles][4]) {
    const AttentionProblem& p = call_.p;
    const int lane = threadIdx.x % 32;
    const bool has_tree = p.tree_mask.words != nullptr &&
                          key + kTilesPerPass * kKeysPerTile > s_.geometry.kv_length - s_.geometry.allotted;
    float larger[2] = {sum_[0].reference, sum_[1].reference};
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2;
        const int32_t at = key + tile * 8 + 2 * (lane % 4) + i % 2;
        bool visible = at >= begin_[half] && at < end_[half];
        if (has_tree && visible) visible = s_.geometry.tree_allows(p, row_[half] / call_.plan.group_size, at);
        score[tile][i] = visible ? score[tile][i] * scale_[half] : -INFINITY;
        larger[half] = fmaxf(larger[half], score[tile][i]);
      }
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      larger[half] = fmaxf(larger[half], __shfl_xor_sync(0xffffffffu, larger[half], 1));
      larger[half] = fmaxf(larger[half], __shfl_xor_sync(0xffffffffu, larger[half], 2));
      const float reference = larger[half] == -INFINITY ? 0.0f : larger[half];
      shrink[half] = exp2_approximate(sum_[half].reference - reference);
      sum_[half].reference = larger[half];
      larger[half] = reference;
      sum_[half].denominator *= shrink[half];
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[tile][i] *= shrink[i / 2];
      }
    }
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[tile][i] = exp2_approximate(score[tile][i] - larger[i / 2]);
        sum_[i / 2].denominator += score[tile][i];
      }
    }
  }

  /// The only chunk of its rows: results go straight to out.
  __device__ void store_results() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_[half] >= s_.num_rows) continue;
      const float factor =
          call_.finish_row(s_.geometry, segment_.kv_head, row_[half], sum_[half], threadIdx.x % 4 == 0);
      const bool is_empty = sum_[half].is_empty();
      const int64_t offset = call_.out_offset(s_.geometry, segment_.kv_head, row_[half]);
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const float value[1] = {is_empty ? 0.0f : out_[tile][2 * half + column] * factor};
          call_.store_out(offset + Tile::column_channel(tile, column), value);
        }
      }
    }
  }

  __device__ void store_parts() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row_[half] >= s_.num_rows) continue;
      const int64_t slot = call_.wide_slot(s_, segment_.kv_head, row_[half], segment_.chunk_begin);
      if (threadIdx.x % 4 == 0) call_.scratch.wide_sums[slot] = {sum_[half].reference, sum_[half].denominator};
      float* part = call_.scratch.wide + slot * kHeadDim;
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
        if constexpr (kIsByte<Kv>) {
          if (tile % 2 == 0) {  // four neighbouring channels of two tiles
            *reinterpret_cast<float4*>(part + Tile::column_channel(tile, 0)) = {
                out_[tile][2 * half], out_[tile + 1][2 * half], out_[tile][2 * half + 1], out_[tile + 1][2 * half + 1]};
          }
        } else {
          *reinterpret_cast<float2*>(part + Tile::column_channel(tile, 0)) = {out_[tile][2 * half],
                                                                              out_[tile][2 * half + 1]};
        }
      }
    }
  }

  /// Joins the chunks of the tile's rows in their order; one warp a row, the warps in turns.
  __device__ void join_chunks() const {
    const int lane = threadIdx.x % 32;
    constexpr int kGroups = (kHeadDim / 4 + 31) / 32;  // of four channels a lane
    const int32_t end = min(segment_.row_begin + s_.tile_rows, s_.num_rows);
    for (int32_t row = segment_.row_begin + static_cast<int32_t>(threadIdx.x) / 32; row < end; row += kWarps) {
      const int64_t first_slot = call_.wide_slot(s_, segment_.kv_head, row, 0);
      RowSum sum;
      float4 total[kGroups] = {};
#pragma unroll 4
      for (int chunk = 0; chunk < s_.num_chunks; ++chunk) {
        const float2 part = __ldcg(call_.scratch.wide_sums + first_slot + chunk);
        const auto* values = reinterpret_cast<const float4*>(call_.scratch.wide + (first_slot + chunk) * kHeadDim);
        const float2 factors = sum.join({part.x, part.y});
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          if (group * 32 + lane >= kHeadDim / 4) break;
          const float4 value = __ldcg(values + group * 32 + lane);
          total[group] = join_quads(total[group], value, factors);
        }
      }
      const float factor = call_.finish_row(s_.geometry, segment_.kv_head, row, sum, lane == 0);
      const int64_t offset = call_.out_offset(s_.geometry, segment_.kv_head, row);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int channel = (group * 32 + lane) * 4;
        if (channel < kHeadDim) call_.store_scaled(offset + channel, total[group], factor, sum.is_empty());
      }
    }
  }

  const SplitCall& call_;
  const SplitWork& work_;  // in shared memory, and its halves
  const SequenceItems& s_;
  const SplitSegment& segment_;
  int32_t row_[2];    // in its sequence, in rows x G
  int32_t begin_[2];  // visible keys in the item
  int32_t end_[2];
  float scale_[2];  // of the scores, to base 2
  uint32_t q_[kSteps][4];
  float out_[kOutTiles][4];
  RowSum sum_[2];
};

}  // namespace polyop::cuda
