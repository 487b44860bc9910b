// split_kv: attention of few query rows over long keys at the speed of memory, in one launch.
// Math      o = softmax(scale q k^T) v in one pass, base 2; parts of a row, one for each chunk of keys, are joined by
//           their maxima in the order of the chunks
// Shapes    q [T, Hq, D] | [B, S, Hq, D] f16, bf16 · k, v paged, packed or padded, q's dtype, f8e4m3 or i8 · out, lse
// Layout    D contiguous; rows of k and v 16-byte aligned with equal strides; page_table [B, W] i32
// Work      item = 16 or 64 rows (query row x head of one kv head) x one chunk of keys; a block walks an equal share of
//           all items, found from the lengths on the device. Two warps copy tiles of 64 keys into a ring of
//           stages; four warps multiply: 16 rows, two warps a tile, or 64 rows, 16 each. The last block of a tile joins
//           its parts (a semaphore, zero again afterwards)
// Memory    global: k and v once for each row tile; parts: rows x (D + 2) x 4 bytes a chunk, written and read once
//           shared: stages x 128 rows of D, padded by 16 bytes, + 16 D x 4 for the joining of the four warps
// Roofline  bandwidth-bound while G S stays under the ridge, about 200 FLOP per byte of k and v on H200: 4 G S / (2
// bytes
//           of dtype) < 200, so up to 100 G S rows in 16 bits; target 92% of a copy once k and v exceed 256 MB
//           (docs/performance.md); 32 query and 8 kv heads of 128: the matrix units are 2% busy
// Numerics  q k^T and p v in the matrix units with f32 sums; p is rounded to 16 bits (f16 for 8-bit caches, whose q is
//           scaled by a power of two into f16's range); a row's bits depend on its own sequence only; keys inside a
//           sequence's length must be finite, also where a tree hides them; no visible key: out 0, lse -inf
// Limits    D = Dv in {64, 80, 96, 128, 192, 256}, no dense mask, softmax; sm_80 or newer
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "polyop/core/kernel_list.h"
#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/attention/cuda/kv_fragments.cuh"
#include "polyop/ops/attention/cuda/split_plan.cuh"

namespace polyop::cuda {

inline constexpr int kConsumerThreads = 32 * kConsumerWarps;
inline constexpr int kProducerWarps = 2;
inline constexpr int kBlockThreads = kConsumerThreads + 32 * kProducerWarps;
inline constexpr int kKeysPerStep = 32;  // of one warp: 64 keys of scores at once would not fit the registers
inline constexpr int kMostStages = 8;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// Where the parts of split rows lie: f32 [slots, D] sums and [slots] pairs (maximum in base 2, denominator).
struct SplitScratch {
  float* parts = nullptr;
  float2* sums = nullptr;
  uint32_t* semaphores = nullptr;
  int64_t narrow_slots = 0;     // slots of sequences of up to 16 rows come first
  int64_t wide_slots_each = 0;  // of one sequence; 0: counted by row
  int32_t most_narrow_chunks = 1;
  int32_t most_wide_chunks = 1;
  bool narrow_by_sequence = false;  // 16 rows for each sequence; false: counted by row

