// qk_norm_rope_append_heads: norm, rotation and append of every head of a token in one launch.
// Math      n = x · w / sqrt(mean(x²) + epsilon); (n1, n2) -> (n1 cos - n2 sin, n2 cos + n1 sin); q to q_out, k and
//           v to cache[page(b, position / R), position % R, h, :], quantized as round(x / scale[h])
// Shapes    q, q_out [T, Hq, D] · k, v [T, Hkv, D] f32, f16, bf16 · caches [P, R, Hkv, D] or [B, Hkv, Lmax, D] ·
//           cos_sin [Lrot, Drot] f32 · update_offsets [B + 1] i32 · page_table [B, W] i32
// Layout    D dense; every other stride free; 16-byte accesses where addresses and strides allow, else single elements
// Work      a warp takes one token, or with few tokens a share of its heads, in passes over heads of one kind; a head
//           takes D / (2 · 16 bytes) neighbouring lanes, rounded up to a power of two, so that its sum of squares is a
//           few shuffles. A lane reads its channels of the first head and looks up sequence, position, page and angles
//           while they are on their way; then the next head's loads go ahead of the stores of this one
// Memory    q, k and v read once, q_out and the cache rows written once; cos_sin 4 Drot bytes a token and warp, cached
// Roofline  bandwidth: (2 Hq + 4 Hkv) D bytes of dtype a token; target 90% of a copy from 4096 tokens on, see
//           docs/performance.md; few tokens: two dependent reads (offsets and positions, then page and angles)
// Numerics  f32 throughout, the reciprocal root correctly rounded, one rounding to the dtype; a quantized key is that
//           divided by the scale and rounded. Bound in README.md. The same bits for any share of heads
// Limits    none; a token without a slot is left out; one whose position lies outside cos_sin is left out and flagged;
//           a row outside the cache is not stored and flagged
#include <cuda_runtime.h>

#include <algorithm>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/early_launch.cuh"
#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/kv_cache_rows.cuh"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/rotate.cuh"
#include "polyop/cuda/token_heads.cuh"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/qk_norm_rope_append/cuda/head_places.cuh"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kWarps = 2;
constexpr int kThreads = 32 * kWarps;
/// Blocks wanted on a multiprocessor: as many as leave the registers that a kernel needs. Where they spill, a call with
/// one token takes half a microsecond longer.
constexpr int blocks_wanted(bool norms) { return norms ? 10 : 14; }
constexpr int kWarpsWanted = 64;  // on a multiprocessor, before a warp takes more than one pass

// ---- vectors --------------------------------------------------------------------------------------------------------

/// kWidth channels from `channel` on, quantized.
template <class Stored, int kWidth>
__device__ void store_quantized(char* row, int32_t channel, const float (&values)[kWidth], const Divisor& divisor) {
  *reinterpret_cast<Words<kWidth>*>(row + channel) = quantize<Stored>(values, divisor);
}

/// What a cache of 8 bits holds of a key or value that is rounded to its own type already.
template <class T, int kWidth>
__device__ void store_quantized_head(char* row, DType dtype, float scale, const LaneChannels& at,
                                     const HeadWords& words) {
  const Divisor divisor(scale);
  float low[kWidth];
  float high[kWidth];
  to_floats<T>(words.low, low);
  to_floats<T>(words.high, high);
  if (dtype == DType::kI8) {
    store_quantized<int8_t>(row, at.low, low, divisor);
    store_quantized<int8_t>(row, at.high, high, divisor);
  } else {
    store_quantized<Fp8>(row, at.low, low, divisor);
    store_quantized<Fp8>(row, at.high, high, divisor);
  }
}

/// A lane's weights of a kind, read long before they are needed; nothing when they are wider than T.
template <class T>
__device__ HeadWords load_weights(const HeadNorm& norm, const LaneChannels& at) {
  if (sizeof(T) < sizeof(float) && norm.weight_dtype == DType::kF32) return {};
  const T* weights = static_cast<const T*>(norm.weight);
  return {__ldg(reinterpret_cast<const uint4*>(weights + at.low)),
          __ldg(reinterpret_cast<const uint4*>(weights + at.high))};
}

/// x scaled by the norm: kWidth channels from `channel` on, `words` their weights as load_weights read them.
template <class T, int kWidth>
__device__ void apply_norm(const HeadNorm& norm, float factor, int32_t channel, const uint4& words, float* x) {
  float weights[kWidth];
  if (sizeof(T) < sizeof(float) && norm.weight_dtype == DType::kF32) {
    load_floats(static_cast<const float*>(norm.weight) + channel, true, weights);
  } else {
    to_floats<T>(words, weights);
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) x[j] = __fmul_rn(__fmul_rn(x[j], factor), weights[j]);
}

