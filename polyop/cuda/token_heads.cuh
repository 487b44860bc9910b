// The heads of one token, taken by a warp in passes: what rotary embedding, norm and append have in common.
#pragma once

#include <algorithm>
#include <cstdint>

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

  __device__ char* row(int64_t outer, int64_t inner, int32_t head) const {
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
  }
};

/// A lane's way through the passes: row_of(kind, head) gives an address for the first head it meets of each kind, the
/// others of that kind lie head_stride apart.
template <int kKinds, class RowOf>
class HeadCursor {
 public:
  /// Stands at pass `pass`; `arrays` are those that row_of reads or writes.
  __device__ HeadCursor(const TokenHeads<kKinds>& heads, const HeadArray* arrays, int32_t pass, const RowOf& row_of)
      : heads_(heads), arrays_(arrays), row_of_(row_of) {
    enter(0, pass);
  }

  __device__ void next() {
    heads_left_ -= 32 >> heads_.log2_lanes;
    row_ += stride_;
    if (--passes_left_ == 0) enter(kind_ + 1, 0);
  }

  [[nodiscard]] __device__ bool is_valid() const { return heads_left_ > 0; }
  [[nodiscard]] __device__ int32_t kind() const { return kind_; }
  /// Among its kind; of a valid pass.
  [[nodiscard]] __device__ int32_t head() const { return heads_.num_heads[kind_] - heads_left_; }
  [[nodiscard]] __device__ char* row() const { return row_; }

 private:
  /// Goes to pass `pass` counted from the first of `kind`.
  __device__ void enter(int32_t kind, int32_t pass) {
    while (kind < kKinds && pass >= heads_.num_passes[kind]) pass -= heads_.num_passes[kind++];
    kind_ = kind;
    heads_left_ = 0;
    if (kind >= kKinds) return;
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t head = (pass << (5 - heads_.log2_lanes)) + (lane >> heads_.log2_lanes);
    passes_left_ = heads_.num_passes[kind] - pass;
    heads_left_ = heads_.num_heads[kind] - head;
    stride_ = arrays_[kind].head_stride << (5 - heads_.log2_lanes);
    row_ = row_of_(kind, head);
  }

  const TokenHeads<kKinds>& heads_;
  const HeadArray* arrays_;
  const RowOf& row_of_;
  int32_t kind_ = 0;
  int32_t passes_left_ = 0;  // of its kind, this one counted
  int32_t heads_left_ = 0;   // of its kind from the lane's own one on
  int64_t stride_ = 0;
  char* row_ = nullptr;
};

/// One lane's channels of one head, 16 bytes from `low` on and 16 from `high` on.
struct HeadWords {
  uint4 low = {};
  uint4 high = {};
};

template <class T>
__device__ HeadWords load_head(const char* row, const LaneChannels& at) {
  const T* head = reinterpret_cast<const T*>(row);
  return {load_words<16>(head + at.low), load_words<16>(head + at.high)};
}

template <class T>
__device__ void store_head(char* row, const LaneChannels& at, const HeadWords& words) {
  T* head = reinterpret_cast<T*>(row);
  *reinterpret_cast<uint4*>(head + at.low) = words.low;
  *reinterpret_cast<uint4*>(head + at.high) = words.high;
}

}  // namespace polyop::cuda
