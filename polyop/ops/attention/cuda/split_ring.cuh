// The way of keys and values into shared memory: every warp copies its own tiles of sixteen keys into its own ring of
// stages, several rounds ahead and across the ends of segments, and waits for nobody.
#pragma once

#include <algorithm>
#include <cstdint>

#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/attention/cuda/kv_tile.cuh"
#include "polyop/ops/attention/cuda/split_parts.cuh"

namespace polyop::cuda {

/// Where a warp stands in its ring and in the queue.
struct RingState {
  int32_t segment = 0;      // in the queue: the one that is copied
  int32_t rounds_left = 0;  // of it
  int32_t key_begin = 0;    // its first key
  int32_t key_end = 0;
  int32_t key = 0;                 // of the lane; of single tiles lanes 16-31 have those of the round behind
  int32_t page = 0;                // of that key
  int first_lane = 0;              // of single tiles: of the lanes that have the next round
  const char* k = nullptr;         // of its kv head: row 0, or row 0 of page 0
  const int32_t* table = nullptr;  // pages of its sequence
  int write_stage = 0;
  int read_stage = 0;
  bool is_empty = true;
  bool is_done = false;  // nothing is left to copy
};

/// The ring of one warp as its lanes see it. A round of a segment is kTiles tiles for each warp; rounds are copied
/// in the order in which they are multiplied. Every round is one group of asynchronous copies, also when nothing is
/// left to copy.
template <class Kv, int kHeadDim>
class SplitRing {
 public:
  using Tile = KvTile<Kv, kHeadDim>;
  /// Tiles of a warp in a round: small ones come in pairs, so that what a round costs beside its products is shared.
  static constexpr int kTiles = Tile::kPairBytes <= 4096 ? 2 : 1;
  static constexpr int kKeysPerRound = kWarps * kTiles * kKeysPerTile;
  static constexpr int kStageBytes = kTiles * Tile::kPairBytes;  // of one warp
  /// Rounds on their way, 64 KB of a block. More bring no more bandwidth, and every other access waits behind them.
  static constexpr int kNumStages = std::clamp((64 * 1024 + kWarps * kStageBytes / 2) / (kWarps * kStageBytes), 2, 8);

  /// `stages` is the shared address of stage 0 of warp 0; a stage of the block is the stages of its warps side by side.
  __device__ SplitRing(const SplitCall& call, uint32_t stages, const WorkQueue& queue)
      : p_(call.p), plan_(call.plan), flags_(call.flags), queue_(queue), stages_(stages) {}

  /// Begins with segment 0.
  __device__ void start() { open_segment(); }

  [[nodiscard]] __device__ const RingState& state() const { return at_; }
  __device__ void resume(const RingState& state) { at_ = state; }

  /// Fills the ring, if it is empty.
  __device__ void fill() {
    if (!at_.is_empty) return;
    at_.is_empty = false;
#pragma unroll 1
    for (int stage = 0; stage < kNumStages; ++stage) copy_next();
  }

  /// Address of the k tile of number `index` in the stage that is multiplied next, kTiles for each warp; its v tile is
  /// Tile::kBytes behind.
  [[nodiscard]] __device__ uint32_t tile(int index) const {
    return stages_ + at_.read_stage * (kWarps * kStageBytes) + index * Tile::kPairBytes;
  }

  /// Returns when this thread's copies of the next round have arrived.
  __device__ void wait() const { copy_async_wait<kNumStages - 1>(); }

  /// To the next round: the stage just multiplied takes the next one that is not yet on its way.
  __device__ void advance() {
    at_.read_stage = next_stage(at_.read_stage);
    copy_next();
  }

 private:
  static constexpr int kKnownKeys = kTiles == 1 ? 2 * kKeysPerRound : kKeysPerRound;  // of the block, by its lanes

  __device__ void copy_next() {
    if (!at_.is_done) {
      bool valid = at_.key >= at_.key_begin && at_.key < at_.key_end;
      const int64_t offset = row_offset_bytes(&valid);
      const uint32_t tile = stages_ + (at_.write_stage * kWarps + threadIdx.x / 32) * kStageBytes;
      const uint32_t invalid = __ballot_sync(0xffffffffu, !valid);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int first_lane = kTiles == 1 ? at_.first_lane : t * kKeysPerTile;
        if ((invalid >> first_lane & 0xffffu) != 0) {
          copy_rows<false>(valid ? offset : -1, first_lane, tile + t * Tile::kPairBytes);
        } else if (plan_.tiles_are_dense) {
          copy_tile(__shfl_sync(0xffffffffu, offset, first_lane), tile + t * Tile::kPairBytes);
        } else {
          copy_rows<true>(offset, first_lane, tile + t * Tile::kPairBytes);
        }
      }
      if (--at_.rounds_left == 0) {
        at_.is_done = queue_.at(at_.segment).segment.is_final;
        ++at_.segment;
        if (!at_.is_done) open_segment();
      } else if (kTiles == 1 && at_.first_lane == 0) {
        at_.first_lane = kKeysPerTile;
      } else {
        at_.first_lane = 0;
        at_.key += kKnownKeys;
        find_page();
      }
    }
    copy_async_commit();
    at_.write_stage = next_stage(at_.write_stage);
  }

  [[nodiscard]] __device__ int next_stage(int stage) const { return stage + 1 == kNumStages ? 0 : stage + 1; }