  [[nodiscard]] __device__ int64_t slot(const SequenceItems& s, int32_t group_size, int32_t num_kv_heads, int32_t row,
                                        int32_t kv_head, int32_t chunk) const {
    const int64_t global_row = int64_t{s.geometry.row_begin} * group_size + row;
    if (s.num_rows <= kRowsPerWarp) {
      const int64_t base = narrow_by_sequence ? int64_t{s.geometry.sequence} * kRowsPerWarp + row : global_row;
      return (base * num_kv_heads + kv_head) * most_narrow_chunks + chunk;
    }
    if (wide_slots_each > 0) {
      return narrow_slots + s.geometry.sequence * wide_slots_each +
             (int64_t{row} * num_kv_heads + kv_head) * s.num_chunks + chunk;
    }
    return narrow_slots + (global_row * num_kv_heads + kv_head) * most_wide_chunks + chunk;
  }
};

/// Bytes of shared memory beside the stages, and of one stage.
template <class Kv, int kHeadDim>
struct SplitShared {
  static constexpr int kTileBytes = kKeysPerTile * KvTile<Kv, kHeadDim>::kRowBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;                    // k, then v
  static constexpr int kJoinBytes = kRowsPerWarp * kHeadDim * 4;        // the sums of one warp
  static constexpr int kBarrierBytes = 128;                             // full and empty, 8 bytes for each stage
  static constexpr int kSumsBytes = kConsumerWarps * kRowsPerWarp * 8;  // maximum and denominator of each warp
  static constexpr int kFixedBytes = kBarrierBytes + kSumsBytes + 16 + kJoinBytes;
};

/// Everything that the roles of a block share.
template <class Compute, class Kv, int kHeadDim>
struct SplitBlock {
  using Shared = SplitShared<Kv, kHeadDim>;
  using Tile = KvTile<Kv, kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kOutTiles = kHeadDim / 8;

  const AttentionProblem& p;
  const SplitPlan& plan;
  const AttentionFlags& flags;
  const SplitScratch& scratch;
  char* shared;

  [[nodiscard]] __device__ uint32_t full(int stage) const { return shared_address(shared) + stage * 8; }
  [[nodiscard]] __device__ uint32_t empty(int stage) const { return shared_address(shared) + 64 + stage * 8; }
  [[nodiscard]] __device__ float2* warp_sums() const {
    return reinterpret_cast<float2*>(shared + Shared::kBarrierBytes);
  }
  [[nodiscard]] __device__ int* is_last() const {
    return reinterpret_cast<int*>(shared + Shared::kBarrierBytes + Shared::kSumsBytes);
  }
  [[nodiscard]] __device__ float4* join() const {
    return reinterpret_cast<float4*>(shared + Shared::kBarrierBytes + Shared::kSumsBytes + 16);
  }
  [[nodiscard]] __device__ uint32_t stage_address(int stage) const {
    return shared_address(shared) + Shared::kFixedBytes + stage * Shared::kStageBytes;
  }

  // ---- producers: two warps, half of a tile's rows each -------------------------------------------------------------

  /// Byte offset in k (and v) of the row of `key`; -1: outside the item or on a page outside the pool.
  [[nodiscard]] __device__ int64_t row_bytes(const SequenceItems& s, const SplitItem& item, int32_t key) const {
    if (key < item.key_begin || key >= item.key_end) return -1;
    const int64_t offset = key_offset(p, p.k, s.geometry, key, flags.page_table);
    return offset < 0 ? -1 : (offset + item.kv_head * p.k.head_stride) * static_cast<int64_t>(sizeof(Kv));
  }

  /// Copies 32 rows of k and of v to `tile`; lane i knows the row i. kAllValid: no row is -1.
  template <bool kAllValid>
  __device__ void copy_rows(int64_t row_offset, uint32_t tile) const {
    const int lane = threadIdx.x % 32;
    constexpr int kUnits = Tile::kRowUnits;  // copies of 32 lanes for 32 rows, too
    const char* k = static_cast<const char*>(p.k.data);
    const int64_t v_distance = static_cast<const char*>(p.v.data) - k;
#pragma unroll(kAllValid ? kUnits : 1)
    for (int copy = 0; copy < kUnits; ++copy) {
      const int index = copy * 32 + lane;
      const int row = index / kUnits;
      const int unit = index % kUnits;
      const int64_t bytes = __shfl_sync(0xffffffffu, row_offset, row);
      const bool valid = kAllValid || bytes >= 0;
      const char* from = k + (valid ? bytes : 0) + unit * 16;
      const uint32_t to = tile + row * Tile::kRowBytes + unit * 16;
      copy_async_16(to, from, valid);
      copy_async_16(to + Shared::kTileBytes, from + v_distance, valid);
    }
  }

