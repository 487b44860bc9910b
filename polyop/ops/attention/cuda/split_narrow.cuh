// Items of up to sixteen rows: each warp multiplies its own keys. Keys are the M of the matrix instruction and rows its
// N of eight, so that four query heads fill half of it and not a quarter, and a lane keeps few sums.
#pragma once

#include <cstdint>
#include <type_traits>

#include "polyop/ops/attention/cuda/split_parts.cuh"
#include "polyop/ops/attention/cuda/split_ring.cuh"

namespace polyop::cuda {

/// A row's sums are rescaled only when a score exceeds the reference by this much: weights stay below 2^8, far inside
/// f16, and the largest weight counts at least 1.
inline constexpr float kReferenceSlack = 8.0f;

/// Shared memory of the joining of a block's warps.
template <int kHeadDim>
struct NarrowShared {
  static constexpr int kRowFloats = kHeadDim + 4;  // rows 2 t of four lanes t start in four different groups of banks
  float2 sums[kWarps][kRowsPerWarp];               // reference and denominator
  alignas(16) float out[kWarps / 2][8][kRowFloats];
};

/// The sums of a warp over some keys. A lane has rows 2 (lane % 4) and the next one of each group of eight, and of each
/// block of 16 channels two, as KvTile::block_channel says; denominators are those of the lane's own keys until `meet`.
template <int kBlocks, int kGroups>
struct NarrowSums {
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

  /// Takes the next chunk's in.
  __device__ void join(const NarrowSums& next) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float2 factors[2] = {row[group][0].join(next.row[group][0]), row[group][1].join(next.row[group][1])};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          out[group][block][i] = join_sums(out[group][block][i], next.out[group][block][i], factors[i % 2]);
      }
    }
  }

  // ---- as parts, of which only lanes with rows of the tile are written and read

  static constexpr int kFloats = kGroups * (kBlocks * 128 + 128);

  __device__ void store(float4* part, int num_rows) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group * 8 + 2 * (lane % 4) >= num_rows) break;
      float4* to = part + group * (kBlocks + 1) * 32 + lane;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        to[block * 32] = {out[group][block][0], out[group][block][1], out[group][block][2], out[group][block][3]};
      to[kBlocks * 32] = {row[group][0].reference, row[group][0].denominator, row[group][1].reference,
                          row[group][1].denominator};
    }
  }

  __device__ void load(const float4* part, int num_rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const bool is_there = group * 8 + 2 * (lane % 4) < num_rows;
      const float4* from = part + group * (kBlocks + 1) * 32 + lane;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const float4 value = is_there ? __ldcg(from + block * 32) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        out[group][block][0] = value.x;
        out[group][block][1] = value.y;
        out[group][block][2] = value.z;
        out[group][block][3] = value.w;
      }
      const float4 sums = is_there ? __ldcg(from + kBlocks * 32) : float4{-INFINITY, 0.0f, -INFINITY, 0.0f};
      row[group][0] = {sums.x, sums.y};
      row[group][1] = {sums.z, sums.w};
    }
  }
};

/// Up to kGroups * 8 rows of a narrow tile against chunks. In products q k^T a lane has keys lane / 4 (+ 8) and of each
/// group the rows 2 (lane % 4) and the next one.
template <class Compute, class Kv, int kHeadDim, int kGroups>
class NarrowRows {
 public:
  using Tile = KvTile<Kv, kHeadDim>;
  using Ring = SplitRing<Kv, kHeadDim>;
  using Shared = NarrowShared<kHeadDim>;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kBlocks = kHeadDim / 16;  // of output channels
  using Sums = NarrowSums<kBlocks, kGroups>;
  static constexpr bool kKeepsTotal = kGroups * kBlocks <= 8 || kGroups == 1;  // else it waits in memory: registers

  __device__ NarrowRows(const SplitCall& call, const WorkQueue& queue, int32_t index)
      : call_(call), queue_(queue), work_(queue.at(index)), begins_tile_(work_.segment.chunk_begin == 0) {}

