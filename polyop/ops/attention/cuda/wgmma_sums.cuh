// The sums of one multiplying warpgroup's 64 rows, and what becomes of them: results, or parts that are joined later.
#pragma once

#include <cstdint>

#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/attention/cuda/split_parts.cuh"
#include "polyop/ops/attention/cuda/wgmma_plan.cuh"
#include "polyop/ops/attention/cuda/wgmma_ptx.cuh"

namespace polyop::cuda {

/// All threads of a warpgroup; -1 is the copying one.
__device__ inline void sync_warpgroup(int group) { named_barrier_sync(group + 2, kGroupThreads); }

/// A lane has rows lane / 4 and lane / 4 + 8 of its warp's sixteen, and of each eight channels two.
template <class T, int kHeadDim>
class WgmmaSums {
 public:
  static constexpr int kOut = kHeadDim / 2;  // sums of a lane
  static constexpr int kQuads = kOut / 4;
  static constexpr int kPartFloats = kWgmmaTileRows * (kHeadDim + 2);

 protected:
  __device__ WgmmaSums(const SplitCall& call, const WgmmaWalk& walk, int group, int32_t lanes, int* is_last)
      : call_(call), walk_(walk), group_(group), lanes_(lanes), is_last_(is_last) {}

  [[nodiscard]] __device__ static int32_t thread() { return static_cast<int32_t>(threadIdx.x) % kGroupThreads; }
  [[nodiscard]] __device__ const SequenceItems& s() const { return walk_.sequence; }
  [[nodiscard]] __device__ const SplitSegment& segment() const { return walk_.segment; }

  /// Row of the lane in its sequence, in rows x G.
  [[nodiscard]] __device__ int32_t row(int half) const {
    return segment().row_begin + group_ * kGroupRows + thread() / 32 * 16 + thread() % 32 / 4 + half * 8;
  }

  __device__ void sync_group() const { sync_warpgroup(group_); }

  /// Two sums of each of the lane's rows.
  [[nodiscard]] __device__ float4 quad(int i) const {
    return {out_[4 * i], out_[4 * i + 1], out_[4 * i + 2], out_[4 * i + 3]};
  }

  __device__ void set_quad(int i, float4 values) {
    out_[4 * i] = values.x;
    out_[4 * i + 1] = values.y;
    out_[4 * i + 2] = values.z;
    out_[4 * i + 3] = values.w;
  }

  /// Four sums of the chunks before and those of the chunk in out_, to out_.
  __device__ void join_quad(int i, float4 before, const float2 (&factors)[2]) {
    out_[4 * i] = join_sums(before.x, out_[4 * i], factors[0]);
    out_[4 * i + 1] = join_sums(before.y, out_[4 * i + 1], factors[0]);
    out_[4 * i + 2] = join_sums(before.z, out_[4 * i + 2], factors[1]);
    out_[4 * i + 3] = join_sums(before.w, out_[4 * i + 3], factors[1]);
  }

  /// The warpgroup's half of a part; leading: number of the chunk in its block's share, or most_leading.
  [[nodiscard]] __device__ float* part_of(int32_t block, int32_t leading) const {
    const int64_t slot = int64_t{block} * (call_.scratch.most_leading + 1) + leading;
    return call_.scratch.narrow + slot * kPartFloats + group_ * (kPartFloats / kRowGroups);
  }

  /// Sums as the lanes hold them, then reference and denominator of each row.
  __device__ void store_part(float* part, const RowSum (&rows_of_part)[2]) const {
    auto* sums = reinterpret_cast<float4*>(part) + thread();
#pragma unroll
    for (int i = 0; i < kQuads; ++i) __stcg(sums + i * kGroupThreads, quad(i));
    if (thread() % 4 != 0) return;
    auto* rows = reinterpret_cast<float2*>(part + kGroupRows * kHeadDim) + thread() / 32 * 16 + thread() % 32 / 4;
    __stcg(rows, float2{rows_of_part[0].reference, rows_of_part[0].denominator});
    __stcg(rows + 8, float2{rows_of_part[1].reference, rows_of_part[1].denominator});
  }

  /// A part as the lanes hold it.
  struct Part {
    float4 sums[kQuads];
    float2 rows[2];
  };

