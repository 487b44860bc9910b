// Items of up to sixteen rows: each warp multiplies its own keys, and at the end of a chunk the warps' sums meet in
// shared memory.
#pragma once

#include <cstdint>

#include "polyop/ops/attention/cuda/row_products.cuh"
#include "polyop/ops/attention/cuda/split_parts.cuh"
#include "polyop/ops/attention/cuda/split_ring.cuh"

namespace polyop::cuda {

/// Shared memory in which a block's warps meet: the sums of eight rows, for large heads in two slices of channels.
/// Between two segments: the slots of a tile's parts.
template <int kHeadDim>
struct NarrowShared {
  static constexpr int kSlices = kHeadDim > 128 ? 2 : 1;
  static constexpr int kChannels = kHeadDim / kSlices;
  static constexpr int kRowFloats = kChannels + 4;  // rows 2 t of four lanes t start in four different groups of banks
  float2 sums[kWarps][kRowsPerWarp];                // reference and denominator
  union {
    alignas(16) float out[kWarps][8][kRowFloats];
    int32_t slots[kMostChunks + 1];
  };
};

/// Up to kGroups * 8 rows of a narrow tile against chunks.
template <class Compute, class Kv, int kHeadDim, int kGroups>
class NarrowRows {
 public:
  using Tile = KvTile<Kv, kHeadDim>;
  using Ring = SplitRing<Kv, kHeadDim>;
  using Shared = NarrowShared<kHeadDim>;

  __device__ NarrowRows(const SplitCall& call, const SplitWork& work, Shared* shared)
      : call_(call), work_(work), shared_(shared), products_(call) {}

  /// Multiplies the warp's part of all rounds of the segment, and joins its chunks.
  __device__ void attend(Ring* ring) {
    const int warp = threadIdx.x / 32;
    const SequenceItems& s = work_.sequence;
    const SplitSegment& segment = work_.segment;
    ring->fill();
    products_.start({s.geometry, s.num_rows, segment.row_begin, segment.kv_head});
    const int num_rounds = segment.num_rounds;
    const int32_t chunk_rounds = s.chunk / Ring::kKeysPerRound;
    const int32_t end_chunk_number = segment.chunk_end;
    int32_t key = segment.tile_begin + warp * Ring::kTiles * kKeysPerTile;
    int32_t chunk_end =  // in rounds
        (s.first_chunk + segment.chunk_begin + 1) * chunk_rounds - segment.tile_begin / Ring::kKeysPerRound;
    int round = 0;
#pragma unroll 1
    for (int32_t chunk = segment.chunk_begin; chunk < end_chunk_number; ++chunk) {
      // Some chunks have no round of their own, because no row sees their keys.
      const int stop = chunk + 1 == end_chunk_number ? num_rounds : min(chunk_end, num_rounds);
#pragma unroll 1
      for (; round < stop; ++round) {
        ring->wait();
        __syncwarp();  // the copies of all lanes
        products_.template attend_tiles<Ring::kTiles>(ring->tile(warp * Ring::kTiles), key);
        __syncwarp();  // all lanes have read the stage
        ring->advance();
        key += Ring::kKeysPerRound;
      }
      end_chunk(chunk);
      chunk_end += chunk_rounds;
    }
  }

  /// Stores the results of a tile that the block has alone, or its part of one that it begins. Parts of chunks of a
  /// tile that another block began are stored already.
  __device__ void finish() const {
    if (!work_.joins_chunks()) return;
    each_unit([&](int group, int slice, int unit, int row, int channel) {
      const float4 total = total_[group][slice][unit];
      const RowSum sum = row_[group][unit];
      if (work_.has_tile()) {
        call_.store_result(work_, row, channel, total, sum);
      } else {
        store_part(call_.scratch.most_leading, row, channel, total, sum);
      }
    });
  }

 private:
  static constexpr int kBlocks = kHeadDim / 16;  // of output channels
  static constexpr int kSlices = Shared::kSlices;
  static constexpr int kQuads = Shared::kChannels / 4;
  static constexpr int kUnits = (8 * kQuads + kBlockThreads - 1) / kBlockThreads;  // quads of a thread, of 8 rows

