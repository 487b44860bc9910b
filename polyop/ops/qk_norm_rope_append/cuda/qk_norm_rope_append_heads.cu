// qk_norm_rope_append_heads: norm, rotation and append of every head of a token in one launch.
// Math      n = x · w / sqrt(mean(x²) + epsilon); (n1, n2) -> (n1 cos - n2 sin, n2 cos + n1 sin); q to q_out, k and
//           v to cache[page(b, position / R), position % R, h, :], quantized as round(x / scale[h])
// Shapes    q, q_out [T, Hq, D] · k, v [T, Hkv, D] f32, f16, bf16 · caches [P, R, Hkv, D] or [B, Hkv, Lmax, D] ·
//           cos_sin [Lrot, Drot] f32 · update_offsets [B + 1] i32 · page_table [B, W] i32
// Layout    D dense; every other stride free; 16-byte accesses where addresses and strides allow, else single elements
// Work      a warp takes one token, or with few tokens a share of its heads, in passes over heads of one kind; a head
//           takes D / (2 · 16 bytes) neighbouring lanes, rounded up to a power of two, so that its sum of squares is a
//           few shuffles. Two passes of heads are always on their way to shared memory, the first two while the warp
//           looks up sequence, position, page, angles and weights; the norm of the first head hides the last of these.
//           Angles and weights are multiplied once for all heads of a kind
// Memory    q, k and v read once, q_out and the cache rows written once; cos_sin 4 Drot bytes a token and warp, cached
// Roofline  bandwidth: (2 Hq + 4 Hkv) D bytes of dtype a token; target 90% of a copy from 4096 tokens on, see
//           docs/performance.md; few tokens: two dependent reads (offsets and positions, then page and angles)
// Numerics  f32 throughout, one rounding to the dtype; a quantized key is that divided by the scale and rounded. Bound
//           in README.md. The same bits for any share of heads
// Limits    none; a token without a slot is left out; one whose position lies outside cos_sin is left out and flagged;
//           a row outside the cache is not stored and flagged
#include <cuda_runtime.h>

