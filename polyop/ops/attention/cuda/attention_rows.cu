// attention_rows: every attention that the problem can say, one block for each query row and head.
// Math      scores twice: first for the maximum and the denominator, then for the final (optionally rounded) weights
// Shapes    all of AttentionProblem: any D, Dv, dtype, mask, tree, sinks, normalization, weight rounding
// Work      grid (rows * Hq); four warps share the keys of the row, lanes share D; 256 channels of v a pass
// Memory    k read twice and v once for each query head and row, mostly from cache; no scratch
// Roofline  none: the kernel of last resort, bound by issue (about 2 D / 32 + 20 instructions a key and warp)
// Numerics  f32 sums in a fixed order that depends on the row alone; natural exponent; no visible key: out 0, lse -inf
// Limits    D <= kMostHeadDim; out-of-range lengths are clamped, keys on pages outside the pool zeros, both flagged
#include <cuda_runtime.h>

#include <string>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/ragged.cuh"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cuda/sequence_geometry.cuh"

namespace polyop::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kChannelsPerLane = 8;
constexpr int kChannelsPerPass = 32 * kChannelsPerLane;
constexpr int64_t kMostHeadDim = 4096;  // q of a row lies in shared memory as f32

// ---- device helpers -------------------------------------------------------------------------------------------------

__device__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

/// One (row, query head) at work.
template <class Kv>
struct RowRun {
  const AttentionProblem& p;
  const SequenceGeometry& geometry;
  const AttentionFlags& flags;
  const float* q;  // shared, (D)
  int32_t row;
  int32_t head;
  int32_t kv_head;

  [[nodiscard]] __device__ int64_t mask_offset(int32_t key) const {
    return geometry.sequence * p.mask.sequence_stride + head * p.mask.head_stride + row * p.mask.row_stride +
           key * p.mask.key_stride;
  }

  /// Score of a key on all lanes; -inf when it is hidden.
  [[nodiscard]] __device__ float score(int32_t key) const {
    if (p.tree_mask.words != nullptr && !geometry.tree_allows(p, row, key)) return -INFINITY;
    float bias = 0.0f;
    if (p.mask.data != nullptr) {
      if (p.mask.dtype == DType::kBool) {
        if (static_cast<const uint8_t*>(p.mask.data)[mask_offset(key)] == 0) return -INFINITY;
      } else {
        bias = load_float(p.mask.data, p.mask.dtype, mask_offset(key));
        if (bias == -INFINITY) return -INFINITY;
      }
    }
    const int64_t offset = key_offset(p, p.k, geometry, key, flags.page_table);
    const Kv* k = static_cast<const Kv*>(p.k.data) + max(offset, int64_t{0}) + kv_head * p.k.head_stride;
    float dot = 0.0f;
    for (int d = threadIdx.x % 32; d < p.head_dim; d += 32) {
      dot = fmaf(q[d], offset < 0 ? 0.0f : to_float(k[d]), dot);
    }
    const float k_scale = p.k_scale.data == nullptr ? 1.0f : p.k_scale.data[kv_head * p.k_scale.head_stride];
    return warp_sum(dot) * p.scale * k_scale + bias;
  }

  [[nodiscard]] __device__ float rounded(float weight) const {
    if (p.weight_quantization == AttentionWeightQuantization::kNone) return weight;
    const float scale = *p.weight_scale;
    const float steps = __fdiv_rn(weight, scale);
    if (p.weight_quantization == AttentionWeightQuantization::kF8E4M3) return to_float(from_float<Fp8>(steps)) * scale;
    return isnan(steps) ? steps : fminf(fmaxf(rintf(steps), -128.0f), 127.0f) * scale;
  }
};

