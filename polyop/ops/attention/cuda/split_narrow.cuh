// Items of up to sixteen rows: each warp multiplies its own keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "polyop/ops/attention/cuda/row_products.cuh"
#include "polyop/ops/attention/cuda/split_parts.cuh"
#include "polyop/ops/attention/cuda/split_ring.cuh"

namespace polyop::cuda {

/// Shared memory of the joining of a block's warps.
template <int kHeadDim>
struct NarrowShared {
  static constexpr int kRowFloats = kHeadDim + 4;  // rows 2 t of four lanes t start in four different groups of banks
  float2 sums[kWarps][kRowsPerWarp];               // reference and denominator
  alignas(16) float out[kWarps / 2][8][kRowFloats];
};

/// A warp's sums as parts of a tile.
template <int kBlocks, int kGroups>
struct NarrowSums : RowSums<kBlocks, kGroups> {
  using RowSums<kBlocks, kGroups>::out;
  using RowSums<kBlocks, kGroups>::row;

  /// Takes the next chunk's in.
  __device__ void join(const RowSums<kBlocks, kGroups>& next) {
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

  __device__ static void store(const RowSums<kBlocks, kGroups>& sums, float4* part, int num_rows) {
    const auto& out = sums.out;
    const auto& row = sums.row;
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

/// Up to kGroups * 8 rows of a narrow tile against chunks.
template <class Compute, class Kv, int kHeadDim, int kGroups>
class NarrowRows {
 public:
  using Tile = KvTile<Kv, kHeadDim>;
  using Ring = SplitRing<Kv, kHeadDim>;
  using Shared = NarrowShared<kHeadDim>;
  static constexpr int kBlocks = kHeadDim / 16;  // of output channels
  using Sums = NarrowSums<kBlocks, kGroups>;
  static constexpr bool kKeepsTotal = kGroups * kBlocks <= 8 || kGroups == 1;  // else it waits in memory: registers

  __device__ NarrowRows(const SplitCall& call, const WorkQueue& queue, int32_t index)
      : call_(call),
        queue_(queue),
        work_(queue.at(index)),
        begins_tile_(work_.segment.chunk_begin == 0),
        products_(call) {}

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
        products_.start({s().geometry, s().num_rows, segment().row_begin, segment().kv_head});
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
        if (key < key_end) products_.attend_tile(ring->tile(warp), ring->tile(warp) + Tile::kBytes, key);
        __syncwarp();  // all lanes have read the stage
      }
      ring->copy_next(round >= 0);
    }
  }

  /// Stores results, once all chunks of the tile are there; called by all threads.
  __device__ void finish(Shared* shared, int* is_last) {
    const bool ends_tile = segment().chunk_end == s().num_chunks;
    if (!begins_tile_ || !ends_tile) {
      if (kKeepsTotal && begins_tile_) Sums::store(total_, own_part(), num_rows());
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

  // ---- chunks -------------------------------------------------------------------------------------------------------

  /// The chunk joins those before it where the block has them all; any other one is a part of its own.
  __device__ void end_chunk(int32_t chunk) {
    const auto& sums = products_.finish();
    if (begins_tile_) {
      if constexpr (kKeepsTotal) {
        total_.join(sums);
      } else {
        float4* part = own_part();
        if (chunk > 0) {
          total_.load(part, num_rows());
        } else {
          total_.clear();
        }
        total_.join(sums);
        Sums::store(total_, part, num_rows());
      }
    } else {
      const int32_t leading = segment().tile_item + chunk - queue_.shares.start(block());
      Sums::store(sums, call_.scratch.narrow_part(block(), leading), num_rows());
    }
    products_.clear();
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
      const float row_factor = call_.finish_row(s().geometry, segment().kv_head, row, sum, channel == 0);
      call_.store_scaled(call_.out_offset(s().geometry, segment().kv_head, row) + channel,
                         {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}, row_factor, sum.is_empty());
    }
  }

  const SplitCall& call_;
  const WorkQueue& queue_;
  const SplitWork& work_;                                 // in the queue
  const bool begins_tile_;                                // the block has all chunks of the tile from the first one on
  Sums total_;                                            // of those chunks, between them only where kKeepsTotal
  RowProducts<Compute, Kv, kHeadDim, kGroups> products_;  // of the chunk being multiplied
};

}  // namespace polyop::cuda
