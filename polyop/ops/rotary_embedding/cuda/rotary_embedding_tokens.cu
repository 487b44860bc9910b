// rotary_embedding_tokens: rotates the channel pairs of all heads of a token by the angles of its position.
// Math      (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in f32; channels from Drot on are copied
// Shapes    q [T, Hq, D] · k [T, Hkv, D] f32, f16, bf16 · cos_sin [Lmax, Drot] f32 · position_ids [T] i32 or i64
// Layout    D dense; every other stride free; 16-byte accesses where addresses and strides allow, else single elements
// Work      a warp takes one token, or with few tokens a share of its heads; a lane keeps the cosines and sines of its
//           channels in registers and walks over the heads, of which two are always on their way to shared memory
// Memory    q and k read once and written once; cos_sin 4 Drot bytes a token and warp
// Roofline  bandwidth: 2 T (Hq + Hkv) D bytes of dtype / copy rate; target 90% of a copy from 4096 tokens on, see
//           docs/performance.md; few tokens: two dependent reads, about 2 us
// Numerics  two f32 products and a sum, fused, then one rounding; bound in README.md
// Limits    none; a token whose position lies outside cos_sin is left unwritten and flagged
#include <cuda_runtime.h>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/early_launch.cuh"
#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/ptx.cuh"
#include "polyop/cuda/rotate.cuh"
#include "polyop/cuda/token_heads.cuh"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksWanted = 8;  // on a multiprocessor
constexpr int kStages = 2;        // passes of a warp on their way
constexpr int kWarpsWanted = 64;  // on a multiprocessor, before a warp takes more than one pass

// ---- kernels --------------------------------------------------------------------------------------------------------

// A lane's slot in a head is described at LaneChannels; kWidth elements are 16 bytes.
template <class T, int kWidth, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, kBlocksWanted)
    rotary_vectors_kernel(const __grid_constant__ RotaryEmbeddingProblem p, const __grid_constant__ TokenHeads<2> heads,
                          ErrorFlag position_flag, bool wide_angles) {
  __shared__ uint4 slots[kWarps][kStages * 64];
  let_next_kernel_start();
  const auto token = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int32_t slot = static_cast<int32_t>(threadIdx.x % 32) & ((1 << heads.log2_lanes) - 1);
  if (token >= p.num_tokens || slot >= static_cast<int32_t>(p.head_dim) / (2 * kWidth)) return;
  const LaneChannels at = lane_channels<kWidth, kInterleaved>(p, slot);
  const int32_t first = static_cast<int32_t>(blockIdx.y) * heads.passes_per_piece;
  const int32_t end = min(first + heads.passes_per_piece, heads.num_passes[0] + heads.num_passes[1]);
  const auto row_of_x = [&](int32_t kind, int32_t head) { return heads.from[kind].row(token, 0, head); };
  HeadCursor<2, decltype(row_of_x)> source(heads, heads.from, first, row_of_x);
  HeadStages<T, kStages> stages(slots[threadIdx.x / 32]);
  source.next();
  const auto fetch = [&](int32_t number) {
    stages.fetch(source.row(), at, number < end && source.is_valid());
    if (number + 1 < end) source.next();
  };
  wait_for_earlier_work();
  // The heads are on their way while the position and its angles are looked up.
#pragma unroll 1
  for (int32_t stage = 0; stage < kStages; ++stage) fetch(first + stage);
  const int64_t position = p.position(token);
  if (position < 0 || position >= p.num_positions) {
    raise_flag(position_flag);
    copy_async_wait_all();  // nothing may arrive behind the block's end
    return;
  }
  const Angles<kWidth> angles = load_angles<kWidth>(p, position, at, wide_angles);
  const auto row_of_out = [&](int32_t kind, int32_t head) { return heads.to[kind].row(token, 0, head); };
  HeadCursor<2, decltype(row_of_out)> target(heads, heads.to, first, row_of_out);
#pragma unroll 1
  for (int32_t number = first; number < end; ++number) {
    target.next();
    HeadWords words = stages.take();
    fetch(number + kStages);
    if (at.rotates) {
      float x[2 * kWidth];
      to_floats<T>(words.low, x);
      to_floats<T>(words.high, x + kWidth);
      rotate_lane<kWidth, kInterleaved>(angles, x);
      words = {from_floats<T>(x), from_floats<T>(x + kWidth)};
    }
    if (target.is_valid()) store_head<T>(target.row(), at, words);
  }
}