__device__ void store_row_element(const AttentionProblem& p, int64_t offset, float value) {
  if (p.output_scale != nullptr) value = __fdiv_rn(value, *p.output_scale);
  store_float(p.out.data, p.out.dtype, offset, value);
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Kv>
__global__ void __launch_bounds__(kThreads)
    attention_rows_kernel(const AttentionProblem p, const AttentionFlags flags) {
  extern __shared__ float q[];  // (D)
  __shared__ float warp_max[kWarps];
  __shared__ float warp_denominator[kWarps];
  __shared__ float partial[kWarps][kChannelsPerPass];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const auto num_heads = static_cast<int32_t>(p.num_query_heads);
  const auto row_number = static_cast<int32_t>(blockIdx.x / num_heads);
  const auto head = static_cast<int32_t>(blockIdx.x - int64_t{row_number} * num_heads);

  const bool packed = p.query_form == AttentionQueryForm::kPacked;
  const int64_t sequence = packed ? find_sequence(p.query_offsets, sequences_with_rows(p, flags), row_number)
                                  : row_number / p.padded_query_length;
  SequenceGeometry geometry;
  if (sequence >= 0) geometry = read_geometry(p, static_cast<int32_t>(sequence), flags);
  const int32_t row = row_number - geometry.row_begin;
  const bool attends = sequence >= 0 && row < geometry.query_rows;
  const int64_t out =
      packed ? row_number * p.out.row_stride + head * p.out.head_stride : row_offset(p, p.out, geometry, row, head);
  const int64_t lse =
      packed ? row_number * p.lse.row_stride + head * p.lse.head_stride : row_offset(p, p.lse, geometry, row, head);

  if (attends) {
    const int64_t offset = row_offset(p, p.q, geometry, row, head);
    for (int d = threadIdx.x; d < p.head_dim; d += kThreads) q[d] = load_float(p.q.data, p.q.dtype, offset + d);
  }
  __syncthreads();  // q to all warps
  const RowRun<Kv> run{p, geometry, flags, q, row, head, static_cast<int32_t>(head / p.group_size())};
  const KeyRange keys = attends ? geometry.visible(p, row) : KeyRange{};
  const bool softmax = p.normalization == AttentionNormalization::kSoftmax;

  float max = -INFINITY;
  float denominator = 1.0f;
  bool empty = !attends;
  if (softmax && attends) {
    float sum = 0.0f;
    for (int32_t key = keys.begin + warp; key < keys.end; key += kWarps) {
      const float score = run.score(key);
      if (score == -INFINITY) continue;
      const float larger = fmaxf(max, score);  // a NaN score makes the sum NaN
      sum = sum * (max == -INFINITY ? 0.0f : expf(max - larger)) + expf(score - larger);
      max = larger;
    }
    if (lane == 0) {
      warp_max[warp] = max;
      warp_denominator[warp] = sum;
    }
    __syncthreads();  // maxima and sums of all warps
    max = fmaxf(fmaxf(warp_max[0], warp_max[1]), fmaxf(warp_max[2], warp_max[3]));
    bool has_nan = false;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) has_nan |= isnan(warp_denominator[w]);
    empty = max == -INFINITY && !has_nan;
    if (!empty) {
      if (p.sinks != nullptr) max = fmaxf(max, p.sinks[head]);
      denominator = p.sinks == nullptr ? 0.0f : expf(p.sinks[head] - max);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (warp_max[w] != -INFINITY || isnan(warp_denominator[w]))
          denominator += warp_denominator[w] * expf(warp_max[w] - max);
      }
    }
  }
  if (threadIdx.x == 0 && p.lse.data != nullptr) {
    static_cast<float*>(p.lse.data)[lse] = empty || !softmax ? -INFINITY : max + logf(denominator);
  }

  for (int first = 0; first < p.value_head_dim; first += kChannelsPerPass) {
    float sum[kChannelsPerLane] = {};
    if (!empty) {
      for (int32_t key = keys.begin + warp; key < keys.end; key += kWarps) {
        const float score = run.score(key);
        if (score == -INFINITY) continue;
        const float weight = run.rounded(softmax ? __fdiv_rn(expf(score - max), denominator) : score);
        const int64_t offset = key_offset(p, p.v, geometry, key, flags.page_table);
        if (offset < 0) continue;
        const Kv* v = static_cast<const Kv*>(p.v.data) + offset + run.kv_head * p.v.head_stride;
#pragma unroll
        for (int i = 0; i < kChannelsPerLane; ++i) {
          const int channel = first + i * 32 + lane;
          if (channel < p.value_head_dim) sum[i] = fmaf(weight, to_float(v[channel]), sum[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kChannelsPerLane; ++i) partial[warp][i * 32 + lane] = sum[i];
    __syncthreads();  // sums of all warps
    const float v_scale = p.v_scale.data == nullptr ? 1.0f : p.v_scale.data[run.kv_head * p.v_scale.head_stride];
    for (int i = threadIdx.x; i < kChannelsPerPass && first + i < p.value_head_dim; i += kThreads) {
      const float total = partial[0][i] + partial[1][i] + partial[2][i] + partial[3][i];
      store_row_element(p, out + first + i, empty ? 0.0f : total * v_scale);
    }
    __syncthreads();  // partial is free for the next pass
  }
}

template <class Kv>
Status launch(const AttentionProblem& p, Stream stream) {
  const auto blocks = static_cast<unsigned>(p.num_query_rows * p.num_query_heads);
  const auto shared_bytes = static_cast<size_t>(p.head_dim) * sizeof(float);
  attention_rows_kernel<Kv><<<blocks, kThreads, shared_bytes, stream_of(stream)>>>(p, attention_flags());
  return launch_status("attention: cuda_rows");
}

}  // namespace

// ---- launch ---------------------------------------------------------------------------------------------------------

Status supports_attention_rows(const AttentionProblem& problem) {
  constexpr int64_t kMostItems = (int64_t{1} << 31) - 1;
  if (problem.head_dim > kMostHeadDim) return unsupported("D is above " + std::to_string(kMostHeadDim));
  if (problem.num_query_rows * problem.num_query_heads > kMostItems) return unsupported("more than 2^31 rows of heads");
  if (problem.kv_capacity > kMostItems - kWarps) return unsupported("2^31 keys or more");  // where a warp is behind all
  return Status::ok();
}

Status attention_rows(const AttentionProblem& problem, Workspace, Stream stream) {
  if (problem.num_query_rows * problem.num_query_heads == 0 || problem.value_head_dim == 0) return Status::ok();
  switch (problem.k.dtype) {
    case DType::kF32:
      return launch<float>(problem, stream);
    case DType::kF16:
      return launch<__half>(problem, stream);
    case DType::kBF16:
      return launch<__nv_bfloat16>(problem, stream);
    case DType::kF8E4M3:
      return launch<Fp8>(problem, stream);
    default:
      return launch<int8_t>(problem, stream);
  }
}

}  // namespace polyop::cuda
