// The heads of one token: where the token stands, where a head's channels come from and go to, and its norm.
#pragma once

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/kv_cache_rows.cuh"
#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop::cuda {

struct Flags {
  CacheFlags cache;
  ErrorFlag position_ids = nullptr;
};

// ---- where a token stands -------------------------------------------------------------------------------------------

/// What the heads of one token need beside their data.
struct TokenPlace {
  TokenOwner owner;
  int64_t position = 0;  // row of cos_sin, in range
  bool has_slot = false;
};

/// The search for a token's place, whose first reads are on their way once it is made. All 32 lanes of a warp make it
/// with the same token and ask for the place.
class TokenSearch {
 public:
  __device__ TokenSearch(const QkNormRopeAppendProblem& p, int64_t token)
      : p_(p), owner_(p.append, token), position_id_(p.position(token, 0)) {}

  __device__ TokenPlace place(const Flags& flags) {
    TokenPlace place = {.owner = owner_.owner()};
    if (place.owner.sequence < 0) return place;
    const bool given = p_.rotary.position_ids != nullptr;
    place.position = given ? position_id_ : int64_t{place.owner.start} + place.owner.index;
    if (static_cast<uint64_t>(place.position) < static_cast<uint64_t>(p_.rotary.num_positions)) {
      place.has_slot = true;
    } else if (!given || place.position != QkNormRopeAppendProblem::kNoSlot) {
      raise_flag(given ? flags.position_ids : flags.cache.positions);
    }
    return place;
  }

 private:
  const QkNormRopeAppendProblem& p_;
  OwnerSearch owner_;
  int64_t position_id_;
};

enum class HeadKind : int { kQuery, kKey, kValue };

/// One of the Hq + 2 Hkv heads of a token.
struct Head {
  HeadKind kind = HeadKind::kQuery;
  int32_t index = 0;  // among its kind
};

__device__ inline Head head_of(const QkNormRopeAppendProblem& p, int32_t head) {
  const auto num_query_heads = static_cast<int32_t>(p.num_query_heads);
  const auto num_kv_heads = static_cast<int32_t>(p.append.num_kv_heads);
  if (head < num_query_heads) return {HeadKind::kQuery, head};
  head -= num_query_heads;
  if (head < num_kv_heads) return {HeadKind::kKey, head};
  return {HeadKind::kValue, head - num_kv_heads};
}

template <class T>
__device__ const T* input_of(const QkNormRopeAppendProblem& p, int64_t token, const Head& head) {
  if (head.kind == HeadKind::kQuery) {
    return static_cast<const T*>(p.q) + token * p.q_token_stride + head.index * p.q_head_stride;
  }
  const KvCachePlane& plane = p.append.planes[head.kind == HeadKind::kKey ? 0 : 1];
  return static_cast<const T*>(plane.update) + token * plane.update_token_stride +
         head.index * plane.update_head_stride;
}

/// Where the result of a head goes: q_out, or a row of the cache, quantized or not; null: nowhere.
struct Target {
  void* out = nullptr;
  DType dtype = DType::kF32;  // kF8E4M3 and kI8: quantized
  float scale = 1.0f;
};

__device__ inline Target target_of(const QkNormRopeAppendProblem& p, int64_t token, const CacheRow& row,
                                   const Head& head) {
  if (head.kind == HeadKind::kQuery) {
    const int64_t offset = token * p.q_out_token_stride + head.index * p.q_out_head_stride;
    return {.out = static_cast<char*>(p.q_out) + offset * dtype_bytes(p.append.update_dtype),
            .dtype = p.append.update_dtype};
  }
  if (!row.valid) return {};
  const KvCachePlane& plane = p.append.planes[head.kind == HeadKind::kKey ? 0 : 1];
  const int64_t offset =
      row.page * plane.page_stride + row.row * plane.row_stride + head.index * plane.cache_head_stride;
  return {.out = static_cast<char*>(plane.cache) + offset * dtype_bytes(p.append.cache_dtype),
          .dtype = p.append.cache_dtype,
          .scale = kv_cache_scale(plane, head.index)};
}

/// The norm's weights of a head, or none.
__device__ inline HeadNorm norm_of(const QkNormRopeAppendProblem& p, HeadKind kind) {
  if (kind == HeadKind::kValue) return {};
  return kind == HeadKind::kQuery ? p.q_norm : p.k_norm;
}

template <class T>
__device__ float weight_at(const HeadNorm& norm, int64_t channel) {
  return norm.weight_dtype == DType::kF32 ? __ldg(static_cast<const float*>(norm.weight) + channel)
                                          : to_float(static_cast<const T*>(norm.weight)[channel]);
}

/// `per_channel`: 1 / D.
__device__ inline float norm_factor(float sum_of_squares, float per_channel, float epsilon) {
  return reciprocal_root(fmaf(sum_of_squares, per_channel, epsilon));
}

/// Sum over neighbouring lanes, `lanes` a power of two; every lane of the warp takes part.
__device__ inline float sum_over(float value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

}  // namespace polyop::cuda
