// Up to sixteen rows (query row x head of one kv head) against tiles of sixteen keys, by one warp. Keys are the M of
// the matrix instruction and rows its N of eight, so that four query heads fill half of it and not a quarter, and a
// lane keeps few sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "polyop/ops/attention/cuda/kv_tile.cuh"
#include "polyop/ops/attention/cuda/row_results.cuh"

namespace polyop::cuda {

/// A row's sums are rescaled only when a score exceeds the reference by this much: weights stay below 2^8, far inside
/// f16, and the largest weight counts at least 1.
inline constexpr float kReferenceSlack = 8.0f;

/// Which rows of a batch a warp works on.
struct TileRows {
  SequenceGeometry geometry;
  int32_t num_rows = 0;   // of the sequence: query rows x G
  int32_t row_begin = 0;  // of the tile
  int32_t kv_head = 0;
};

/// The sums of a warp over some keys. A lane has rows 2 (lane % 4) and the next one of each group of eight, and of each
/// block of 16 channels two, as the tile's block_channel says; denominators are those of the lane's own keys until
/// `meet`.
template <int kBlocks, int kGroups>
struct RowSums {
  float out[kGroups][kBlocks][4];
  RowSum row[kGroups][2];

  __device__ void clear() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[group][block][i] = 0.0f;
      }
      row[group][0] = row[group][1] = {};
    }
  }

  /// Adds the lanes' denominators.
  __device__ void meet() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
          row[group][column].denominator += __shfl_xor_sync(0xffffffffu, row[group][column].denominator, step);
      }
    }
  }
};

/// kGroups * 8 rows. In products q k^T a lane has keys lane / 4 (+ 8) and of each group the rows 2 (lane % 4) and the
/// next one.
template <class Compute, class Kv, int kHeadDim, int kGroups>
class RowProducts {
 public:
  using Tile = KvTile<Kv, kHeadDim>;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kBlocks = Tile::kSteps;  // of output channels
  using Sums = RowSums<kBlocks, kGroups>;

  __device__ RowProducts(const AttentionCall& call) : call_(call) {}

  /// Reads the rows' queries and what they see, and starts with empty sums.
  __device__ void start(const TileRows& rows) {
    rows_ = rows;
    load_queries();
    find_ranges();
    clear();
  }

  /// Empty sums: references are 0 until a key was seen.
  __device__ void clear() {
    sums_.clear();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      sums_.row[group][0].reference = sums_.row[group][1].reference = 0.0f;
      limit_[group][0] = limit_[group][1] = -INFINITY;
    }
  }

  /// The warp's sums over all keys since `clear`; their references are -inf where no key was seen.
  __device__ Sums& finish() {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if (limit_[group][column] == -INFINITY) sums_.row[group][column].reference = -INFINITY;
      }
    }
    sums_.meet();
    return sums_;
  }

  /// kTiles tiles of sixteen keys from `key` on, in shared memory from `tiles` on, v behind k; those that no row sees
  /// are numbers, too.
  template <int kTiles>
  __device__ void attend_tiles(uint32_t tiles, int32_t key) {
    float score[kTiles][kGroups][4];
    multiply_keys(tiles, score);
    if (key < common_begin_ || key + kTiles * kKeysPerTile > common_end_) hide_keys(key, score);
    raise_references(score);
    uint32_t weights[kTiles][kGroups][2];  // the B operand: 16 keys by 8 rows
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        float(&s)[4] = score[tile][group];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[i] = exp2_approximate(s[i] - sums_.row[group][i % 2].reference);
          sums_.row[group][i % 2].denominator += s[i];
        }
        weights[tile][group][0] = transpose_matrix(narrow_pair<Compute>(s[0], s[1]));
        weights[tile][group][1] = transpose_matrix(narrow_pair<Compute>(s[2], s[3]));
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; block += Tile::kStepsPerLoad) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t a[4 * Tile::kStepsPerLoad];
        Tile::load_values(tiles + tile * Tile::kPairBytes + Tile::kBytes, block, a);