  __device__ void open_segment() {
    const SplitWork& work = queue_.at(at_.segment);
    const SequenceGeometry& g = work.sequence.geometry;
    at_.rounds_left = work.segment.num_rounds;
    at_.key_begin = work.segment.key_begin;
    at_.key_end = work.segment.key_end;
    at_.first_lane = 0;
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const auto warp = static_cast<int32_t>(threadIdx.x / 32);
    const int32_t in_round = kTiles == 1
                                 ? warp * kKeysPerTile + lane % kKeysPerTile + lane / kKeysPerTile * kKeysPerRound
                                 : warp * 32 + lane;
    at_.key = work.segment.tile_begin + in_round;
    int64_t elems = work.segment.kv_head * p_.k.head_stride;
    if (p_.kv_form == AttentionKvForm::kPadded) elems += g.sequence * p_.k.outer_stride;
    if (p_.kv_form == AttentionKvForm::kPacked) elems += g.kv_begin * p_.k.row_stride;
    at_.k = static_cast<const char*>(p_.k.data) + elems * static_cast<int64_t>(sizeof(Kv));
    at_.table = p_.page_table + g.sequence * p_.page_table_stride;
    find_page();
  }

  /// Looks up the page of the lane's key, which is used when its round is copied.
  __device__ void find_page() {
    if (plan_.page_size == 0) return;
    const auto key = static_cast<uint32_t>(at_.key);
    const uint32_t column = plan_.page_shift >= 0 ? key >> plan_.page_shift : key / plan_.page_size;
    at_.page = load_if(at_.key >= at_.key_begin && at_.key < at_.key_end, at_.table + column, at_.page);
  }

  /// Bytes from at_.k to the row of the lane's key; a page outside the pool is flagged and not valid.
  [[nodiscard]] __device__ int64_t row_offset_bytes(bool* valid) const {
    const auto key = static_cast<uint32_t>(at_.key);
    if (plan_.page_size == 0) return key * plan_.row_bytes;
    if (*valid && static_cast<uint32_t>(at_.page) >= plan_.num_pages) {
      raise_flag(flags_.page_table);
      *valid = false;
    }
    const uint32_t row = plan_.page_shift >= 0 ? key & ((1u << plan_.page_shift) - 1) : key % plan_.page_size;
    return static_cast<uint32_t>(at_.page) * plan_.page_bytes + row * plan_.row_bytes;
  }

  /// Copies sixteen rows of k and of v that lie at equal distances, the first one at at_.k + offset.
  __device__ void copy_tile(int64_t offset, uint32_t tile) const {
    const int lane = threadIdx.x % 32;
    const int64_t v_distance = static_cast<const char*>(p_.v.data) - static_cast<const char*>(p_.k.data);
    if constexpr (Tile::kRowUnits <= 32 && 32 % Tile::kRowUnits == 0 && Tile::kFactor > 1) {
      constexpr int kRowsPerStep = 32 / Tile::kRowUnits;
      const int row = lane / Tile::kRowUnits;
      const char* k = at_.k + offset + row * plan_.row_bytes + lane % Tile::kRowUnits * 16;
      const char* v = k + v_distance;
      const int64_t step = kRowsPerStep * plan_.row_bytes;
#pragma unroll
      for (int first = 0; first < kKeysPerTile; first += kRowsPerStep) {
        const uint32_t to = tile + Tile::unit_offset(first + row, lane % Tile::kRowUnits);
        copy_async_16(to, k, true);
        copy_async_16(to + Tile::kBytes, v, true);
        k += step;
        v += step;
      }
    } else {
      constexpr int kUnits = kKeysPerTile * Tile::kRowUnits;
#pragma unroll
      for (int first = 0; first < kUnits; first += 32) {
        const int index = first + lane;
        if (kUnits % 32 != 0 && index >= kUnits) break;
        const int row = index / Tile::kRowUnits;
        const int unit = index % Tile::kRowUnits;
        const char* k = at_.k + offset + row * plan_.row_bytes + unit * 16;
        const uint32_t to = tile + Tile::unit_offset(row, unit);
        copy_async_16(to, k, true);
        copy_async_16(to + Tile::kBytes, k + v_distance, true);
      }
    }
  }

  /// Copies sixteen rows of k and of v anywhere; lane first_lane + i knows row i. kAllValid: no row is -1. Rows that
  /// are are zeros.
  template <bool kAllValid>
  __device__ void copy_rows(int64_t row_offset, int first_lane, uint32_t tile) const {
    const int lane = threadIdx.x % 32;
    constexpr int kUnits = kKeysPerTile * Tile::kRowUnits;
    const int64_t v_distance = static_cast<const char*>(p_.v.data) - static_cast<const char*>(p_.k.data);
#pragma unroll(kAllValid ? 32 : 1)
    for (int first = 0; first < kUnits; first += 32) {
      const int index = first + lane;
      const int row = index / Tile::kRowUnits;
      const int unit = index % Tile::kRowUnits;
      const int64_t bytes = __shfl_sync(0xffffffffu, row_offset, first_lane + row % kKeysPerTile);
      if (kUnits % 32 != 0 && index >= kUnits) break;
      const bool valid = kAllValid || bytes >= 0;
      const char* k = at_.k + (valid ? bytes : 0) + unit * 16;
      const uint32_t to = tile + Tile::unit_offset(row, unit);
      copy_async_16(to, k, valid);
      copy_async_16(to + Tile::kBytes, k + v_distance, valid);
    }
  }

  const AttentionProblem& p_;
  const SplitPlan& plan_;
  const AttentionFlags& flags_;
  const WorkQueue& queue_;
  uint32_t stages_;
  RingState at_;
};

}  // namespace polyop::cuda
