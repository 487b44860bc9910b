// rotary_embedding_tokens: rotates the channel pairs of all heads of a token by the angles of its position.
// Math      (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) in f32; channels from Drot on are copied
// Shapes    q [T, Hq, D] · k [T, Hkv, D] f32, f16, bf16 · cos_sin [Lmax, Drot] f32 · position_ids [T] i32 or i64
// Layout    D dense; every other stride free; 16-byte accesses where addresses and strides allow, else single elements
// Work      a warp takes one token and kHeadsPerPiece heads of q and k together; a lane keeps the cosines and sines of
//           its channels in registers and walks over the heads, loads of all its heads before the first store
// Memory    q and k read once and written once; cos_sin 4 Drot bytes a token and piece, from cache after the first
// Roofline  bandwidth: 2 T (Hq + Hkv) D bytes of dtype / copy rate; target 90% of a copy from 4096 tokens on; few
//           tokens: two dependent reads, about 2 us
// Numerics  two f32 products and a sum, fused, then one rounding; bound in README.md
// Limits    none; a token whose position lies outside cos_sin is left unwritten and flagged
#include <cuda_runtime.h>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kHeadsPerLane = 2;  // few registers and many warps: a warp mostly waits
constexpr int kBlocksWanted = 7;  // on a multiprocessor

// ---- device helpers -------------------------------------------------------------------------------------------------

/// Addresses of one head of q or k.
template <class T>
struct Head {
  const T* x;
  T* out;
};

template <class T>
__device__ Head<T> head_of(const RotaryEmbeddingProblem& p, int64_t token, int64_t head) {
  const bool is_q = head < p.heads[0].num_heads;
  const RotaryHeads& heads = p.heads[is_q ? 0 : 1];
  const int64_t h = is_q ? head : head - p.heads[0].num_heads;
  return {static_cast<const T*>(heads.x) + token * heads.x_token_stride + h * heads.x_head_stride,
          static_cast<T*>(heads.out) + token * heads.out_token_stride + h * heads.out_head_stride};
}

__device__ inline void rotate(float x1, float x2, float c, float s, float* y1, float* y2) {
  *y1 = fmaf(x1, c, -__fmul_rn(x2, s));
  *y2 = fmaf(x2, c, __fmul_rn(x1, s));
}

/// kWidth neighbouring cosines or sines, in 16-byte accesses when `wide`: kWidth is a multiple of four.
template <int kWidth>
__device__ void load_angles(const float* from, bool wide, float (&angles)[kWidth]) {
  static_assert(kWidth % 4 == 0);
  if (wide) {
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + j));
      angles[j] = four.x;
      angles[j + 1] = four.y;
      angles[j + 2] = four.z;
      angles[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) angles[j] = __ldg(from + j);
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// A lane's slot in a head: half-split, the kWidth pairs from channel slot * kWidth on; interleaved, kWidth pairs in
// 2 * kWidth neighbours; slots behind the rotary part copy 2 * kWidth channels. kWidth is half of what 32 bytes hold.
template <class T, int kWidth, bool kInterleaved>
__global__ void __launch_bounds__(kThreads, kBlocksWanted)
    rotary_vectors_kernel(const RotaryEmbeddingProblem p, ErrorFlag position_flag, int64_t pieces_per_token,
                          bool wide_angles) {
  const int lane = threadIdx.x % 32;
  const auto num_heads = p.heads[0].num_heads + (p.num_inputs > 1 ? p.heads[1].num_heads : 0);
  const int slots = static_cast<int>(p.head_dim / (2 * kWidth));
  const int rotary_slots = static_cast<int>(p.rotary_dim / (2 * kWidth));
  const int heads_per_pass = max(1, 32 / slots);
  const int64_t piece = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t token = piece / pieces_per_token;
  if (token >= p.num_tokens) return;
  const int64_t first_head = (piece - token * pieces_per_token) * heads_per_pass * kHeadsPerLane;
  // More than 32 slots a head: the lane takes several, each over all its heads.
  for (int slot = slots >= 32 ? lane : lane % slots; slot < slots; slot += 32) {
    if (slots < 32 && lane >= heads_per_pass * slots) break;
    const bool rotates = slot < rotary_slots;
    const int low = kInterleaved || !rotates ? slot * 2 * kWidth : slot * kWidth;  // channel of the lane's first access
    const int high = kInterleaved || !rotates ? low + kWidth : low + static_cast<int>(p.rotary_dim / 2);
    Vector<T, kWidth> a[kHeadsPerLane];
    Vector<T, kWidth> b[kHeadsPerLane];
    const int64_t my_head = first_head + (slots >= 32 ? 0 : lane / slots);
#pragma unroll
    for (int i = 0; i < kHeadsPerLane; ++i) {
      const int64_t head = my_head + i * heads_per_pass;
      if (head >= num_heads) break;
      const Head<T> at = head_of<T>(p, token, head);
      a[i] = *reinterpret_cast<const Vector<T, kWidth>*>(at.x + low);
      b[i] = *reinterpret_cast<const Vector<T, kWidth>*>(at.x + high);
    }
    // The heads are on their way while the position and its angles are looked up.
    const int64_t position = p.position(token);
    if (position < 0 || position >= p.num_positions) {
      if (position_flag != nullptr) *position_flag = 1;
      return;
    }
    const float* cosines = p.cos_sin + position * p.cos_sin_stride;
    const float* sines = cosines + p.rotary_dim / 2;
    float c[kWidth];
    float s[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) c[j] = s[j] = 0.0f;
    if (rotates) {
      load_angles(cosines + slot * kWidth, wide_angles, c);
      load_angles(sines + slot * kWidth, wide_angles, s);
    }
#pragma unroll
    for (int i = 0; i < kHeadsPerLane; ++i) {
      const int64_t head = my_head + i * heads_per_pass;
      if (head >= num_heads) break;
      const Head<T> at = head_of<T>(p, token, head);
      if (rotates) {
        Vector<T, kWidth> y1 = a[i];
        Vector<T, kWidth> y2 = b[i];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          float f1 = 0.0f;
          float f2 = 0.0f;
          if constexpr (kInterleaved) {
            // Channels 2j and 2j + 1 of the 2 * kWidth in a and b.
            const T x1 = 2 * j < kWidth ? a[i].values[(2 * j) % kWidth] : b[i].values[(2 * j) % kWidth];
            const T x2 = 2 * j < kWidth ? a[i].values[(2 * j + 1) % kWidth] : b[i].values[(2 * j + 1) % kWidth];
            rotate(to_float(x1), to_float(x2), c[j], s[j], &f1, &f2);
            Vector<T, kWidth>& y = 2 * j < kWidth ? y1 : y2;
            y.values[(2 * j) % kWidth] = from_float<T>(f1);
            y.values[(2 * j + 1) % kWidth] = from_float<T>(f2);
          } else {
            rotate(to_float(a[i].values[j]), to_float(b[i].values[j]), c[j], s[j], &f1, &f2);
            y1.values[j] = from_float<T>(f1);
            y2.values[j] = from_float<T>(f2);
          }
        }
        a[i] = y1;
        b[i] = y2;
      }
      store_vector(at.out + low, a[i]);
      store_vector(at.out + high, b[i]);
    }
  }
}