  __device__ void produce(ItemCursor cursor) const {
    const int lane = threadIdx.x % 32;
    const int first_row = (threadIdx.x / 32 - kConsumerWarps) * 32;  // of the tile
    int stage = 0;
    uint32_t parity = 1;  // the first round finds all stages empty
    for (; !cursor.done(); cursor.advance(p, plan, flags)) {
      const SplitItem& item = cursor.item();
      const int num_stages = item.num_stages();
      for (int i = 0; i < num_stages; ++i) {
        const int64_t offset =
            row_bytes(cursor.sequence(), item, item.tile_begin + i * kKeysPerTile + first_row + lane);
        barrier_wait(empty(stage), parity);
        const uint32_t tile = stage_address(stage) + first_row * Tile::kRowBytes;
        if (__all_sync(0xffffffffu, offset >= 0)) {
          copy_rows<true>(offset, tile);
        } else {
          copy_rows<false>(offset, tile);
        }
        barrier_arrive_after_copies(full(stage));
        if (++stage == plan.num_stages) {
          stage = 0;
          parity ^= 1;
        }
      }
    }
    copy_async_wait_all();
  }

  // ---- consumers: four warps ----------------------------------------------------------------------------------------

  /// The two rows of a lane: lane / 4 and lane / 4 + 8 of its warp's sixteen.
  struct LaneRows {
    int32_t row[2];  // in its sequence, in rows x G
    int32_t query_row[2];
    int32_t begin[2];  // visible keys in the item
    int32_t end[2];
    float scale[2];  // of the scores, to base 2
  };

  struct Sums {
    float out[kOutTiles][4];
    float max[2];
    float denominator[2];
  };

  [[nodiscard]] __device__ int64_t head_of(const SplitItem& item, int32_t row, int32_t query_row) const {
    return int64_t{item.kv_head} * plan.group_size + (row - query_row * plan.group_size);
  }

