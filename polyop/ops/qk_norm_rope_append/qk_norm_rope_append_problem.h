// QkNormRopeAppendProblem: one bound call of qk_norm_rope_append; the only thing its kernels receive.
#pragma once

#include <cstdint>

#include "polyop/core/dtype.h"
#include "polyop/core/kernel_list.h"
#include "polyop/core/kv_cache_append.h"
#include "polyop/core/rotary_table.h"

namespace polyop {

/// RMS norm of each head of q or of k. Without a weight there is none.
struct HeadNorm {
  const void* weight = nullptr;  // [D], dense
  DType weight_dtype = DType::kF32;
};

struct QkNormRopeAppendProblem {
  // k and v and where they go: planes[0].update holds the keys before norm and rotation. Always packed, two planes.
  KvCacheAppend append;
  RotaryTable rotary;  // without position_ids the cache position of a token is its position
  const void* q = nullptr;
  void* q_out = nullptr;  // may be q
  int64_t num_query_heads = 0;
  int64_t q_token_stride = 0;  // elements
  int64_t q_head_stride = 0;
  int64_t q_out_token_stride = 0;
  int64_t q_out_head_stride = 0;
  HeadNorm q_norm;
  HeadNorm k_norm;
  float epsilon = 0.0f;

  [[nodiscard]] DType dtype() const { return append.update_dtype; }  // of q, q_out, k and v
  [[nodiscard]] constexpr bool has_norm() const { return q_norm.weight != nullptr; }
  /// Row of cos_sin for a token of the batch that stands at `cache_position` of its sequence; kNoSlot: leave it out.
  [[nodiscard]] constexpr int64_t position(int64_t token, int64_t cache_position) const {
    return rotary.position_ids == nullptr ? cache_position : rotary.position_id(token);
  }
  static constexpr int64_t kNoSlot = -1;
};

/// Element by element in double; the specification in code.
Status qk_norm_rope_append_reference(const QkNormRopeAppendProblem& problem, Workspace workspace, Stream stream);

namespace cpu {

/// Vector code for the processor at hand, threads over tokens: a token's heads are read once and written once.
Status qk_norm_rope_append_tokens(const QkNormRopeAppendProblem& problem, Workspace workspace, Stream stream);

}  // namespace cpu

namespace cuda {

/// One launch, a warp for a token's share of heads, 16-byte accesses; takes every call. Tokens with a position outside
/// cos_sin are left out and flagged; rows outside the cache are not stored and flagged.
Status qk_norm_rope_append_heads(const QkNormRopeAppendProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda

}  // namespace polyop
