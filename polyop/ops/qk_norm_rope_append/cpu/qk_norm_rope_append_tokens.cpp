// qk_norm_rope_append_tokens: norm, rotation and append of a token while its heads are in the first-level cache.
// Math      x · rsqrt(mean(x²) + epsilon) · weight of each q and k head, pairs of channels turned by the token's
// angles;
//           q to q_out, k and v to the row of the cache
// Shapes    q, q_out [T, Hq, D] · k, v [T, Hkv, D] f32 | f16 | bf16 · pages [P, R, Hkv, D] or [B, Hkv, Lmax, D] ·
//           cos_sin [Lrot, Drot] f32
// Layout    D dense, other strides free; q_out may be q
// Work      one task = about kTaskBytes of consecutive tokens of the whole batch, cut into runs that lie in one page;
//           a head goes from its row to q_out or into the cache in one pass (two with a norm), values as whole runs
// Memory    q, k and v are read once, q_out and the cache rows written once; one row of cos_sin a token
// Roofline  bandwidth-bound; one token of a decode step is bound by the call itself
// Numerics  without a norm and per head the bits of rotary_embedding and kv_cache_update one after the other; the sum
// of
//           squares adds vectors of channels in an order that depends on D only. See ../README.md for the bound
// Limits    page ids and positions are in range: shape binding and the schema's function have checked them
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/ops/qk_norm_rope_append/cpu/qk_norm_rope_append_tokens.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "polyop/cpu/kv_cache_runs.h"
#include "polyop/cpu/simd_quantize-inl.h"
#include "polyop/cpu/simd_rotate-inl.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// ---- rows -----------------------------------------------------------------------------------------------------------

/// Reads channels times `factor` times their weight.
template <class T, class Weight>
struct NormedRow {
  using Element = T;
  const T* x;
  const Weight* weight;
  float factor;

  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, int64_t channel) const {
    return hn::Mul(hn::Mul(load_f32(d, x + channel), hn::Set(d, factor)), load_f32(d, weight + channel));
  }
  [[nodiscard]] float load_one(int64_t channel) const {
    return to_float(x[channel]) * factor * to_float(weight[channel]);
  }
};

/// Writes round(channel / scale) of channels rounded to T, as an append of rotated keys does.
template <class T, class Stored>
struct QuantizedRow {
  Stored* out;
  float scale;

  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> value, int64_t channel) const {
#if HWY_TARGET != HWY_SCALAR
    HWY_ALIGN T rounded[hn::MaxLanes(d)];
    store_f32(d, value, rounded);
    store_quantized(d, hn::Div(load_f32(d, rounded), hn::Set(d, scale)), out + channel);
#endif
  }
  void store_one(float value, int64_t channel) const {
    out[channel] = from_float<Stored>(to_float(from_float<T>(value)) / scale);
  }
};

// ---- norm -----------------------------------------------------------------------------------------------------------

template <class T>
float sum_of_squares(const T* x, int64_t count) {
  int64_t i = 0;
  float sum = 0.0f;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sums = hn::Zero(d);
  for (; i + lanes <= count; i += lanes) {
    const auto value = load_f32(d, x + i);
    sums = hn::MulAdd(value, value, sums);
  }
  sum = hn::GetLane(hn::SumOfLanes(d, sums));
#endif
  for (; i < count; ++i) sum += to_float(x[i]) * to_float(x[i]);
  return sum;
}

// Heads whose factors are found before the first of them is rotated: sums, roots and divisions of several heads
// overlap.
constexpr int64_t kHeadsAtOnce = 16;

/// 1 / sqrt(mean(x²) + epsilon) of `heads` heads; nothing without a norm.
template <class T>
HWY_INLINE void norm_factors(const QkNormRopeAppendProblem& problem, const HeadNorm& norm, const T* x,
                             int64_t head_stride, int64_t heads, float* factors) {
  if (norm.weight == nullptr) return;
  const int64_t head_dim = problem.append.head_dim;
  for (int64_t head = 0; head < heads; ++head) factors[head] = sum_of_squares(x + head * head_stride, head_dim);
  for (int64_t head = 0; head < heads; ++head) {
    factors[head] = 1.0f / std::sqrt(factors[head] / static_cast<float>(head_dim) + problem.epsilon);
  }
}

/// One head [D] to `to`, a RoundedRow or a QuantizedRow.
template <class T, class To>
HWY_INLINE void norm_and_rotate(const QkNormRopeAppendProblem& problem, const HeadNorm& norm, float factor,
                                const float* cosines, const T* x, const To& to) {
  const int64_t head_dim = problem.append.head_dim;
  if (norm.weight == nullptr) {
    rotate_row(problem.rotary, cosines, head_dim, PlainRow<T>{x}, to);
  } else if (norm.weight_dtype == DType::kF32) {
    const NormedRow<T, float> from = {.x = x, .weight = static_cast<const float*>(norm.weight), .factor = factor};
    rotate_row(problem.rotary, cosines, head_dim, from, to);
  } else {
    const NormedRow<T, T> from = {.x = x, .weight = static_cast<const T*>(norm.weight), .factor = factor};
    rotate_row(problem.rotary, cosines, head_dim, from, to);
  }
}