  __device__ void load_rows(const SequenceItems& s, const SplitItem& item, int32_t first_row, LaneRows* rows,
                            uint32_t (&q)[kSteps][4]) const {
    const int lane = threadIdx.x % 32;
    const float k_scale =
        p.k_scale.data == nullptr ? 1.0f : __ldg(p.k_scale.data + item.kv_head * p.k_scale.head_stride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = first_row + lane / 4 + half * 8;
      const int32_t query_row = row / plan.group_size;
      rows->row[half] = row;
      rows->query_row[half] = query_row;
      rows->begin[half] = rows->end[half] = 0;
      rows->scale[half] = p.scale * k_scale * kLog2E;
      const bool attends = row < s.num_rows && query_row < s.geometry.query_rows;
      if (attends) {
        const KeyRange visible = s.geometry.visible(p, query_row);
        rows->begin[half] = max(visible.begin, item.key_begin);
        rows->end[half] = min(visible.end, item.key_end);
      }
      const int64_t offset = attends ? row_offset(p, p.q, s.geometry, query_row, head_of(item, row, query_row)) : 0;
      const auto* base = static_cast<const uint16_t*>(p.q.data) + offset;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          q[step][half + 2 * part] =
              attends ? *reinterpret_cast<const uint32_t*>(base + Tile::query_channel(step, part)) : 0u;
        }
      }
      if constexpr (kIsByte<Kv>) rows->scale[half] *= scale_into_f16(half, q);
    }
  }

  /// Turns q's 16-bit pairs of one row into f16 pairs scaled by a power of two that brings the largest near 2^14;
  /// returns the inverse. The scaling is exact for all that counts: what falls below f16's least is under 2^-38 of the
  /// largest.
  __device__ float scale_into_f16(int half, uint32_t (&q)[kSteps][4]) const {
    float most = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float2 pair = widen(q[step][half + 2 * part]);
        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const int exponent = min(max(most > 0.0f && most < INFINITY ? ilogbf(most) : 14, -100), 114);
    const float factor = exp2f(static_cast<float>(14 - exponent));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const float2 pair = widen(q[step][half + 2 * part]);
        const __half2 scaled = __floats2half2_rn(pair.x * factor, pair.y * factor);
        q[step][half + 2 * part] = *reinterpret_cast<const uint32_t*>(&scaled);
      }
    }
    return exp2f(static_cast<float>(exponent - 14));
  }

  [[nodiscard]] __device__ float2 widen(uint32_t pair) const {
    if (p.q.dtype == DType::kF16) return __half22float2(*reinterpret_cast<const __half2*>(&pair));
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
  }

  [[nodiscard]] __device__ static uint32_t narrow(float low, float high) {
    if constexpr (std::is_same_v<Compute, __half>) {
      const __half2 pair = __floats2half2_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }

  /// One warp's kKeys keys of a stage, the first of them `key` in the sequence and `tile_key` in the tile.
  template <int kKeys>
  __device__ void attend(const SequenceItems& s, const LaneRows& rows, const uint32_t (&q)[kSteps][4], uint32_t k_tile,
                         int32_t key, int tile_key, Sums* sums) const {
    const int lane = threadIdx.x % 32;
    constexpr int kScoreTiles = kKeys / 8;
    float score[kScoreTiles][4];
#pragma unroll
    for (int keys = 0; keys < kKeys / 16; ++keys) {
#pragma unroll
      for (int i = 0; i < 4; ++i) score[2 * keys][i] = score[2 * keys + 1][i] = 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; step += Tile::kStepsPerLoad) {
        uint32_t b[4 * Tile::kStepsPerLoad];
        Tile::load_k(k_tile, tile_key + 16 * keys, step, b);
#pragma unroll
        for (int inner = 0; inner < Tile::kStepsPerLoad; ++inner) {
          if (step + inner >= kSteps) break;
          multiply_accumulate<Compute>(score[2 * keys], q[step + inner], b[4 * inner], b[4 * inner + 1]);
          multiply_accumulate<Compute>(score[2 * keys + 1], q[step + inner], b[4 * inner + 2], b[4 * inner + 3]);
        }
      }
    }
    const bool has_tree = p.tree_mask.words != nullptr && key + kKeys > s.geometry.kv_length - s.geometry.allotted;
    float larger[2] = {sums->max[0], sums->max[1]};
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2;
        const int32_t at = key + tile * 8 + 2 * (lane % 4) + i % 2;
        bool visible = at >= rows.begin[half] && at < rows.end[half];
        if (has_tree && visible) visible = s.geometry.tree_allows(p, rows.query_row[half], at);
        score[tile][i] = visible ? score[tile][i] * rows.scale[half] : -INFINITY;
        larger[half] = fmaxf(larger[half], score[tile][i]);
      }
    }
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      larger[half] = fmaxf(larger[half], __shfl_xor_sync(0xffffffffu, larger[half], 1));
      larger[half] = fmaxf(larger[half], __shfl_xor_sync(0xffffffffu, larger[half], 2));
      const float reference = larger[half] == -INFINITY ? 0.0f : larger[half];
      shrink[half] = exp2_approximate(sums->max[half] - reference);
      sums->max[half] = larger[half];
      larger[half] = reference;
      sums->denominator[half] *= shrink[half];
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums->out[tile][i] *= shrink[i / 2];
      }
    }
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[tile][i] = exp2_approximate(score[tile][i] - larger[i / 2]);
        sums->denominator[i / 2] += score[tile][i];
      }
    }
    const uint32_t v_tile = k_tile + Shared::kTileBytes;
