// rotary_embedding_rows: rotary embedding of q and k, vectors along the channels of a head.
// Math      y1 = x1 c - x2 s, y2 = x2 c + x1 s for each pair of channels; channels from Drot on are copied
// Shapes    x, out [T, heads, D] f32 | f16 | bf16 (q, then k) · cos_sin [Lmax, Drot] f32 · position_ids [T]
// Layout    D dense, other strides free; out may be x
// Work      one task = about kTaskBytes of consecutive tokens with all heads of q and k, so a row of cos_sin is read
//           once from memory and then from the first-level cache
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

#include "polyop/cpu/simd_rotate-inl.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
template <class T>
void rotate_tokens_as(const RotaryEmbeddingProblem& problem, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const float* cosines = problem.cosines(problem.position(token));
    for (int32_t input = 0; input < problem.num_inputs; ++input) {
      const RotaryHeads& heads = problem.heads[input];
      const T* x = static_cast<const T*>(heads.x) + token * heads.x_token_stride;
      T* out = static_cast<T*>(heads.out) + token * heads.out_token_stride;
      for (int64_t head = 0; head < heads.num_heads; ++head) {
        rotate_row(problem, cosines, problem.head_dim, PlainRow<T>{x + head * heads.x_head_stride},
                   RoundedRow<T>{out + head * heads.out_head_stride});
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