  /// Takes the warp's part of all rounds of the segment.
  __device__ void attend(Ring* ring) {
    const int warp = threadIdx.x / 32;
    const int num_rounds = segment().num_rounds();
    const int32_t tile_begin = segment().tile_begin;
    const int32_t key_end = segment().key_end;
    const int32_t chunk_rounds = s().chunk / kKeysPerRound;
    int32_t chunk = segment().chunk_begin;
    int32_t chunk_end = (s().first_chunk + chunk + 1) * chunk_rounds - tile_begin / kKeysPerRound;  // in rounds
    for (int round = ring->first_round(); round <= num_rounds; ++round) {
      if (round == 0) {
        load_queries();
        find_ranges();
        clear_chunk();
        if constexpr (kKeepsTotal) total_.clear();
      }
      if (round >= 0) {
        // Chunks that end before this round; some have no round of their own, because no row sees their keys.
        while (chunk < segment().chunk_end && (chunk_end <= round || round == num_rounds)) {
          end_chunk(chunk);
          ++chunk;
          chunk_end += chunk_rounds;
        }
        if (round == num_rounds) break;
        const int32_t key = tile_begin + round * kKeysPerRound + warp * kKeysPerTile;
        ring->wait();
        __syncwarp();  // the copies of all lanes
        if (key < key_end) attend_tile(ring->tile(warp), key);
        __syncwarp();  // all lanes have read the stage
      }
      ring->copy_next(round >= 0);
    }
  }