#pragma unroll
    for (int keys = 0; keys < kKeys / 16; ++keys) {
      const float(&first)[4] = score[2 * keys];
      const float(&second)[4] = score[2 * keys + 1];
      const uint32_t weights[4] = {narrow(first[0], first[1]), narrow(first[2], first[3]), narrow(second[0], second[1]),
                                   narrow(second[2], second[3])};
#pragma unroll
      for (int tile = 0; tile < kOutTiles; tile += Tile::kTilesPerLoad) {
        uint32_t b[2 * Tile::kTilesPerLoad];
        Tile::load_v(v_tile, tile_key + 16 * keys, tile, b);
#pragma unroll
        for (int inner = 0; inner < Tile::kTilesPerLoad; ++inner) {
          if (tile + inner >= kOutTiles) break;
          multiply_accumulate<Compute>(sums->out[tile + inner], weights, b[2 * inner], b[2 * inner + 1]);
        }
      }
    }
  }

  /// The four warps' sums of the same sixteen rows; the result is with warp 0.
  __device__ void join_warps(Sums* sums) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        warp_sums()[warp * kRowsPerWarp + lane / 4 + half * 8] = {sums->max[half], sums->denominator[half]};
      }
    }
    named_barrier_sync<1, kConsumerThreads>();  // maxima of all warps
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 each[kConsumerWarps];
      float largest = -INFINITY;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; ++w) {
        each[w] = warp_sums()[w * kRowsPerWarp + lane / 4 + half * 8];
        largest = fmaxf(largest, each[w].x);
      }
      const float reference = largest == -INFINITY ? 0.0f : largest;
      factor[half] = exp2_approximate(sums->max[half] - reference);
      sums->denominator[half] = 0.0f;
#pragma unroll
      for (int w = 0; w < kConsumerWarps; ++w) {
        sums->denominator[half] += each[w].y * exp2_approximate(each[w].x - reference);
      }
      sums->max[half] = largest;
    }
