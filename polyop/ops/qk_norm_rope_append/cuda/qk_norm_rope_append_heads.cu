// qk_norm_rope_append_heads: norm, rotation and append of every head of a token in one launch.
// Math      n = x · w / sqrt(mean(x²) + epsilon); (n1, n2) -> (n1 cos - n2 sin, n2 cos + n1 sin); q to q_out, k and v
// to
//           cache[page(b, position / R), position % R, h, :], quantized as round(x / scale[h])
// Shapes    q, q_out [T, Hq, D] · k, v [T, Hkv, D] f32, f16, bf16 · caches [P, R, Hkv, D] or [B, Hkv, Lmax, D] ·
//           cos_sin [Lrot, Drot] f32 · update_offsets [B + 1] i32 · page_table [B, W] i32
// Layout    D dense; every other stride free; 16-byte accesses where addresses and strides allow, else single elements
// Work      the Hq + 2 Hkv heads of a token are cut into pieces of a warp; a head takes D / (2 · 16 bytes) neighbouring
//           lanes, rounded up to a power of two, so that its sum of squares is a few shuffles. A lane reads its
//           channels of kHeads heads first and looks up sequence, position, page and angles while they are on their way
// Memory    q, k and v read once, q_out and the cache rows written once; cos_sin 4 Drot bytes a token and piece, cached
// Roofline  bandwidth: (2 Hq + 4 Hkv) D bytes of dtype a token; few tokens: four dependent reads (offsets, position,
// page
//           or angles, store)
// Numerics  f32 throughout, root and reciprocal correctly rounded, one rounding to the dtype; a quantized key is that
//           divided by the scale and rounded. Bound in README.md. The same bits for any kHeads
// Limits    none; a token without a slot is left out; one whose position lies outside cos_sin is left out and flagged;
// a
//           row outside the cache is not stored and flagged
#include <cuda_runtime.h>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/kv_cache_rows.cuh"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/rotate.cuh"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/qk_norm_rope_append/cuda/token_heads.cuh"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// ---- vectors --------------------------------------------------------------------------------------------------------

template <class T, class Stored, int kWidth>
__device__ void store_quantized(const Target& target, int64_t channel, const Vector<T, kWidth>& value) {
  const Divisor divisor(target.scale);
  Vector<Stored, kWidth> stored;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    stored.values[j] = from_float<Stored>(divisor.divide(to_float(value.values[j])));
  }
  store_vector(static_cast<Stored*>(target.out) + channel, stored);
}

template <class T, int kWidth>
__device__ void store_channels(const Target& target, int64_t channel, const Vector<T, kWidth>& value) {
  switch (target.dtype) {
    case DType::kF8E4M3:
      return store_quantized<T, Fp8>(target, channel, value);
    case DType::kI8:
      return store_quantized<T, int8_t>(target, channel, value);
    default:
      return store_vector(static_cast<T*>(target.out) + channel, value);
  }
}

// Where one lane's channels stand: kWidth from `low` on and kWidth from `high` on. Half-split, these are pairs;
// interleaved, or behind the rotary part, 2 kWidth neighbours.
struct LaneChannels {
  bool active = false;
  bool rotates = false;
  int slot = 0;
  int low = 0;
  int high = 0;
};

template <int kWidth, bool kInterleaved>
__device__ LaneChannels lane_channels(const QkNormRopeAppendProblem& p, int slot, bool active) {
  const bool rotates = slot < static_cast<int>(p.rotary.rotary_dim / (2 * kWidth));
  const bool neighbours = kInterleaved || !rotates;
  const int low = slot * kWidth * (neighbours ? 2 : 1);
  const int high = low + (neighbours ? kWidth : static_cast<int>(p.rotary.rotary_dim / 2));
  return {.active = active, .rotates = rotates, .slot = slot, .low = low, .high = high};
}

/// The weights of kWidth channels from `channel` on, by accesses of 16 bytes.
template <class T, int kWidth>
__device__ void load_weights(const HeadNorm& norm, int channel, float (&weights)[kWidth]) {
  if (norm.weight_dtype == DType::kF32) {
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      const auto* address = reinterpret_cast<const float4*>(static_cast<const float*>(norm.weight) + channel + j);
      const float4 four = __ldg(address);
      weights[j] = four.x, weights[j + 1] = four.y, weights[j + 2] = four.z, weights[j + 3] = four.w;
    }
  } else {
    const auto vector = *reinterpret_cast<const Vector<T, kWidth>*>(static_cast<const T*>(norm.weight) + channel);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) weights[j] = to_float(vector.values[j]);
  }
}