/// Calls run_head(head, its channels, its norm's factor) for `num_heads` heads from x on.
template <class T, class RunHead>
HWY_INLINE void for_each_head(const QkNormRopeAppendProblem& problem, const HeadNorm& norm, const T* x,
                              int64_t head_stride, int64_t num_heads, RunHead&& run_head) {
  float factors[kHeadsAtOnce] = {};
  for (int64_t first = 0; first < num_heads; first += kHeadsAtOnce) {
    const int64_t heads = std::min(kHeadsAtOnce, num_heads - first);
    norm_factors(problem, norm, x + first * head_stride, head_stride, heads, factors);
    for (int64_t i = 0; i < heads; ++i) run_head(first + i, x + (first + i) * head_stride, factors[i]);
  }
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

template <class T>
void run_queries(const QkNormRopeAppendProblem& problem, const float* cosines, int64_t token) {
  const T* x = static_cast<const T*>(problem.q) + token * problem.q_token_stride;
  T* out = static_cast<T*>(problem.q_out) + token * problem.q_out_token_stride;
  for_each_head(problem, problem.q_norm, x, problem.q_head_stride, problem.num_query_heads,
                [&](int64_t head, const T* head_x, float factor) {
                  norm_and_rotate(problem, problem.q_norm, factor, cosines, head_x,
                                  RoundedRow<T>{out + head * problem.q_out_head_stride});
                });
}

/// The keys of one token; `offset` is that of its row in the cache, in elements.
template <class T>
void run_keys(const QkNormRopeAppendProblem& problem, const float* cosines, int64_t token, int64_t offset) {
  const KvCacheAppend& append = problem.append;
  const KvCachePlane& plane = append.planes[0];
  const HeadNorm& norm = problem.k_norm;
  const T* x = static_cast<const T*>(plane.update) + token * plane.update_token_stride;
  for_each_head(problem, norm, x, plane.update_head_stride, append.num_kv_heads,
                [&](int64_t head, const T* head_x, float factor) {
                  const int64_t to = offset + head * plane.cache_head_stride;
                  const float scale = kv_cache_scale(plane, head);
                  if (!append.quantizes()) {
                    norm_and_rotate(problem, norm, factor, cosines, head_x,
                                    RoundedRow<T>{static_cast<T*>(plane.cache) + to});
                  } else if (append.cache_dtype == DType::kI8) {
                    norm_and_rotate(problem, norm, factor, cosines, head_x,
                                    QuantizedRow<T, int8_t>{static_cast<int8_t*>(plane.cache) + to, scale});
                  } else {
                    norm_and_rotate(problem, norm, factor, cosines, head_x,
                                    QuantizedRow<T, F8E4M3>{static_cast<F8E4M3*>(plane.cache) + to, scale});
                  }
                });
}

/// Tokens of one run; those without a slot cut it into pieces whose values are stored together.
template <class T>
void run_tokens_as(const QkNormRopeAppendProblem& problem, const KvCacheRun& run) {
  const KvCacheAppend& append = problem.append;
  const KvCachePlane& keys = append.planes[0];
  const int64_t first_token = append.token_offset(run.sequence) + run.token;
  const int64_t first_position = append.write_position(run.sequence) + run.token;
  KvCacheRun piece = run;
  piece.tokens = 0;
  for (int64_t i = 0; i < run.tokens; ++i) {
    const int64_t position = problem.position(first_token + i, first_position + i);
    if (position == QkNormRopeAppendProblem::kNoSlot) {
      if (piece.tokens > 0) store_run(append, append.planes[1], piece);
      piece.token = run.token + i + 1;
      piece.row = run.row + i + 1;
      piece.tokens = 0;
      continue;
    }
    ++piece.tokens;
    const float* cosines = problem.rotary.cosines(position);
    run_queries<T>(problem, cosines, first_token + i);
    run_keys<T>(problem, cosines, first_token + i, run.page * keys.page_stride + (run.row + i) * keys.row_stride);
  }
  if (piece.tokens > 0) store_run(append, append.planes[1], piece);
}

void run_tokens(const QkNormRopeAppendProblem& problem, const KvCacheRun& run) {
  switch (problem.dtype()) {
    case DType::kF16:
      return run_tokens_as<F16>(problem, run);
    case DType::kBF16:
      return run_tokens_as<BF16>(problem, run);
    default:
      return run_tokens_as<float>(problem, run);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyop::cpu {
namespace {

HWY_EXPORT(run_tokens);

// Bytes of q, k and v per task: large against the cost of claiming one, small against a core's share of a long prompt.
constexpr int64_t kTaskBytes = 64 * 1024;

}  // namespace

Status qk_norm_rope_append_tokens(const QkNormRopeAppendProblem& problem, Workspace, Stream) {
  const KvCacheAppend& append = problem.append;
  const int64_t num_tokens = append.token_offset(append.num_sequences);
  const int64_t num_heads = problem.num_query_heads + 2 * append.num_kv_heads;
  const int64_t token_bytes = num_heads * append.head_dim * dtype_bytes(problem.dtype());
  if (token_bytes == 0) return Status::ok();
  const int64_t tokens_per_task = std::max<int64_t>(1, kTaskBytes / token_bytes);
  const int64_t tasks = (num_tokens + tokens_per_task - 1) / tokens_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](int64_t task, int) {
    const int64_t begin = task * tokens_per_task;
    for_each_run(append, begin, std::min(num_tokens, begin + tokens_per_task), [&](const KvCacheRun& run) {
      HWY_DYNAMIC_DISPATCH(run_tokens)(problem, run);
    });
  });
  return Status::ok();
}

}  // namespace polyop::cpu
#endif  // HWY_ONCE