// Any width and alignment: a lane takes single pairs, then single channels behind the rotary part.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rotary_elements_kernel(const RotaryEmbeddingProblem p, ErrorFlag position_flag) {
  const int lane = threadIdx.x % 32;
  const int64_t num_heads = p.heads[0].num_heads + (p.num_inputs > 1 ? p.heads[1].num_heads : 0);
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t token = item / num_heads;
  if (token >= p.num_tokens) return;
  const int64_t position = p.position(token);
  if (position < 0 || position >= p.num_positions) {
    raise_flag(position_flag);
    return;
  }
  const float* cosines = p.cos_sin + position * p.cos_sin_stride;
  const float* sines = cosines + p.rotary_dim / 2;
  const int64_t head = item - token * num_heads;
  const bool is_q = head < p.heads[0].num_heads;
  const RotaryHeads& heads = p.heads[is_q ? 0 : 1];
  const int64_t index = is_q ? head : head - p.heads[0].num_heads;
  const T* x = static_cast<const T*>(heads.x) + token * heads.x_token_stride + index * heads.x_head_stride;
  T* out = static_cast<T*>(heads.out) + token * heads.out_token_stride + index * heads.out_head_stride;
  for (int64_t pair = lane; pair < p.rotary_dim / 2; pair += 32) {
    const int64_t first = p.first_channel(pair);
    const int64_t second = p.second_channel(pair);
    float y1 = 0.0f;
    float y2 = 0.0f;
    rotate_pair(to_float(x[first]), to_float(x[second]), cosines[pair], sines[pair], &y1, &y2);
    out[first] = from_float<T>(y1);
    out[second] = from_float<T>(y2);
  }
  for (int64_t channel = p.rotary_dim + lane; channel < p.head_dim; channel += 32) out[channel] = x[channel];
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <class T>
bool takes_vectors(const RotaryEmbeddingProblem& p, int64_t width) {
  AccessWidth access;
  for (int32_t i = 0; i < p.num_inputs; ++i) {
    const RotaryHeads& heads = p.heads[i];
    access.address(heads.x).address(heads.out);
    for (const int64_t stride :
         {heads.x_token_stride, heads.x_head_stride, heads.out_token_stride, heads.out_head_stride}) {
      access.distance(stride * static_cast<int64_t>(sizeof(T)));
    }
  }
  return access.widest() == 16 && p.head_dim % (2 * width) == 0 && p.rotary_dim % (2 * width) == 0 &&
         p.head_dim <= 64 * width;
}

template <class T>
Status launch(const RotaryEmbeddingProblem& p, Stream stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const ErrorFlag flag = error_flag("rotary_embedding: position_ids");
  TokenHeads<2> heads;
  for (int32_t i = 0; i < p.num_inputs; ++i) {
    const RotaryHeads& kind = p.heads[i];
    constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
    heads.num_heads[i] = static_cast<int32_t>(kind.num_heads);
    heads.from[i] = {.data = static_cast<char*>(const_cast<void*>(kind.x)),
                     .outer_stride = kind.x_token_stride * kBytes,
                     .head_stride = kind.x_head_stride * kBytes};
    heads.to[i] = {.data = static_cast<char*>(kind.out),
                   .outer_stride = kind.out_token_stride * kBytes,
                   .head_stride = kind.out_head_stride * kBytes};
  }
  const int64_t num_heads = heads.num_heads[0] + heads.num_heads[1];
  if (num_heads == 0) return Status::ok();
  if (!takes_vectors<T>(p, kWidth)) {
    const int64_t blocks = p.num_tokens * num_heads / kWarps + 1;
    if (blocks > INT32_MAX)
      return unsupported("rotary_embedding: cuda_tokens: too many tokens x heads for unaligned heads");
    rotary_elements_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(p, flag);
    return launch_status("rotary_embedding: cuda_tokens");
  }
  heads.cut(p.head_dim * static_cast<int64_t>(sizeof(T)), p.num_tokens,
            int64_t{device_numbers().num_multiprocessors} * kWarpsWanted);
  const dim3 blocks(static_cast<unsigned>((p.num_tokens + kWarps - 1) / kWarps), static_cast<unsigned>(heads.pieces));
  AccessWidth angles;
  angles.address(p.cos_sin).distance(p.cos_sin_stride * 4).distance(p.rotary_dim / 2 * 4);
  const bool wide_angles = angles.widest() == 16;
  if (p.interleaved) {
    launch_early(rotary_vectors_kernel<T, kWidth, true>, blocks, kThreads, 0, stream, p, heads, flag, wide_angles);
  } else {
    launch_early(rotary_vectors_kernel<T, kWidth, false>, blocks, kThreads, 0, stream, p, heads, flag, wide_angles);
  }
  return launch_status("rotary_embedding: cuda_tokens");
}

}  // namespace

Status rotary_embedding_tokens(const RotaryEmbeddingProblem& problem, Workspace, Stream stream) {
  if (problem.num_tokens == 0 || problem.head_dim == 0) return Status::ok();
  switch (problem.dtype) {
    case DType::kF32:
      return launch<float>(problem, stream);
    case DType::kF16:
      return launch<__half>(problem, stream);
    default:
      return launch<__nv_bfloat16>(problem, stream);
  }
}

}  // namespace polyop::cuda