// A lane's slot in a head is described at LaneChannels; kWidth elements are 16 bytes.
template <class T, int kWidth, bool kInterleaved, bool kNorms, bool kQuantizes>
__global__ void __launch_bounds__(kThreads, blocks_wanted(kNorms))
    append_vectors_kernel(const __grid_constant__ QkNormRopeAppendProblem p,
                          const __grid_constant__ TokenHeads<3> heads, const Flags flags) {
  let_next_kernel_start();
  wait_for_earlier_work();
  const auto token = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (token >= p.append.num_tokens) {
    if (token == p.append.num_tokens && blockIdx.y == 0) check_offsets(p.append, flags.cache);
    return;
  }
  const int32_t slot = static_cast<int32_t>(threadIdx.x % 32) & ((1 << heads.log2_lanes) - 1);
  const bool has_channels = slot < static_cast<int32_t>(p.append.head_dim) / (2 * kWidth);
  const LaneChannels at = lane_channels<kWidth, kInterleaved>(p.rotary, slot);
  const int32_t first = static_cast<int32_t>(blockIdx.y) * heads.passes_per_piece;
  const int32_t end = min(first + heads.passes_per_piece, heads.num_passes[0] + 2 * heads.num_passes[1]);
  const auto row_of_x = [&](int32_t kind, int32_t head) { return heads.from[kind].row(token, 0, head); };
  HeadCursor<3, decltype(row_of_x)> source(heads, heads.from, first, row_of_x);
  const auto load = [&](int32_t number) {
    HeadWords words;
    if (number < end) {
      if (source.is_valid() && has_channels) words = load_head<T>(source.row(), at);
      source.next();
    }
    return words;
  };
  int32_t weights_kind = source.kind();
  HeadWords words = load(first);
  HeadWords weights;
  if constexpr (kNorms) {
    if (has_channels) weights = load_weights<T>(weights_kind == 0 ? p.q_norm : p.k_norm, at);
  }
  // The first head is on its way while the token's place and its angles are looked up.
  const TokenPlace place = find_token(p, flags, token);
  if (!place.has_slot) return;
  const Angles<kWidth> angles = load_angles<kWidth>(p.rotary, place.position, at, true);
  const CacheRow row = find_cache_row(p.append, flags.cache, place.owner);
  const auto row_of_result = [&](int32_t kind, int32_t head) {
    const bool in_cache = kind != static_cast<int32_t>(HeadKind::kQuery);
    return heads.to[kind].row(in_cache ? row.page : token, in_cache ? row.row : 0, head);
  };
  HeadCursor<3, decltype(row_of_result)> target(heads, heads.to, first, row_of_result);
  for (int32_t number = first; number < end; ++number, target.next()) {
    const HeadWords next = load(number + 1);
    const auto kind = static_cast<HeadKind>(target.kind());
    if (kind != HeadKind::kValue && (kNorms || at.rotates)) {
      float x[2 * kWidth];
      to_floats<T>(words.low, x);
      to_floats<T>(words.high, x + kWidth);
      if constexpr (kNorms) {
        float sum = 0.0f;
        float other = 0.0f;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          sum = fmaf(x[j], x[j], sum);
          other = fmaf(x[kWidth + j], x[kWidth + j], other);
        }
        // Every lane of the warp takes part, those without channels with zeros.
        const float factor = norm_factor(sum_over(sum + other, 1 << heads.log2_lanes), p.append.head_dim, p.epsilon);
        if (has_channels) {
          const HeadNorm& norm = kind == HeadKind::kQuery ? p.q_norm : p.k_norm;
          if (target.kind() != weights_kind) {
            weights_kind = target.kind();
            weights = load_weights<T>(norm, at);
          }
          apply_norm<T, kWidth>(norm, factor, at.low, weights.low, x);
          apply_norm<T, kWidth>(norm, factor, at.high, weights.high, x + kWidth);
        }
      }
      if (at.rotates) rotate_lane<kWidth, kInterleaved>(angles, x);
      words = {from_floats<T>(x), from_floats<T>(x + kWidth)};
    }
    const bool in_cache = kind != HeadKind::kQuery;
    if (target.is_valid() && has_channels && (!in_cache || row.valid)) {
      if (kQuantizes && in_cache) {
        const float scale = kv_cache_scale(p.append.planes[kind == HeadKind::kKey ? 0 : 1], target.head());
        store_quantized_head<T, kWidth>(target.row(), p.append.cache_dtype, scale, at, words);
      } else {
        store_head<T>(target.row(), at, words);
      }
    }
    words = next;
  }
}