// Any width and alignment: a lane takes single pairs, then single channels behind the rotary part.
template <class T>
__global__ void __launch_bounds__(kThreads)
    rotary_elements_kernel(const RotaryEmbeddingProblem p, ErrorFlag position_flag) {
  const int lane = threadIdx.x % 32;
  const auto num_heads = p.heads[0].num_heads + (p.num_inputs > 1 ? p.heads[1].num_heads : 0);
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t token = item / num_heads;
  if (token >= p.num_tokens) return;
  const int64_t position = p.position(token);
  if (position < 0 || position >= p.num_positions) {
    if (position_flag != nullptr) *position_flag = 1;
    return;
  }
  const float* cosines = p.cos_sin + position * p.cos_sin_stride;
  const float* sines = cosines + p.rotary_dim / 2;
  const Head<T> at = head_of<T>(p, token, item - token * num_heads);
  for (int64_t pair = lane; pair < p.rotary_dim / 2; pair += 32) {
    const int64_t first = p.interleaved ? 2 * pair : pair;
    const int64_t second = p.interleaved ? 2 * pair + 1 : pair + p.rotary_dim / 2;
    float y1 = 0.0f;
    float y2 = 0.0f;
    rotate(to_float(at.x[first]), to_float(at.x[second]), cosines[pair], sines[pair], &y1, &y2);
    at.out[first] = from_float<T>(y1);
    at.out[second] = from_float<T>(y2);
  }
  for (int64_t channel = p.rotary_dim + lane; channel < p.head_dim; channel += 32) at.out[channel] = at.x[channel];
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
  return access.widest() == 16 && p.head_dim % (2 * width) == 0 && p.rotary_dim % (2 * width) == 0;
}

template <class T>
Status launch(const RotaryEmbeddingProblem& p, Stream stream) {
  constexpr int kWidth = 16 / sizeof(T);
  const ErrorFlag flag = error_flag("rotary_embedding: position_ids");
  const int64_t num_heads = p.heads[0].num_heads + (p.num_inputs > 1 ? p.heads[1].num_heads : 0);
  if (num_heads == 0) return Status::ok();
  constexpr int64_t kMostBlocks = int64_t{1} << 30;
  if (!takes_vectors<T>(p, kWidth)) {
    const auto blocks = static_cast<unsigned>(blocks_for(p.num_tokens * num_heads, kWarps, kMostBlocks));
    rotary_elements_kernel<T><<<blocks, kThreads, 0, stream_of(stream)>>>(p, flag);
    return launch_status("rotary_embedding: cuda_tokens");
  }
  const int64_t slots = p.head_dim / (2 * kWidth);
  const int64_t heads_per_piece = std::max<int64_t>(1, 32 / slots) * kHeadsPerLane;
  const int64_t pieces = (num_heads + heads_per_piece - 1) / heads_per_piece;
  const auto blocks = static_cast<unsigned>(blocks_for(p.num_tokens * pieces, kWarps, kMostBlocks));
  AccessWidth angles;
  angles.address(p.cos_sin).distance(p.cos_sin_stride * 4).distance(p.rotary_dim / 2 * 4);
  const bool wide_angles = angles.widest() == 16;
  if (p.interleaved) {
    rotary_vectors_kernel<T, kWidth, true><<<blocks, kThreads, 0, stream_of(stream)>>>(p, flag, pieces, wide_angles);
  } else {
    rotary_vectors_kernel<T, kWidth, false><<<blocks, kThreads, 0, stream_of(stream)>>>(p, flag, pieces, wide_angles);
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