#pragma unroll
    for (int giver = kConsumerWarps - 1; giver >= 0; --giver) {
      if (warp == giver) {
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
          float4 sum = {sums->out[tile][0] * factor[0], sums->out[tile][1] * factor[0], sums->out[tile][2] * factor[1],
                        sums->out[tile][3] * factor[1]};
          if (giver < kConsumerWarps - 1) {
            const float4 other = join()[tile * 32 + lane];
            sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
          }
          if (giver > 0) {
            join()[tile * 32 + lane] = sum;
          } else {
            sums->out[tile][0] = sum.x;
            sums->out[tile][1] = sum.y;
            sums->out[tile][2] = sum.z;
            sums->out[tile][3] = sum.w;
          }
        }
      }
      if (giver > 0) named_barrier_sync<1, kConsumerThreads>();  // this giver's sums to the next one
    }
  }

  __device__ void store_lse(const SequenceItems& s, int32_t query_row, int64_t head, float value) const {
    if (p.lse.data != nullptr)
      static_cast<float*>(p.lse.data)[row_offset(p, p.lse, s.geometry, query_row, head)] = value;
  }

  /// What a row's output is multiplied by, from its final maximum and denominator; writes lse when `writes_lse`.
  [[nodiscard]] __device__ float finish_row(const SequenceItems& s, int32_t kv_head, int32_t query_row, int64_t head,
                                            float largest, float denominator, bool writes_lse) const {
    if (largest == -INFINITY && denominator == 0.0f) {
      if (writes_lse) store_lse(s, query_row, head, -INFINITY);
      return 0.0f;
    }
    float factor = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = __ldg(p.sinks + head) * kLog2E;
      const float reference = fmaxf(largest, sink);
      factor = exp2_approximate(largest - reference);
      denominator = denominator * factor + exp2_approximate(sink - reference);
      largest = reference;
    }
    if (writes_lse) store_lse(s, query_row, head, (largest + log2f(denominator)) * kLn2);
    const float v_scale = p.v_scale.data == nullptr ? 1.0f : __ldg(p.v_scale.data + kv_head * p.v_scale.head_stride);
    return __fdiv_rn(factor * v_scale, p.output_scale == nullptr ? denominator : denominator * *p.output_scale);
  }

  /// kCount neighbouring channels of out, which is of q's dtype or f8e4m3.
  template <int kCount>
  __device__ void store_out(int64_t offset, const float (&values)[kCount]) const {
    if (p.out.dtype == DType::kF8E4M3) {
      auto* out = static_cast<Fp8*>(p.out.data) + offset;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = from_float<Fp8>(values[i]);
    } else if (p.out.dtype == DType::kF16) {
      auto* out = static_cast<__half*>(p.out.data) + offset;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = from_float<__half>(values[i]);
    } else {
      auto* out = static_cast<__nv_bfloat16*>(p.out.data) + offset;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = from_float<__nv_bfloat16>(values[i]);
    }
  }

  /// The only chunk of its rows: results go straight to out.
  __device__ void store_result(const SequenceItems& s, const SplitItem& item, const LaneRows& rows,
                               const Sums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.row[half] >= s.num_rows) continue;
      const int64_t head = head_of(item, rows.row[half], rows.query_row[half]);
      const float factor = finish_row(s, item.kv_head, rows.query_row[half], head, sums.max[half],
                                      sums.denominator[half], threadIdx.x % 4 == 0);
      const bool empty_row = sums.max[half] == -INFINITY && sums.denominator[half] == 0.0f;
      const int64_t offset = row_offset(p, p.out, s.geometry, rows.query_row[half], head);
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          const float value[1] = {empty_row ? 0.0f : sums.out[tile][2 * half + column] * factor};
          store_out(offset + Tile::output_channel(tile, column), value);
        }
      }
    }
  }

  __device__ void store_part(const SequenceItems& s, const SplitItem& item, const LaneRows& rows,
                             const Sums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (rows.row[half] >= s.num_rows) continue;
      const int64_t slot = scratch.slot(s, plan.group_size, static_cast<int32_t>(p.num_kv_heads), rows.row[half],
                                        item.kv_head, item.chunk);
      if (threadIdx.x % 4 == 0) scratch.sums[slot] = {sums.max[half], sums.denominator[half]};
      float* part = scratch.parts + slot * kHeadDim;
#pragma unroll
      for (int tile = 0; tile < kOutTiles; ++tile) {
        if constexpr (kIsByte<Kv>) {
          if (tile % 2 == 0) {  // four neighbouring channels of two tiles
            *reinterpret_cast<float4*>(part + Tile::output_channel(tile, 0)) = {
                sums.out[tile][2 * half], sums.out[tile + 1][2 * half], sums.out[tile][2 * half + 1],
                sums.out[tile + 1][2 * half + 1]};
          }
        } else {
          *reinterpret_cast<float2*>(part + Tile::output_channel(tile, 0)) = {sums.out[tile][2 * half],
                                                                              sums.out[tile][2 * half + 1]};
        }
      }
    }
  }

  /// Joins the chunks of the tile's rows first, first + step ... in their order; one warp a row.
  __device__ void join_chunks(const SequenceItems& s, const SplitItem& item, int first_row, int step_rows) const {
    const int lane = threadIdx.x % 32;
    const int num_kv_heads = static_cast<int>(p.num_kv_heads);
    constexpr int kGroups = (kHeadDim / 4 + 31) / 32;  // of four channels a lane
    const int32_t end = min(item.row_begin + s.tile_rows, s.num_rows);
    for (int32_t row = item.row_begin + first_row; row < end; row += step_rows) {
      const int64_t slot = scratch.slot(s, plan.group_size, num_kv_heads, row, item.kv_head, 0);
      float largest = -INFINITY;
      for (int chunk = lane; chunk < s.num_chunks; chunk += 32)
        largest = fmaxf(largest, __ldcg(scratch.sums + slot + chunk).x);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
      const float reference = largest == -INFINITY ? 0.0f : largest;
      float denominator = 0.0f;
      float4 sum[kGroups] = {};
      for (int first = 0; first < s.num_chunks; first += 32) {
        float weight = 0.0f;
        if (first + lane < s.num_chunks) {
          const float2 part = __ldcg(scratch.sums + slot + first + lane);
          weight = exp2_approximate(part.x - reference);
          denominator += weight * part.y;
        }
        const int count = min(32, s.num_chunks - first);
#pragma unroll 4
        for (int chunk = 0; chunk < count; ++chunk) {
          const float factor = __shfl_sync(0xffffffffu, weight, chunk);
          const auto* part = reinterpret_cast<const float4*>(scratch.parts + (slot + first + chunk) * kHeadDim);
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            if (group * 32 + lane >= kHeadDim / 4) break;
            const float4 value = __ldcg(part + group * 32 + lane);
            sum[group].x = fmaf(factor, value.x, sum[group].x);
            sum[group].y = fmaf(factor, value.y, sum[group].y);
            sum[group].z = fmaf(factor, value.z, sum[group].z);
            sum[group].w = fmaf(factor, value.w, sum[group].w);
          }
        }
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) denominator += __shfl_xor_sync(0xffffffffu, denominator, step);
      const int32_t query_row = row / plan.group_size;
      const int64_t head = head_of(item, row, query_row);
      const bool empty_row = largest == -INFINITY && denominator == 0.0f;
      const float factor = finish_row(s, item.kv_head, query_row, head, largest, denominator, lane == 0);
      const int64_t offset = row_offset(p, p.out, s.geometry, query_row, head);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int channel = (group * 32 + lane) * 4;
        if (channel >= kHeadDim) break;
        const float values[4] = {sum[group].x * factor, sum[group].y * factor, sum[group].z * factor,
                                 sum[group].w * factor};
        const float zeros[4] = {};
        store_out(offset + channel, empty_row ? zeros : values);
      }
    }
  }

  /// Place in the ring of stages.
  struct Ring {
    int stage = 0;
    uint32_t parity = 0;
  };

  /// Counts a chunk whose parts the calling thread has seen written; true for the last one of the tile and head.
  [[nodiscard]] __device__ bool count_chunk(const SequenceItems& s, const SplitItem& item) const {
    __threadfence();  // parts to whoever counts last
    const int64_t tile = s.geometry.sequence + (int64_t{s.geometry.row_begin} * plan.group_size) / kRowsPerWarp +
                         item.row_begin / kRowsPerWarp;
    uint32_t* semaphore = scratch.semaphores + tile * p.num_kv_heads + item.kv_head;
    const bool last = fetch_increment(semaphore) == static_cast<uint32_t>(s.num_chunks - 1);
    if (last) *semaphore = 0;  // for the next launch
    return last;
  }

  /// is_final: the block's last item, so that all its warps are free to join chunks.
  template <bool kWide>
  __device__ void run_item(const SequenceItems& s, const SplitItem& item, bool is_final, Ring* ring) const {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    LaneRows rows;
    uint32_t q[kSteps][4];
    load_rows(s, item, item.row_begin + (kWide ? warp * kRowsPerWarp : 0), &rows, q);
    Sums sums;
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.out[tile][i] = 0.0f;
    }
    sums.max[0] = sums.max[1] = -INFINITY;
    sums.denominator[0] = sums.denominator[1] = 0.0f;
    const int num_stages = item.num_stages();
    // Narrow: warps 0 and 1 take the halves of every even stage of the item, 2 and 3 those of every odd one.
    for (int i = 0; i < num_stages; ++i) {
      barrier_wait(full(ring->stage), ring->parity);  // also for who skips it: nobody may run a round ahead
      if (kWide || i % 2 == warp / 2) {
#pragma unroll 1
        for (int part = kWide ? 0 : warp % 2; part < (kWide ? 2 : warp % 2 + 1); ++part) {
          const int first = part * kKeysPerStep;
          attend<kKeysPerStep>(s, rows, q, stage_address(ring->stage), item.tile_begin + i * kKeysPerTile + first,
                               first, &sums);
        }
        __syncwarp();  // all lanes have read the stage
      }
      if (lane == 0) barrier_arrive(empty(ring->stage));
      if (++ring->stage == plan.num_stages) {
        ring->stage = 0;
        ring->parity ^= 1;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums.denominator[half] += __shfl_xor_sync(0xffffffffu, sums.denominator[half], 1);
      sums.denominator[half] += __shfl_xor_sync(0xffffffffu, sums.denominator[half], 2);
    }
    if constexpr (!kWide) join_warps(&sums);
    const bool writes = kWide || warp == 0;
    if (s.num_chunks == 1) {
      if (writes) store_result(s, item, rows, sums);
      return;
    }
    if (writes) store_part(s, item, rows, sums);
    bool last = false;
    if (kWide || is_final) {
      named_barrier_sync<1, kConsumerThreads>();  // parts of all warps to thread 0
      if (threadIdx.x == 0) *is_last() = count_chunk(s, item) ? 1 : 0;
      named_barrier_sync<1, kConsumerThreads>();  // is_last to all
      last = *is_last() != 0;
    } else if (warp == 0) {  // the other warps are on their way to the next item
      __syncwarp();          // parts of all lanes to lane 0
      last = __shfl_sync(0xffffffffu, lane == 0 && count_chunk(s, item) ? 1 : 0, 0) != 0;
    }
    if (last) join_chunks(s, item, kWide || is_final ? warp : 0, kWide || is_final ? kConsumerWarps : 1);
  }

  __device__ void consume(ItemCursor cursor) const {
    Ring ring;
    for (; !cursor.done(); cursor.advance(p, plan, flags)) {
      if (cursor.sequence().num_rows <= kRowsPerWarp || plan.rows_per_tile == kRowsPerWarp) {
        run_item<false>(cursor.sequence(), cursor.item(), cursor.is_final(), &ring);
      } else if constexpr (kHeadDim <= 192) {
        run_item<true>(cursor.sequence(), cursor.item(), cursor.is_final(), &ring);
      }
    }
  }

  /// Packed rows behind the last sequence: 0 and -inf.
  __device__ void clear_rows_of_nobody() const {
    if (p.query_form != AttentionQueryForm::kPacked) return;
    const int64_t owned = min(max(int64_t{__ldg(p.query_offsets + p.num_sequences)}, int64_t{0}), p.num_query_rows);
    const int64_t count = (p.num_query_rows - owned) * p.num_query_heads;
    for (int64_t i = int64_t{blockIdx.x} * kConsumerWarps + threadIdx.x / 32; i < count;
         i += int64_t{gridDim.x} * kConsumerWarps) {
      const int64_t row = owned + i / p.num_query_heads;
      const int64_t head = i % p.num_query_heads;
      const int64_t offset = row * p.out.row_stride + head * p.out.head_stride;
      const float zero[1] = {};
      for (int channel = threadIdx.x % 32; channel < kHeadDim; channel += 32) store_out(offset + channel, zero);
      if (threadIdx.x % 32 == 0 && p.lse.data != nullptr) {
        static_cast<float*>(p.lse.data)[row * p.lse.row_stride + head * p.lse.head_stride] = -INFINITY;
      }
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Compute, class Kv, int kHeadDim>
__global__ void __launch_bounds__(kBlockThreads, kHeadDim <= 128 ? 2 : 1)
    split_kv_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ SplitPlan plan,
                    const __grid_constant__ AttentionFlags flags, const __grid_constant__ SplitScratch scratch) {
  extern __shared__ __align__(128) char shared[];
  const SplitBlock<Compute, Kv, kHeadDim> block{p, plan, flags, scratch, shared};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < plan.num_stages; ++stage) {
      barrier_init(block.full(stage), 32 * kProducerWarps);
      barrier_init(block.empty(stage), kConsumerWarps);
    }
  }
  __syncthreads();  // barriers to all
  const BlockShare share = find_share(p, plan, flags);
  const ItemCursor cursor(p, plan, flags, share.sequence, share.local, share.count);
  if (threadIdx.x >= kConsumerThreads) {
    block.produce(cursor);
  } else {
    block.consume(cursor);
    block.clear_rows_of_nobody();
  }
}

/// Launches the kernel of one type and head size with at most `blocks` blocks; plan.num_stages is chosen here.
template <class Compute, class Kv, int kHeadDim>
Status launch_split_kv(const AttentionProblem& p, SplitPlan plan, const SplitScratch& scratch, int64_t blocks,
                       Stream stream);

}  // namespace polyop::cuda