#include <algorithm>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/early_launch.cuh"
#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/kv_cache_rows.cuh"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/ptx.cuh"
#include "polyop/cuda/rotate.cuh"
#include "polyop/cuda/token_heads.cuh"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/qk_norm_rope_append/cuda/head_places.cuh"
#include "polyop/ops/qk_norm_rope_append/cuda/head_vectors.cuh"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop::cuda {
namespace {

constexpr auto kQuery = static_cast<int32_t>(HeadKind::kQuery);
constexpr auto kValue = static_cast<int32_t>(HeadKind::kValue);
constexpr int kStages = 2;  // passes of a warp on their way
constexpr int kWarps = 2;
constexpr int kThreads = 32 * kWarps;
/// Blocks wanted on a multiprocessor: as many as leave the registers that a kernel needs. Where they spill, a call with
/// one token takes half a microsecond longer.
constexpr int blocks_wanted(bool norms) { return norms ? 10 : 14; }
constexpr int kWarpsWanted = 64;  // on a multiprocessor, before a warp takes more than one pass

// ---- vectors --------------------------------------------------------------------------------------------------------

// A lane's slot in a head is described at LaneChannels; kWidth elements are 16 bytes.
template <class T, int kWidth, bool kInterleaved, bool kNorms, bool kQuantizes>
__global__ void __launch_bounds__(kThreads, blocks_wanted(kNorms))
    append_vectors_kernel(const __grid_constant__ QkNormRopeAppendProblem p,
                          const __grid_constant__ TokenHeads<3> heads, const Flags flags, const float per_channel) {
  __shared__ uint4 slots[kWarps][kStages * 64];
  let_next_kernel_start();
  const auto token = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int lanes = 1 << heads.log2_lanes;
  const int32_t slot = static_cast<int32_t>(threadIdx.x % 32) & (lanes - 1);
  const bool has_channels = slot < static_cast<int32_t>(p.append.head_dim) / (2 * kWidth);
  const LaneChannels at = lane_channels<kWidth, kInterleaved>(p.rotary, slot);
  const int32_t first = static_cast<int32_t>(blockIdx.y) * heads.passes_per_piece;
  const int32_t end = min(first + heads.passes_per_piece, heads.num_passes[0] + 2 * heads.num_passes[1]);
  const auto row_of_x = [&](int32_t of_kind, int32_t head) { return heads.from[of_kind].row(token, 0, head); };
  HeadCursor<3, decltype(row_of_x)> source(heads, heads.from, first, row_of_x);
  HeadStages<T, kStages> stages(slots[threadIdx.x / 32]);
  source.next();
  const auto fetch = [&](int32_t number) {
    stages.fetch(source.row(), at, number < end && source.is_valid() && has_channels);
    if (number + 1 < end) source.next();
  };
  wait_for_earlier_work();
  if (token >= p.append.num_tokens) {
    if (token == p.append.num_tokens && blockIdx.y == 0) check_offsets(p.append, flags.cache);
    return;
  }
  TokenSearch search(p, token);
  // The heads are on their way while the token's place and its angles are looked up.
#pragma unroll 1
  for (int32_t stage = 0; stage < kStages; ++stage) fetch(first + stage);
  int32_t kind = (first >= heads.num_passes[0]) + (first >= heads.num_passes[0] + heads.num_passes[1]);
  const LaneChannels readable = has_channels ? at : LaneChannels{};
  const auto norm_of_kind = [&]() -> const HeadNorm& { return kind == kQuery ? p.q_norm : p.k_norm; };
  HeadWords weights;
  if constexpr (kNorms) weights = load_weights<T>(norm_of_kind(), readable);
  const TokenPlace token_place = search.place(flags);
  if (!token_place.has_slot) {
    copy_async_wait_all();  // nothing may arrive behind the block's end
    return;
  }
  CachePlace place;
  bool has_row = false;  // once the page has arrived
  const auto row_of_result = [&](int32_t of_kind, int32_t head) {
    const bool in_cache = of_kind != kQuery;
    return heads.to[of_kind].row(in_cache ? place.page : token, in_cache ? place.row : 0, head);
  };
  HeadCursor<3, decltype(row_of_result)> target(heads, heads.to, first, row_of_result);
  const auto store = [&](const HeadWords& words) {
    const bool in_cache = target.kind() != kQuery;
    if (!target.is_valid() || !has_channels || (in_cache && !has_row)) return;
    if (kQuantizes && in_cache) {
      const float scale = kv_cache_scale(p.append.planes[target.kind() - 1], target.head());
      store_quantized_head<T, kWidth>(target.row(), p.append.cache_dtype, scale, at, words);
    } else {
      store_head<T>(target.row(), at, words);
    }
  };
  int32_t number = first;
  if constexpr (kNorms) {
    // Every read of a kind is on its way before anything waits for one of them, the norm of its first head among these.
#pragma unroll 1
    while (kind != kValue) {
      const Angles<kWidth> angles = load_angles<kWidth>(p.rotary, token_place.position, readable, true);
      place = find_cache_place(p.append, token_place.owner);
      float factor = head_factor<T, kWidth>(stages.take(), lanes, has_channels, per_channel, p.epsilon);
      const PairFactors<kWidth> factors =
          pair_factors<T, kWidth, kInterleaved>(norm_of_kind(), weights, angles, readable);
      target.enter_kind();
      has_row = check_cache_place(p.append, flags.cache, place);
      bool has_factor = true;
#pragma unroll 1
      while (true) {
        const HeadWords words = stages.take();
        fetch(number + kStages);
        if (!has_factor) factor = head_factor<T, kWidth>(words, lanes, has_channels, per_channel, p.epsilon);
        store(norm_and_rotate<T, kWidth, kInterleaved>(words, factor, factors));
        if (++number == end) return;
        if (target.ends_kind()) break;
        target.step();
        has_factor = false;
      }
      kind = target.kind() + 1;
      weights = load_weights<T>(norm_of_kind(), readable);
    }
    place = find_cache_place(p.append, token_place.owner);
    target.enter_kind();
    has_row = check_cache_place(p.append, flags.cache, place);
#pragma unroll 1
    while (true) {
      const HeadWords words = stages.take();
      fetch(number + kStages);
      store(words);
      if (++number == end) return;
      target.step();
    }
  } else {
    const Angles<kWidth> angles = load_angles<kWidth>(p.rotary, token_place.position, at, true);
    place = find_cache_place(p.append, token_place.owner);
    target.enter_kind();
    has_row = check_cache_place(p.append, flags.cache, place);
#pragma unroll 1
    while (true) {
      HeadWords words = stages.take();
      fetch(number + kStages);
      if (target.kind() != kValue && at.rotates) words = rotate_words<T, kWidth, kInterleaved>(words, angles);
      store(words);
      if (++number == end) return;
      target.next();
    }
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
  const TokenPlace place = TokenSearch(p, token).place(flags);
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
    factor = norm_factor(sum_over(sum, 32), __frcp_rn(static_cast<float>(p.append.head_dim)), p.epsilon);
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
  launch_early(kernel, blocks, kThreads, 0, stream, p, heads, flags, 1.0f / static_cast<float>(p.append.head_dim));
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
