// rotary_embedding_rows: rotary embedding of q and k, vectors along the channels of a head.
// Math      y1 = x1 c - x2 s, y2 = x2 c + x1 s for each pair of channels; channels from Drot on are copied
// Shapes    x, out [T, heads, D] f32 | f16 | bf16 (q, then k) · cos_sin [Lmax, Drot] f32 · position_ids [T]
// Layout    D dense, other strides free; out may be x
// Work      one task = about kTaskBytes of consecutive tokens with all heads of q and k, so a row of cos_sin is read
// once
//           from memory and then from the first-level cache
// Memory    x is read once, out is written once; T·Drot·4 bytes of cos_sin
// Roofline  bandwidth-bound: 3 operations a channel; in place it moves 2·T·(Hq + Hkv)·D elements
// Numerics  f32 products and sum, each rounded, no fused multiply-add: full vectors, short vectors, the scalar tail and
//           every processor give the same bits. One rounding to the dtype. See ../README.md for the bound
// Limits    none beyond the schema
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/ops/rotary_embedding/cpu/rotary_embedding_rows.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "polyop/cpu/simd_convert-inl.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

/// Rotates the pairs (0, half), (1, half + 1), ... of one vector of each; returns how many.
template <class D, class T>
HWY_INLINE int64_t rotate_split(D d, const float* cosines, const float* sines, int64_t half, const T* x, T* out) {
  const auto c = hn::LoadU(d, cosines);
  const auto s = hn::LoadU(d, sines);
  const auto x1 = load_f32(d, x);
  const auto x2 = load_f32(d, x + half);
  store_f32(d, hn::Sub(hn::Mul(x1, c), hn::Mul(x2, s)), out);
  store_f32(d, hn::Add(hn::Mul(x2, c), hn::Mul(x1, s)), out + half);
  return static_cast<int64_t>(hn::Lanes(d));
}

/// Rotates the pairs (0, 1), (2, 3), ... of one vector; returns how many.
template <class D, class T>
HWY_INLINE int64_t rotate_interleaved(D d, const float* cosines, const float* sines, const T* x, T* out) {
  const hn::Half<D> d_half;
  const hn::RebindToSigned<D> di;
  const auto pair_of_lane = hn::IndicesFromVec(d, hn::ShiftRight<1>(hn::Iota(di, 0)));
  const auto c = hn::TableLookupLanes(hn::ZeroExtendVector(d, hn::LoadU(d_half, cosines)), pair_of_lane);
  const auto s = hn::TableLookupLanes(hn::ZeroExtendVector(d, hn::LoadU(d_half, sines)), pair_of_lane);
  const auto value = load_f32(d, x);
  const auto partner = hn::Shuffle2301(value);
  store_f32(d, hn::Add(hn::Mul(value, c), hn::Mul(partner, hn::OddEven(s, hn::Neg(s)))), out);
  return static_cast<int64_t>(hn::Lanes(d)) / 2;
}

#endif

template <class T>
HWY_INLINE void rotate_pair(float c, float s, T* HWY_RESTRICT first, T* HWY_RESTRICT second, T x1, T x2) {
  const float a = to_float(x1);
  const float b = to_float(x2);
  *first = from_float<T>(a * c - b * s);
  *second = from_float<T>(b * c + a * s);
}

/// One head: `x` and `out` [D], which may be the same memory.
template <class T>
void rotate_head(const RotaryEmbeddingProblem& problem, const float* cosines, const T* x, T* out) {
  const int64_t half = problem.rotary_dim / 2;
  const float* sines = cosines + half;
  int64_t pair = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 4> d4;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto lanes4 = static_cast<int64_t>(hn::Lanes(d4));
  if (problem.interleaved) {
    while (pair + lanes / 2 <= half) {
      pair += rotate_interleaved(d, cosines + pair, sines + pair, x + 2 * pair, out + 2 * pair);
    }
    while (pair + lanes4 / 2 <= half) {
      pair += rotate_interleaved(d4, cosines + pair, sines + pair, x + 2 * pair, out + 2 * pair);
    }
  } else {
    while (pair + lanes <= half) pair += rotate_split(d, cosines + pair, sines + pair, half, x + pair, out + pair);
    while (pair + lanes4 <= half) pair += rotate_split(d4, cosines + pair, sines + pair, half, x + pair, out + pair);
  }
#endif
  for (; pair < half; ++pair) {
    const int64_t first = problem.first_channel(pair);
    const int64_t second = problem.second_channel(pair);
    rotate_pair(cosines[pair], sines[pair], out + first, out + second, x[first], x[second]);
  }
  if (out != x) {
    std::memcpy(static_cast<void*>(out + problem.rotary_dim), x + problem.rotary_dim,
                static_cast<size_t>(problem.head_dim - problem.rotary_dim) * sizeof(T));
  }
}

template <class T>
void rotate_tokens_as(const RotaryEmbeddingProblem& problem, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const float* cosines = problem.cos_sin + problem.position(token) * problem.cos_sin_stride;
    for (int32_t input = 0; input < problem.num_inputs; ++input) {
      const RotaryHeads& heads = problem.heads[input];
      const T* x = static_cast<const T*>(heads.x) + token * heads.x_token_stride;
      T* out = static_cast<T*>(heads.out) + token * heads.out_token_stride;
      for (int64_t head = 0; head < heads.num_heads; ++head) {
        rotate_head(problem, cosines, x + head * heads.x_head_stride, out + head * heads.out_head_stride);
      }
    }
  }
}

void rotate_tokens(const RotaryEmbeddingProblem& problem, int64_t begin, int64_t end) {
  switch (problem.dtype) {
    case DType::kF16:
      return rotate_tokens_as<F16>(problem, begin, end);
    case DType::kBF16:
      return rotate_tokens_as<BF16>(problem, begin, end);
    default:
      return rotate_tokens_as<float>(problem, begin, end);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyop::cpu {
namespace {

HWY_EXPORT(rotate_tokens);

// Bytes of q and k per task: large against the cost of claiming one, small against a core's share of a long prompt.
constexpr int64_t kTaskBytes = 64 * 1024;

}  // namespace

Status rotary_embedding_rows(const RotaryEmbeddingProblem& problem, Workspace, Stream) {
  const int64_t num_heads = problem.heads[0].num_heads + problem.heads[1].num_heads;
  const int64_t token_bytes = std::max<int64_t>(1, num_heads * problem.head_dim * dtype_bytes(problem.dtype));
  const int64_t tokens_per_task = std::max<int64_t>(1, kTaskBytes / token_bytes);
  const int64_t tasks = (problem.num_tokens + tokens_per_task - 1) / tokens_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](int64_t task, int) {
    const int64_t begin = task * tokens_per_task;
    HWY_DYNAMIC_DISPATCH(rotate_tokens)(problem, begin, std::min(problem.num_tokens, begin + tokens_per_task));
  });
  return Status::ok();
}

}  // namespace polyop::cpu
#endif  // HWY_ONCE