  /// Stores results, once all chunks of the tile are there; called by all threads.
  __device__ void finish(Shared* shared, int* is_last) {
    const bool ends_tile = segment().chunk_end == s().num_chunks;
    if (!begins_tile_ || !ends_tile) {
      if (kKeepsTotal && begins_tile_) total_.store(own_part(), num_rows());
      if (!call_.count_chunks(work_, is_last)) return;
      gather_parts();
    } else if constexpr (!kKeepsTotal) {
      total_.load(own_part(), num_rows());
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if (threadIdx.x % 32 < 4) {
          const RowSum& row = total_.row[group][column];
          const int in_tile = group * 8 + 2 * static_cast<int>(threadIdx.x % 4) + column;
          shared->sums[threadIdx.x / 32][in_tile] = {row.reference, row.denominator};
        }
      }
    }
    __syncthreads();  // references of all warps
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group > 0) {
        if (num_rows() <= group * 8) break;
        __syncthreads();  // the group before has been read
      }
      join_warps(shared, group);
    }
    __syncthreads();  // the sums have been read
  }

 private:
  [[nodiscard]] __device__ const SequenceItems& s() const { return work_.sequence; }
  [[nodiscard]] __device__ const SplitSegment& segment() const { return work_.segment; }

  [[nodiscard]] __device__ static int32_t block() { return static_cast<int32_t>(blockIdx.x); }
  /// Rows of the tile.
  [[nodiscard]] __device__ int32_t num_rows() const { return min(s().tile_rows, s().num_rows - segment().row_begin); }

  /// Where the warp's sums of all chunks from the tile's first one on are left.
  [[nodiscard]] __device__ float4* own_part() const {
    return call_.scratch.narrow_part(block(), call_.scratch.most_leading);
  }

  // ---- rows ---------------------------------------------------------------------------------------------------------

  /// q as the B operand: a lane has the channels of row lane / 4 of each group. scale_ is that of the lane's own two
  /// columns.
  __device__ void load_queries() {
    const AttentionProblem& p = call_.p;
    const int lane = threadIdx.x % 32;
    const float k_scale =
        p.k_scale.data == nullptr ? 1.0f : __ldg(p.k_scale.data + segment().kv_head * p.k_scale.head_stride);
    const float scale = p.scale * k_scale * kLog2E;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int32_t row = segment().row_begin + group * 8 + lane / 4;
      const int32_t query_row = row / call_.plan.group_size;
      const bool attends = row < s().num_rows && query_row < s().geometry.query_rows;
      const int64_t offset =
          attends ? row_offset(p, p.q, s().geometry, query_row, call_.head_of(segment().kv_head, row)) : 0;
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

  [[nodiscard]] __device__ KeyRange visible_keys(int32_t query_row) const {
    if (query_row >= s().geometry.query_rows) return {};
    return s().geometry.visible(call_.p, query_row);
  }

  /// Keys that all rows see.
  __device__ void find_ranges() {
    const AttentionProblem& p = call_.p;
    common_begin_ = 0;
    common_end_ = s().geometry.kv_length;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int32_t row = segment().row_begin + group * 8 + 2 * static_cast<int32_t>(threadIdx.x % 4) + column;
        const int32_t query_row = row / call_.plan.group_size;
        if (row >= s().num_rows) continue;
        const KeyRange visible = visible_keys(query_row);
        common_begin_ = max(common_begin_, visible.begin);
        common_end_ = min(common_end_, visible.end);
      }
    }
    if (p.tree_mask.words != nullptr) common_end_ = min(common_end_, s().geometry.kv_length - s().geometry.allotted);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      common_begin_ = max(common_begin_, __shfl_xor_sync(0xffffffffu, common_begin_, step));
      common_end_ = min(common_end_, __shfl_xor_sync(0xffffffffu, common_end_, step));
    }
  }

  // ---- chunks -------------------------------------------------------------------------------------------------------

  __device__ void clear_chunk() {
    sums_.clear();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      sums_.row[group][0].reference = sums_.row[group][1].reference = 0.0f;
      limit_[group][0] = limit_[group][1] = -INFINITY;
    }
  }

  /// The chunk joins those before it where the block has them all; any other one is a part of its own.
  __device__ void end_chunk(int32_t chunk) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        if (limit_[group][column] == -INFINITY) sums_.row[group][column].reference = -INFINITY;
      }
    }
    sums_.meet();
    if (begins_tile_) {
      if constexpr (kKeepsTotal) {
        total_.join(sums_);
      } else {
        float4* part = own_part();
        if (chunk > 0) {
          total_.load(part, num_rows());
        } else {
          total_.clear();
        }
        total_.join(sums_);
        total_.store(part, num_rows());
      }
    } else {
      const int32_t leading = segment().tile_item + chunk - queue_.shares.start(block());
      sums_.store(call_.scratch.narrow_part(block(), leading), num_rows());
    }
    clear_chunk();
  }

  /// The warp's sums of all chunks of the tile, as the blocks that had them left them.
  __device__ void gather_parts() {
    const ItemShares& shares = queue_.shares;
    const int32_t tile_item = segment().tile_item;
    int32_t part_block = shares.block_of(tile_item);
    total_.load(call_.scratch.narrow_part(part_block, call_.scratch.most_leading), num_rows());
    ++part_block;
    int32_t leading = 0;
    constexpr int kTogether = kGroups == 1 ? 3 : 1;  // parts on their way at a time; more do not fit the registers
    for (int32_t left = tile_item + s().num_chunks - shares.start(part_block); left > 0; left -= kTogether) {
      Sums parts[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {  // behind the last one it is read again, and not used
        parts[i].load(call_.scratch.narrow_part(part_block, leading), num_rows());
        const bool crosses = leading + 1 == shares.count(part_block);
        if (i + 1 < left) {
          leading = crosses ? 0 : leading + 1;
          part_block += crosses ? 1 : 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (i < left) total_.join(parts[i]);
      }
    }
  }

  // ---- one tile -----------------------------------------------------------------------------------------------------

  __device__ void attend_tile(uint32_t tile, int32_t key) {
    float score[kGroups][4];
    multiply_keys(tile, score);
    if (key < common_begin_ || key + kKeysPerTile > common_end_) hide_keys(key, score);
    raise_references(score);
    uint32_t weights[kGroups][2];  // the B operand: 16 keys by 8 rows
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[group][i] = exp2_approximate(score[group][i] - sums_.row[group][i % 2].reference);
        sums_.row[group][i % 2].denominator += score[group][i];
      }
      weights[group][0] = transpose_matrix(narrow_pair<Compute>(score[group][0], score[group][1]));
      weights[group][1] = transpose_matrix(narrow_pair<Compute>(score[group][2], score[group][3]));
    }
    const uint32_t values = tile + Tile::kBytes;
#pragma unroll
    for (int block = 0; block < kBlocks; block += Tile::kStepsPerLoad) {
      uint32_t a[4 * Tile::kStepsPerLoad];
      Tile::load_values(values, block, a);
#pragma unroll
      for (int inner = 0; inner < Tile::kStepsPerLoad; ++inner) {
        if (block + inner >= kBlocks) break;
        const uint32_t(&operand)[4] = reinterpret_cast<const uint32_t(&)[4]>(a[4 * inner]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          multiply_accumulate<Compute>(sums_.out[group][block + inner], operand, weights[group][0], weights[group][1]);
      }
    }
  }

  __device__ void multiply_keys(uint32_t tile, float (&score)[kGroups][4]) const {
    float odd[kGroups][4];  // two chains of sums are done sooner than one
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[group][i] = odd[group][i] = 0.0f;
    }
#pragma unroll
    for (int step = 0; step < kSteps; step += Tile::kStepsPerLoad) {
      uint32_t a[4 * Tile::kStepsPerLoad];
      Tile::load_keys(tile, step, a);
#pragma unroll
      for (int inner = 0; inner < Tile::kStepsPerLoad; ++inner) {
        if (step + inner >= kSteps) break;
        const uint32_t(&operand)[4] = reinterpret_cast<const uint32_t(&)[4]>(a[4 * inner]);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          const uint32_t(&q)[2] = q_[group][step + inner];
          multiply_accumulate<Compute>((step + inner) % 2 == 0 ? score[group] : odd[group], operand, q[0], q[1]);
        }
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[group][i] = __fmul_rn(score[group][i] + odd[group][i], scale_[group][i % 2]);
    }
  }

  __device__ void hide_keys(int32_t key, float (&score)[kGroups][4]) const {
    const AttentionProblem& p = call_.p;
    const int lane = threadIdx.x % 32;
    const bool has_tree =
        p.tree_mask.words != nullptr && key + kKeysPerTile > s().geometry.kv_length - s().geometry.allotted;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int32_t row = segment().row_begin + group * 8 + 2 * (lane % 4) + column;
        const int32_t query_row = row / call_.plan.group_size;
        const KeyRange range = visible_keys(query_row);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t at = key + lane / 4 + half * 8;
          bool visible = at >= range.begin && at < range.end;
          if (has_tree && visible && row < s().num_rows) visible = s().geometry.tree_allows(p, query_row, at);
          if (!visible) score[group][column + 2 * half] = -INFINITY;
        }
      }
    }
  }

  /// Rows with a score above their limit get their largest score as reference, and their sums shrink. Whether a row
  /// does so depends on its own scores alone.
  __device__ void raise_references(const float (&score)[kGroups][4]) {
    bool exceeds = false;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) exceeds |= score[group][i] > limit_[group][i % 2];
    }
    if (!__any_sync(0xffffffffu, exceeds)) return;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      float shrink[2];
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        float largest = fmaxf(score[group][column], score[group][column + 2]);
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

  // ---- joining of the warps -----------------------------------------------------------------------------------------

  /// Reference and denominator of all warps together.
  [[nodiscard]] __device__ static RowSum join_rows(const Shared& shared, int row) {
    RowSum sum;
    float2 each[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      each[w] = shared.sums[w][row];
      sum.reference = fmaxf(sum.reference, each[w].x);
    }
    const float reference = sum.reference == -INFINITY ? 0.0f : sum.reference;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      sum.denominator = fmaf(each[w].y, exp2_approximate(each[w].x - reference), sum.denominator);
    return sum;
  }

  /// Adds the warps' sums of eight rows, (w0 + w2) + (w1 + w3), and stores results.
  __device__ void join_warps(Shared* shared, int group) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    constexpr int kHalf = kWarps / 2;
    float factor[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float reference = join_rows(*shared, group * 8 + 2 * (lane % 4) + column).reference;
      factor[column] =
          exp2_approximate(total_.row[group][column].reference - (reference == -INFINITY ? 0.0f : reference));
    }
    const auto each = [&](auto&& fn) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* at = &shared->out[warp % kHalf][2 * (lane % 4) + i % 2][Tile::block_channel(block, i / 2)];
          fn(at, __fmul_rn(total_.out[group][block][i], factor[i % 2]));
        }
      }
    };
    if (warp >= kHalf) each([](float* at, float value) { *at = value; });
    __syncthreads();  // sums of the upper warps to the lower ones
    if (warp < kHalf) each([](float* at, float value) { *at += value; });
    __syncthreads();  // and theirs to all
    constexpr int kQuads = kHeadDim / 4;
    for (int i = static_cast<int>(threadIdx.x); i < min(8, num_rows() - group * 8) * kQuads; i += kBlockThreads) {
      const int in_group = i / kQuads;
      const int channel = i % kQuads * 4;
      const float4 a = *reinterpret_cast<const float4*>(&shared->out[0][in_group][channel]);
      const float4 b = *reinterpret_cast<const float4*>(&shared->out[1][in_group][channel]);
      const int32_t row = segment().row_begin + group * 8 + in_group;
      const RowSum sum = join_rows(*shared, group * 8 + in_group);
      const float row_factor = call_.finish_row(s(), segment().kv_head, row, sum, channel == 0);
      call_.store_scaled(call_.out_offset(s(), segment().kv_head, row) + channel,
                         {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}, row_factor, sum.is_empty());
    }
  }

  const SplitCall& call_;
  const WorkQueue& queue_;
  const SplitWork& work_;    // in the queue
  const bool begins_tile_;   // the block has all chunks of the tile from the first one on
  Sums total_;               // of those chunks, between them only where kKeepsTotal
  Sums sums_;                // of the chunk being multiplied; references are 0 until a key was seen
  float limit_[kGroups][2];  // reference + slack; -inf until a key was seen
  uint32_t q_[kGroups][kSteps][2];
  float scale_[kGroups][2];  // of the scores, to base 2
  int32_t common_begin_ = 0;
  int32_t common_end_ = 0;
};

}  // namespace polyop::cuda