// ---- single elements ------------------------------------------------------------------------------------------------

template <class T>
__device__ void store_channel(const Target& target, int64_t channel, T value) {
  switch (target.dtype) {
    case DType::kF8E4M3:
      static_cast<Fp8*>(target.out)[channel] = from_float<Fp8>(__fdiv_rn(to_float(value), target.scale));
      break;
    case DType::kI8:
      static_cast<int8_t*>(target.out)[channel] = from_float<int8_t>(__fdiv_rn(to_float(value), target.scale));
      break;
    default:
      static_cast<T*>(target.out)[channel] = value;
  }
}

// Any width and alignment: a warp takes one head, a lane single pairs and then single channels behind the rotary part.
template <class T>
__global__ void __launch_bounds__(kThreads)
    append_elements_kernel(const QkNormRopeAppendProblem p, const Flags flags, int64_t num_heads) {
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t token = item / num_heads;
  if (token >= p.append.num_tokens) {
    if (item == p.append.num_tokens * num_heads) check_offsets(p.append, flags.cache);
    return;
  }
  const int lane = threadIdx.x % 32;
  const TokenPlace place = find_token(p, flags, token);
  if (!place.has_slot) return;
  const CacheRow row = find_cache_row(p.append, flags.cache, place.owner);
  const Head head = head_of(p, static_cast<int32_t>(item - token * num_heads));
  const Target target = target_of(p, token, row, head);
  if (target.out == nullptr) return;
  const T* x = input_of<T>(p, token, head);
  const HeadNorm norm = norm_of(p, head.kind);
  float factor = 1.0f;
  if (norm.weight != nullptr) {
    float sum = 0.0f;
    for (int64_t i = lane; i < p.append.head_dim; i += 32) sum = fmaf(to_float(x[i]), to_float(x[i]), sum);
    factor = norm_factor(sum_over(sum, 32), p.append.head_dim, p.epsilon);
  }
  const auto load = [&](int64_t channel) {
    const float value = to_float(x[channel]);
    return norm.weight == nullptr ? value : __fmul_rn(__fmul_rn(value, factor), weight_at<T>(norm, channel));
  };
  const int64_t rotary_dim = head.kind == HeadKind::kValue ? 0 : p.rotary.rotary_dim;
  const float* cosines = p.rotary.cosines(place.position);
  for (int64_t pair = lane; pair < rotary_dim / 2; pair += 32) {
    const int64_t first = p.rotary.first_channel(pair);
    const int64_t second = p.rotary.second_channel(pair);
    float y1 = 0.0f;
    float y2 = 0.0f;
    rotate_pair(load(first), load(second), cosines[pair], cosines[rotary_dim / 2 + pair], &y1, &y2);
    store_channel(target, first, from_float<T>(y1));
    store_channel(target, second, from_float<T>(y2));
  }
  for (int64_t channel = rotary_dim + lane; channel < p.append.head_dim; channel += 32) {
    store_channel(target, channel, norm.weight == nullptr ? x[channel] : from_float<T>(load(channel)));
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <class T>
bool takes_vectors(const QkNormRopeAppendProblem& p, int64_t width) {
  const auto bytes = static_cast<int64_t>(sizeof(T));
  const int64_t cache_bytes = dtype_bytes(p.append.cache_dtype);
  AccessWidth access;  // of q, k and v, of the weights and of the table
  AccessWidth stores;  // of the cache: `width` elements at a time
  access.address(p.q).address(p.q_out).address(p.rotary.cos_sin).distance(p.rotary.cos_sin_stride * 4);
  access.address(p.q_norm.weight).address(p.k_norm.weight);
  for (const int64_t stride : {p.q_token_stride, p.q_head_stride, p.q_out_token_stride, p.q_out_head_stride}) {
    access.distance(stride * bytes);
  }
  for (const KvCachePlane& plane : p.append.planes) {
    access.address(plane.update).distance(plane.update_token_stride * bytes).distance(plane.update_head_stride * bytes);
    stores.address(plane.cache);
    for (const int64_t stride : {plane.page_stride, plane.row_stride, plane.cache_head_stride}) {
      stores.distance(stride * cache_bytes);
    }
  }
  return access.widest() == 16 && stores.widest() >= width * cache_bytes && p.append.head_dim % (2 * width) == 0 &&
         p.rotary.rotary_dim % (2 * width) == 0 && p.append.head_dim <= 64 * width;
}

/// Rows of q, k and v, and of q_out and the two caches.
TokenHeads<3> token_heads(const QkNormRopeAppendProblem& p) {
  const int64_t bytes = dtype_bytes(p.append.update_dtype);
  const int64_t cache_bytes = dtype_bytes(p.append.cache_dtype);
  TokenHeads<3> heads;
  heads.num_heads[0] = static_cast<int32_t>(p.num_query_heads);
  heads.from[0] = {.data = static_cast<char*>(const_cast<void*>(p.q)),
                   .outer_stride = p.q_token_stride * bytes,
                   .head_stride = p.q_head_stride * bytes};
  heads.to[0] = {.data = static_cast<char*>(p.q_out),
                 .outer_stride = p.q_out_token_stride * bytes,
                 .head_stride = p.q_out_head_stride * bytes};
  for (int i = 0; i < 2; ++i) {
    const KvCachePlane& plane = p.append.planes[i];
    heads.num_heads[1 + i] = static_cast<int32_t>(p.append.num_kv_heads);
    heads.from[1 + i] = {.data = static_cast<char*>(const_cast<void*>(plane.update)),
                         .outer_stride = plane.update_token_stride * bytes,
                         .head_stride = plane.update_head_stride * bytes};
    heads.to[1 + i] = {.data = static_cast<char*>(plane.cache),
                       .outer_stride = plane.page_stride * cache_bytes,
                       .inner_stride = plane.row_stride * cache_bytes,
                       .head_stride = plane.cache_head_stride * cache_bytes};
  }
  return heads;
}

template <class T, int kWidth, bool kInterleaved>
auto kernel_for(const QkNormRopeAppendProblem& p) {
  if (p.append.quantizes()) {
    return p.has_norm() ? append_vectors_kernel<T, kWidth, kInterleaved, true, true>
                        : append_vectors_kernel<T, kWidth, kInterleaved, false, true>;
  }
  return p.has_norm() ? append_vectors_kernel<T, kWidth, kInterleaved, true, false>
                      : append_vectors_kernel<T, kWidth, kInterleaved, false, false>;
}

template <class T>
Status launch(const QkNormRopeAppendProblem& p, Stream stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const Flags flags = {.cache = {.offsets = error_flag("qk_norm_rope_append: update_offsets"),
                                 .positions = error_flag("qk_norm_rope_append: write_positions"),
                                 .pages = error_flag("qk_norm_rope_append: page_table")},
                       .position_ids = error_flag("qk_norm_rope_append: position_ids")};
  const int64_t num_heads = p.num_query_heads + 2 * p.append.num_kv_heads;
  if (num_heads == 0) return Status::ok();
  if (!takes_vectors<T>(p, kWidth)) {
    const int64_t blocks = p.append.num_tokens * num_heads / kWarps + 1;
    if (blocks > INT32_MAX)
      return unsupported("qk_norm_rope_append: cuda_heads: too many tokens x heads for unaligned heads");
    append_elements_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(p, flags, num_heads);
    return launch_status("qk_norm_rope_append: cuda_heads");
  }
  TokenHeads<3> heads = token_heads(p);
  heads.cut(p.append.head_dim * static_cast<int64_t>(sizeof(T)), p.append.num_tokens,
            int64_t{device_numbers().num_multiprocessors} * kWarpsWanted);
  const dim3 blocks(static_cast<unsigned>(p.append.num_tokens / kWarps + 1), static_cast<unsigned>(heads.pieces));
  const auto kernel = p.rotary.interleaved ? kernel_for<T, kWidth, true>(p) : kernel_for<T, kWidth, false>(p);
  launch_early(kernel, blocks, kThreads, 0, stream, p, heads, flags);
  return launch_status("qk_norm_rope_append: cuda_heads");
}

}  // namespace

Status qk_norm_rope_append_heads(const QkNormRopeAppendProblem& problem, Workspace, Stream stream) {
  if (problem.append.num_tokens == 0 || problem.append.head_dim == 0) return Status::ok();
  if (problem.append.num_sequences == 0) return Status::ok();
  switch (problem.dtype()) {
    case DType::kF32:
      return launch<float>(problem, stream);
    case DType::kF16:
      return launch<__half>(problem, stream);
    default:
      return launch<__nv_bfloat16>(problem, stream);
  }
}

}  // namespace polyop::cuda