  __device__ Part load_part(const float* part) const {
    const auto* sums = reinterpret_cast<const float4*>(part) + thread();
    const auto* rows =
        reinterpret_cast<const float2*>(part + kGroupRows * kHeadDim) + thread() / 32 * 16 + thread() % 32 / 4;
    Part result;
    result.rows[0] = __ldcg(rows);
    result.rows[1] = __ldcg(rows + 8);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) result.sums[i] = __ldcg(sums + i * kGroupThreads);
    return result;
  }

  /// The part joins what out_ and sum_ hold.
  __device__ void join_part(const Part& part) {
    const float2 factors[2] = {sum_[0].join({part.rows[0].x, part.rows[0].y}),
                               sum_[1].join({part.rows[1].x, part.rows[1].y})};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const float4 before = quad(i);
      set_quad(i, part.sums[i]);
      join_quad(i, before, factors);
    }
  }

  /// The parts of all chunks, in their order.
  __device__ void gather_parts() {
    const auto block = static_cast<int32_t>(blockIdx.x);
    const ItemShare<int64_t>& share = walk_.share;
    ItemOwners owners(share, share.before + int64_t{segment().tile_item} * s().item_cost, s().item_cost,
                      block / lanes_);
    const auto part_at = [&](int32_t place) { return part_of(owners.team() * lanes_ + block % lanes_, place); };
    const Part first = load_part(part_at(call_.scratch.most_leading));
    sum_[0] = {first.rows[0].x, first.rows[0].y};
    sum_[1] = {first.rows[1].x, first.rows[1].y};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) set_quad(i, first.sums[i]);
    int32_t left = s().num_chunks;
    const int32_t first_team = owners.team();
    do {  // the first part has all chunks of its block
      owners.advance();
      --left;
    } while (left > 0 && owners.team() == first_team);
    for (; left > 0; left -= 2) {  // two are on their way at a time; behind the last one it is read again, and not used
      const Part one = load_part(part_at(owners.place()));
      if (left > 1) owners.advance();
      const Part two = load_part(part_at(owners.place()));
      owners.advance();
      join_part(one);
      if (left > 1) join_part(two);
    }
  }

  /// Counts the segment's chunks, whose parts the warpgroup has written; true when none is missing of its rows.
  [[nodiscard]] __device__ bool count_chunks() const {
    sync_group();  // parts of all warps to thread 0
    if (thread() == 0) {
      const SequenceGeometry& g = s().geometry;
      const int64_t tile = g.sequence + int64_t{g.row_begin} * call_.plan.group_size / kWgmmaTileRows +
                           segment().row_begin / kWgmmaTileRows;
      uint32_t* semaphore =
          call_.scratch.semaphores + (tile * call_.num_kv_heads() + segment().kv_head) * kRowGroups + group_;
      const auto count = static_cast<uint32_t>(segment().chunk_end - segment().chunk_begin);
      const bool last = fetch_add(semaphore, count) + count == static_cast<uint32_t>(s().num_chunks);
      if (last) *semaphore = 0;  // for the next launch
      *is_last_ = last ? 1 : 0;
    }
    sync_group();  // is_last to all
    return *is_last_ != 0;
  }

  __device__ void store_results() const {
    const bool is_f8 = call_.p.out.dtype == DType::kF8E4M3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t at = row(half);
      if (at >= s().num_rows) continue;
      const float factor = call_.finish_row(s().geometry, segment().kv_head, at, sum_[half], thread() % 4 == 0);
      const bool is_empty = sum_[half].is_empty();
      const auto value = [&](int i) { return is_empty ? 0.0f : out_[i + 2 * half] * factor; };
      const int64_t offset = call_.out_offset(s().geometry, segment().kv_head, at) + 2 * (thread() % 4);
      if (is_f8) {
        auto* out = reinterpret_cast<Vector<Fp8, 2>*>(static_cast<Fp8*>(call_.p.out.data) + offset);
#pragma unroll
        for (int i = 0; i < kQuads; ++i)
          out[i * 4] = {from_float<Fp8>(value(4 * i)), from_float<Fp8>(value(4 * i + 1))};
      } else {
        auto* out = reinterpret_cast<uint32_t*>(static_cast<T*>(call_.p.out.data) + offset);
#pragma unroll
        for (int i = 0; i < kQuads; ++i) out[i * 4] = narrow_pair<T>(value(4 * i), value(4 * i + 1));
      }
    }
  }

  const SplitCall& call_;
  const WgmmaWalk& walk_;  // in shared memory
  const int group_;
  const int32_t lanes_;
  float out_[kOut];
  RowSum sum_[2];

 private:
  int* is_last_;  // in shared memory
};

}  // namespace polyop::cuda