/// Norm and rotation of one lane's channels, in f32, then rounded: a and b are replaced.
template <class T, int kWidth, bool kInterleaved>
__device__ void norm_and_rotate(const HeadNorm& norm, float factor, const LaneChannels& at, const float (&c)[kWidth],
                                const float (&s)[kWidth], Vector<T, kWidth>* a, Vector<T, kWidth>* b) {
  float x[2 * kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    x[j] = to_float(a->values[j]);
    x[kWidth + j] = to_float(b->values[j]);
  }
  if (norm.weight != nullptr) {
    float weights[kWidth];
    load_weights<T>(norm, at.low, weights);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = __fmul_rn(__fmul_rn(x[j], factor), weights[j]);
    load_weights<T>(norm, at.high, weights);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[kWidth + j] = __fmul_rn(__fmul_rn(x[kWidth + j], factor), weights[j]);
  }
  if (at.rotates) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int first = kInterleaved ? 2 * j : j;
      const int second = kInterleaved ? 2 * j + 1 : kWidth + j;
      rotate_pair(x[first], x[second], c[j], s[j], &x[first], &x[second]);
    }
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    a->values[j] = from_float<T>(x[j]);
    b->values[j] = from_float<T>(x[kWidth + j]);
  }
}

// `lanes_per_head`: a power of two, at least D / (2 kWidth) and at most 32. kHeads: heads one lane takes part in.
template <class T, int kWidth, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kThreads)
    append_vectors_kernel(const QkNormRopeAppendProblem p, const Flags flags, int64_t pieces, int lanes_per_head) {
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t token = item / pieces;
  if (token >= p.append.num_tokens) return;
  const int lane = threadIdx.x % 32;
  const int heads_per_pass = 32 / lanes_per_head;
  const int64_t num_heads = p.num_query_heads + 2 * p.append.num_kv_heads;
  const int64_t my_head = (item - token * pieces) * heads_per_pass * kHeads + lane / lanes_per_head;
  const int slot = lane % lanes_per_head;
  const LaneChannels at =
      lane_channels<kWidth, kInterleaved>(p, slot, slot < static_cast<int>(p.append.head_dim / (2 * kWidth)));
  Vector<T, kWidth> a[kHeads] = {};
  Vector<T, kWidth> b[kHeads] = {};
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int64_t head = my_head + i * heads_per_pass;
    if (head >= num_heads || !at.active) continue;
    const T* x = input_of<T>(p, token, head_of(p, head));
    a[i] = *reinterpret_cast<const Vector<T, kWidth>*>(x + at.low);
    b[i] = *reinterpret_cast<const Vector<T, kWidth>*>(x + at.high);
  }
  // The heads are on their way while the token's place and its angles are looked up.
  const TokenPlace place = find_token(p, flags, token);
  if (!place.has_slot) return;
  const CacheRow row = find_cache_row(p.append, flags.cache, place.sequence, place.start, place.index);
  float c[kWidth] = {};
  float s[kWidth] = {};
  if (at.active && at.rotates) {
    const float* cosines = p.rotary.cosines(place.position) + at.slot * kWidth;
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      const float4 c4 = __ldg(reinterpret_cast<const float4*>(cosines + j));
      const float4 s4 = __ldg(reinterpret_cast<const float4*>(cosines + p.rotary.rotary_dim / 2 + j));
      c[j] = c4.x, c[j + 1] = c4.y, c[j + 2] = c4.z, c[j + 3] = c4.w;
      s[j] = s4.x, s[j + 1] = s4.y, s[j + 2] = s4.z, s[j + 3] = s4.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int64_t head_index = my_head + i * heads_per_pass;
    float factor = 1.0f;
    if (p.has_norm()) {  // every lane takes part in the shuffles, those without channels with zeros
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum = fmaf(to_float(a[i].values[j]), to_float(a[i].values[j]), sum);
        sum = fmaf(to_float(b[i].values[j]), to_float(b[i].values[j]), sum);
      }
      factor = norm_factor(sum_over(sum, lanes_per_head), p.append.head_dim, p.epsilon);
    }
    if (head_index >= num_heads || !at.active) continue;
    const Head head = head_of(p, head_index);
    const HeadNorm norm = norm_of(p, head.kind);
    if (head.kind != HeadKind::kValue && (norm.weight != nullptr || at.rotates)) {
      norm_and_rotate<T, kWidth, kInterleaved>(norm, factor, at, c, s, &a[i], &b[i]);
    }
    const Target target = target_of(p, token, row, head);
    if (target.out == nullptr) continue;
    store_channels(target, at.low, a[i]);
    store_channels(target, at.high, b[i]);
  }
}