#pragma unroll
        for (int inner = 0; inner < Tile::kStepsPerLoad; ++inner) {
          if (block + inner >= kBlocks) break;
          const uint32_t(&operand)[4] = reinterpret_cast<const uint32_t(&)[4]>(a[4 * inner]);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const uint32_t(&w)[2] = weights[tile][group];
            multiply_accumulate<Compute>(sums_.out[group][block + inner], operand, w[0], w[1]);
          }
        }
      }
    }
  }

 private:
  // ---- rows ---------------------------------------------------------------------------------------------------------

  /// q as the B operand: a lane has the channels of row lane / 4 of each group. scale_ is that of the lane's own two
  /// columns.
  __device__ void load_queries() {
    const AttentionProblem& p = call_.p;
    const int lane = threadIdx.x % 32;
    const float scale = call_.score_scale(rows_.kv_head);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int32_t row = rows_.row_begin + group * 8 + lane / 4;
      const int32_t query_row = row / call_.group_size;
      const bool attends = row < rows_.num_rows && query_row < rows_.geometry.query_rows;
      const int64_t offset =
          attends ? row_offset(p, p.q, rows_.geometry, query_row, call_.head_of(rows_.kv_head, row)) : 0;
      const auto* base = static_cast<const uint16_t*>(p.q.data) + offset;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          q_[group][step][half] =
              attends ? *reinterpret_cast<const uint32_t*>(base + Tile::query_channel(step, half)) : 0u;
        }
      }
      float row_scale = scale;
      if constexpr (kIsByte<Kv>) row_scale *= scale_into_f16(p.q.dtype == DType::kF16, q_[group]);
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        scale_[group][column] =
            kIsByte<Kv> ? __shfl_sync(0xffffffffu, row_scale, (2 * (lane % 4) + column) * 4) : scale;
      }
    }
  }

  /// Turns q's 16-bit pairs of one row into scaled f16 pairs; returns the inverse of the scale.
  [[nodiscard]] __device__ static float scale_into_f16(bool is_f16, uint32_t (&q)[kSteps][2]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const float2 pair = widen_query(is_f16, q[i / 2][i % 2]);
      most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const QueryScale scale(most);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const float2 pair = widen_query(is_f16, q[i / 2][i % 2]);
      q[i / 2][i % 2] = narrow_pair<__half>(pair.x * scale.factor, pair.y * scale.factor);
    }
    return scale.inverse;
  }

  /// What each row sees, and the keys that all rows see.
  __device__ void find_ranges() {
    const AttentionProblem& p = call_.p;
    common_begin_ = 0;
    common_end_ = rows_.geometry.kv_length;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int32_t row = row_of(group, column);
        const int32_t query_row = row / call_.group_size;
        const bool is_there = row < rows_.num_rows;
        const KeyRange range =
            is_there && query_row < rows_.geometry.query_rows ? rows_.geometry.visible(p, query_row) : KeyRange{};
        visible_[group][column] = range;
        if (!is_there) continue;
        common_begin_ = max(common_begin_, range.begin);
        common_end_ = min(common_end_, range.end);
      }
    }
    if (p.tree_mask.words != nullptr) {
      common_end_ = min(common_end_, rows_.geometry.kv_length - rows_.geometry.allotted);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      common_begin_ = max(common_begin_, __shfl_xor_sync(0xffffffffu, common_begin_, step));
      common_end_ = min(common_end_, __shfl_xor_sync(0xffffffffu, common_end_, step));
    }
  }

  /// Row of the lane's column of a group in its sequence, in rows x G.
  [[nodiscard]] __device__ int32_t row_of(int group, int column) const {
    return rows_.row_begin + group * 8 + 2 * static_cast<int32_t>(threadIdx.x % 4) + column;
  }

  // ---- one tile -----------------------------------------------------------------------------------------------------

  template <int kTiles>
  __device__ void multiply_keys(uint32_t tiles, float (&score)[kTiles][kGroups][4]) const {
    float odd[kTiles][kGroups][4];  // two chains of sums are done sooner than one
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[tile][group][i] = odd[tile][group][i] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; step += Tile::kStepsPerLoad) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t a[4 * Tile::kStepsPerLoad];
        Tile::load_keys(tiles + tile * Tile::kPairBytes, step, a);
#pragma unroll
        for (int inner = 0; inner < Tile::kStepsPerLoad; ++inner) {
          if (step + inner >= kSteps) break;
          const uint32_t(&operand)[4] = reinterpret_cast<const uint32_t(&)[4]>(a[4 * inner]);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const uint32_t(&q)[2] = q_[group][step + inner];
            multiply_accumulate<Compute>((step + inner) % 2 == 0 ? score[tile][group] : odd[tile][group], operand, q[0],
                                         q[1]);
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          score[tile][group][i] = __fmul_rn(score[tile][group][i] + odd[tile][group][i], scale_[group][i % 2]);
      }
    }
  }

  template <int kTiles>
  __device__ void hide_keys(int32_t key, float (&score)[kTiles][kGroups][4]) const {
    const AttentionProblem& p = call_.p;
    const SequenceGeometry& g = rows_.geometry;
    const bool has_tree = p.tree_mask.words != nullptr && key + kTiles * kKeysPerTile > g.kv_length - g.allotted;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int32_t first = key + tile * kKeysPerTile + static_cast<int32_t>(threadIdx.x % 32 / 4);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int32_t at = first + i / 2 * 8;
          const KeyRange range = visible_[group][i % 2];
          bool visible = at >= range.begin && at < range.end;
          if (has_tree && visible) visible = g.tree_allows(p, row_of(group, i % 2) / call_.group_size, at);
          if (!visible) score[tile][group][i] = -INFINITY;
        }
      }
    }
  }

  /// Rows with a score above their limit get their largest score as reference, and their sums shrink. Whether a row
  /// does so depends on its own scores alone.
  template <int kTiles>
  __device__ void raise_references(const float (&score)[kTiles][kGroups][4]) {
    bool exceeds = false;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) exceeds |= score[tile][group][i] > limit_[group][i % 2];
      }
    }
    if (!__any_sync(0xffffffffu, exceeds)) return;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float shrink[2];
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float largest = -INFINITY;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          largest = fmaxf(largest, fmaxf(score[tile][group][column], score[tile][group][column + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        shrink[column] = 1.0f;
        if (largest > limit_[group][column]) {
          shrink[column] = limit_[group][column] == -INFINITY
                               ? 0.0f
                               : exp2_approximate(sums_.row[group][column].reference - largest);
          sums_.row[group][column].reference = largest;
          limit_[group][column] = largest + kReferenceSlack;
          sums_.row[group][column].denominator *= shrink[column];
        }
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_.out[group][block][i] *= shrink[i % 2];
      }
    }
  }

  const AttentionCall& call_;
  TileRows rows_;
  Sums sums_;
  float limit_[kGroups][2];  // reference + slack; -inf until a key was seen
  uint32_t q_[kGroups][kSteps][2];
  float scale_[kGroups][2];       // of the scores, to base 2
  KeyRange visible_[kGroups][2];  // of the lane's rows
  int32_t common_begin_ = 0;      // of all rows
  int32_t common_end_ = 0;
};

}  // namespace polyop::cuda