  /// fn(group, slice, unit, row of the tile, channel) for all quads of a thread.
  template <class Fn>
  __device__ void each_unit(Fn&& fn) const {
    const int num_rows = work_.num_rows();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int i = static_cast<int>(threadIdx.x) + unit * kBlockThreads;
          const int row = group * 8 + i / kQuads;
          if (i < 8 * kQuads && row < num_rows) fn(group, slice, unit, row, slice * Shared::kChannels + i % kQuads * 4);
        }
      }
    }
  }

  // ---- chunks -------------------------------------------------------------------------------------------------------

  /// The warps' sums meet; the chunk joins those before it where the block has them all, any other one is a part.
  __device__ void end_chunk(int32_t chunk) {
    const auto& sums = products_.finish();
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int num_rows = work_.num_rows();
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group > 0 && num_rows <= group * 8) break;
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        __syncthreads();  // what lay there has been read
        if (group * 8 + 2 * (lane % 4) < num_rows) {
          if (slice == 0 && lane < 4) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
              const RowSum& row = sums.row[group][column];
              shared_->sums[warp][group * 8 + 2 * lane + column] = {row.reference, row.denominator};
            }
          }
#pragma unroll
          for (int in_slice = 0; in_slice < kBlocks / kSlices; ++in_slice) {
            const int block = slice * (kBlocks / kSlices) + in_slice;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int channel = Tile::block_channel(block, i / 2) - slice * Shared::kChannels;
              shared_->out[warp][2 * (lane % 4) + i % 2][channel] = sums.out[group][block][i];
            }
          }
        }
        __syncthreads();  // sums of all warps
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          const int i = static_cast<int>(threadIdx.x) + unit * kBlockThreads;
          const int in_group = i / kQuads;
          if (i >= 8 * kQuads || group * 8 + in_group >= num_rows) break;
          join_warps(chunk, group, slice, unit, in_group, i % kQuads * 4);
        }
      }
    }
    products_.clear();
  }

  /// Four channels of one row, in the order (warp 0 + warp 2) + (warp 1 + warp 3).
  __device__ void join_warps(int32_t chunk, int group, int slice, int unit, int in_group, int channel) {
    const int row = group * 8 + in_group;
    float2 each[kWarps];
    RowSum sum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      each[w] = shared_->sums[w][row];
      sum.reference = fmaxf(sum.reference, each[w].x);
    }
    const float reference = sum.reference == -INFINITY ? 0.0f : sum.reference;
    float4 part[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float factor = exp2_approximate(each[w].x - reference);
      sum.denominator = fmaf(each[w].y, factor, sum.denominator);
      const float4 value = *reinterpret_cast<const float4*>(&shared_->out[w][in_group][channel]);
      part[w] = w < kWarps / 2 ? float4{__fmul_rn(value.x, factor), __fmul_rn(value.y, factor),
                                        __fmul_rn(value.z, factor), __fmul_rn(value.w, factor)}
                               : float4{fmaf(value.x, factor, part[w - 2].x), fmaf(value.y, factor, part[w - 2].y),
                                        fmaf(value.z, factor, part[w - 2].z), fmaf(value.w, factor, part[w - 2].w)};
    }
    const float4 joined = {part[2].x + part[3].x, part[2].y + part[3].y, part[2].z + part[3].z, part[2].w + part[3].w};
    if (work_.joins_chunks()) {
      RowSum& row_sum = row_[group][unit];
      float4& total = total_[group][slice][unit];
      RowSum next = chunk == 0 ? RowSum{} : row_sum;
      if (chunk == 0) total = {0.0f, 0.0f, 0.0f, 0.0f};
      const float2 factors = next.join(sum);
      total = join_quads(total, joined, factors);
      if (slice == kSlices - 1) row_sum = next;
    } else {
      store_part(chunk - work_.segment.chunk_begin, row, slice * Shared::kChannels + channel, joined, sum);
    }
  }

  /// leading: number of the chunk in the segment, or most_leading.
  __device__ void store_part(int32_t leading, int row, int channel, float4 value, const RowSum& sum) const {
    const SplitScratch& scratch = call_.scratch;
    const int32_t slot = scratch.narrow_slot(static_cast<int32_t>(blockIdx.x), leading);
    float* part = scratch.narrow_part(slot, kHeadDim);
    __stcg(reinterpret_cast<float4*>(part + row * kHeadDim + channel), value);
    if (channel != 0) return;
    __stcg(reinterpret_cast<float2*>(part + scratch.narrow_rows * kHeadDim) + row, {sum.reference, sum.denominator});
  }

  const SplitCall& call_;
  const SplitWork& work_;  // in shared memory
  Shared* shared_;
  RowProducts<Compute, Kv, kHeadDim, kGroups> products_;  // of the chunk being multiplied
  float4 total_[kGroups][kSlices][kUnits];                // of the chunks before, from the tile's first one on
  RowSum row_[kGroups][kUnits];
};

}  // namespace polyop::cuda