// ---- single elements ------------------------------------------------------------------------------------------------

template <class T>
__device__ void store_channel(const Target& target, int64_t channel, T value) {
  switch (target.dtype) {
    case DType::kF8E4M3:
      static_cast<Fp8*>(target.out)[channel] = from_float<Fp8>(Divisor(target.scale).divide(to_float(value)));
      break;
    case DType::kI8:
      static_cast<int8_t*>(target.out)[channel] = from_float<int8_t>(Divisor(target.scale).divide(to_float(value)));
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
  if (token >= p.append.num_tokens) return;
  const int lane = threadIdx.x % 32;
  const TokenPlace place = find_token(p, flags, token);
  if (!place.has_slot) return;
  const CacheRow row = find_cache_row(p.append, flags.cache, place.sequence, place.start, place.index);
  const Head head = head_of(p, item - token * num_heads);
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

template <class T, int kWidth, int kHeads>
Status launch_vectors(const QkNormRopeAppendProblem& p, const Flags& flags, int lanes_per_head, Stream stream) {
  const int64_t num_heads = p.num_query_heads + 2 * p.append.num_kv_heads;
  const int64_t heads_per_piece = 32 / lanes_per_head * kHeads;
  const int64_t pieces = (num_heads + heads_per_piece - 1) / heads_per_piece;
  const auto blocks = static_cast<unsigned>(blocks_for(p.append.num_tokens * pieces, kWarps, int64_t{1} << 30));
  if (p.rotary.interleaved) {
    append_vectors_kernel<T, kWidth, true, kHeads>
        <<<blocks, kThreads, 0, stream_of(stream)>>>(p, flags, pieces, lanes_per_head);
  } else {
    append_vectors_kernel<T, kWidth, false, kHeads>
        <<<blocks, kThreads, 0, stream_of(stream)>>>(p, flags, pieces, lanes_per_head);
  }
  return launch_status("qk_norm_rope_append: cuda_heads");
}

template <class T>
Status launch(const QkNormRopeAppendProblem& p, Stream stream) {
  constexpr int kWidth = 16 / sizeof(T);
  constexpr int kManyHeads = 4;  // heads of a lane when there are tokens enough to fill the device all the same
  const Flags flags = {.cache = {.positions = error_flag("qk_norm_rope_append: write_positions"),
                                 .pages = error_flag("qk_norm_rope_append: page_table")},
                       .position_ids = error_flag("qk_norm_rope_append: position_ids")};
  const int64_t num_heads = p.num_query_heads + 2 * p.append.num_kv_heads;
  if (num_heads == 0) return Status::ok();
  if (!takes_vectors<T>(p, kWidth)) {
    const auto blocks = static_cast<unsigned>(blocks_for(p.append.num_tokens * num_heads, kWarps, int64_t{1} << 30));
    append_elements_kernel<T><<<blocks, kThreads, 0, stream_of(stream)>>>(p, flags, num_heads);
    return launch_status("qk_norm_rope_append: cuda_heads");
  }
  int lanes_per_head = 1;
  while (lanes_per_head < p.append.head_dim / (2 * kWidth)) lanes_per_head *= 2;
  // A multiprocessor holds 16 blocks of 4 warps: with more warps than twice that many, each may take several heads.
  const int64_t warps = p.append.num_tokens * num_heads * lanes_per_head / 32;
  const bool many = warps > int64_t{device_numbers().num_multiprocessors} * 128;
  return many ? launch_vectors<T, kWidth, kManyHeads>(p, flags, lanes_per_head, stream)
              : launch_vectors<T, kWidth, 1>(p, flags, lanes_per_head, stream);
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
