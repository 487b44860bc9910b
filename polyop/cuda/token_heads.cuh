// The heads of one token, taken by a warp in passes: what rotary embedding, norm and append have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "polyop/cuda/ptx.cuh"
#include "polyop/cuda/rotate.cuh"
#include "polyop/cuda/vectors.cuh"

namespace polyop::cuda {

/// Rows [D] of heads: that of (outer, inner, head) begins at data + outer * outer_stride + inner * inner_stride +
/// head * head_stride, in bytes. Tokens are (token, 0), rows of a cache (page, row).
struct HeadArray {
  char* data = nullptr;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;
  int64_t head_stride = 0;

  /// None of the three is negative.
  __device__ char* row(uint32_t outer, uint32_t inner, uint32_t head) const {
    return data + outer * outer_stride + inner * inner_stride + head * head_stride;
  }
};

/// The heads of a token by kind (queries, keys, values). In a pass each group of 2^log2_lanes lanes takes one head, all
/// of one kind, so that the lanes of a warp never part; `pieces` warps share the passes of a token.
template <int kKinds>
struct TokenHeads {
  HeadArray from[kKinds];
  HeadArray to[kKinds];
  int32_t num_heads[kKinds] = {};
  int32_t num_passes[kKinds] = {};
  int32_t log2_lanes = 0;
  int32_t passes_per_piece = 1;
  int32_t pieces = 1;

  /// Cuts the heads for lanes of 32 bytes and for `num_tokens` tokens: as few pieces as give the device enough warps.
  void cut(int64_t head_bytes, int64_t num_tokens, int64_t wanted_warps) {
    while ((int64_t{32} << log2_lanes) < head_bytes) ++log2_lanes;
    const int32_t heads_per_pass = 32 >> log2_lanes;
    int32_t passes = 0;
    for (int i = 0; i < kKinds; ++i) {
      num_passes[i] = (num_heads[i] + heads_per_pass - 1) / heads_per_pass;
      passes += num_passes[i];
    }
    constexpr int32_t kMostPieces = 65535;  // a grid's second extent
    const int32_t least = std::max(1, (passes + kMostPieces - 1) / kMostPieces);
    passes_per_piece =
        static_cast<int32_t>(std::clamp<int64_t>(num_tokens * passes / wanted_warps, least, std::max(least, passes)));
    pieces = (passes + passes_per_piece - 1) / passes_per_piece;
    passes_per_piece = (passes + pieces - 1) / pieces;  // as equal as they can be
  }
};

/// A lane's way through the passes: row_of(kind, head) gives an address for the first head it meets of each kind, the
/// others of that kind lie head_stride apart.
template <int kKinds, class RowOf>
class HeadCursor {
 public:
  /// Stands before pass `pass`; `arrays` are those that row_of reads or writes.
  __device__ HeadCursor(const TokenHeads<kKinds>& heads, const HeadArray* arrays, int32_t pass, const RowOf& row_of)
      : heads_(heads), arrays_(arrays), row_of_(row_of), skipped_(pass) {}

  /// Goes to the next pass; there has to be one.
  __device__ void next() { ends_kind() ? enter_kind() : step(); }

  /// No further pass of its kind; true at first.
  [[nodiscard]] __device__ bool ends_kind() const { return passes_left_ == 0; }
  /// Goes on with the same kind.
  __device__ void step() {
    heads_left_ -= 32 >> heads_.log2_lanes;
    row_ += stride_;
    --passes_left_;
  }

  /// Goes to the first pass of the next kind, at first to that which it stands before.
  __device__ void enter_kind() {
    ++kind_;
    while (skipped_ >= heads_.num_passes[kind_]) skipped_ -= heads_.num_passes[kind_++];
    const int32_t lane = threadIdx.x % 32;
    const int32_t head = (skipped_ << (5 - heads_.log2_lanes)) + (lane >> heads_.log2_lanes);
    passes_left_ = heads_.num_passes[kind_] - skipped_ - 1;
    heads_left_ = heads_.num_heads[kind_] - head;
    stride_ = arrays_[kind_].head_stride << (5 - heads_.log2_lanes);
    row_ = row_of_(kind_, head);
    skipped_ = 0;
  }

  /// False for a lane without a head in this pass.
  [[nodiscard]] __device__ bool is_valid() const { return heads_left_ > 0; }
  [[nodiscard]] __device__ int32_t kind() const { return kind_; }
  /// Among its kind; of a valid pass.
  [[nodiscard]] __device__ int32_t head() const { return heads_.num_heads[kind_] - heads_left_; }
  [[nodiscard]] __device__ char* row() const { return row_; }

 private:
  const TokenHeads<kKinds>& heads_;
  const HeadArray* arrays_;
  const RowOf& row_of_;
  int32_t skipped_;
  int32_t kind_ = -1;
  int32_t passes_left_ = 0;  // of its kind, behind this one
  int32_t heads_left_ = 0;   // of its kind from the lane's own one on
  int64_t stride_ = 0;
  char* row_ = nullptr;
};

/// One lane's channels of one head, 16 bytes from `low` on and 16 from `high` on.
struct HeadWords {
  uint4 low = {};
  uint4 high = {};
};

/// Heads on their way from memory, kStages passes of one warp: they wait in shared memory instead of in registers, each
/// lane's own words, so that lanes never wait for each other.
template <class T, int kStages>
class HeadStages {
 public:
  /// `slots`: kStages * 64 of the warp, shared memory.
  __device__ explicit HeadStages(uint4* slots) : mine_(slots + threadIdx.x % 32) {}

  /// Starts the copy of a lane's channels of the head at `row` when `valid`. To be called kStages times, and then once
  /// behind each take().
  __device__ void fetch(const char* row, const LaneChannels& at, bool valid) {
    if (valid) {
      const T* head = reinterpret_cast<const T*>(row);
      copy_async_16(shared_address(mine_ + stage_), head + at.low, true);
      copy_async_16(shared_address(mine_ + stage_ + 32), head + at.high, true);
    }
    copy_async_commit();
    stage_ = stage_ == (kStages - 1) * 64 ? 0 : stage_ + 64;
  }

  /// The words of the oldest fetch; of no meaning when that was not valid.
  __device__ HeadWords take() {
    copy_async_wait<kStages - 1>();
    return {mine_[stage_], mine_[stage_ + 32]};
  }

 private:
  uint4* mine_;
  int32_t stage_ = 0;  // the oldest
};

template <class T>
__device__ void store_head(char* row, const LaneChannels& at, const HeadWords& words) {
  T* head = reinterpret_cast<T*>(row);
  *reinterpret_cast<uint4*>(head + at.low) = words.low;
  *reinterpret_cast<uint4*>(head + at.high) = words.high;
}

}  // namespace polyop::cuda
