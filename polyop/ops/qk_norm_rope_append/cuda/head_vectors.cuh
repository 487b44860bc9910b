// A lane's channels of a head in registers: norm, rotation and quantization of 16-byte vectors.
#pragma once

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/kv_cache_rows.cuh"
#include "polyop/cuda/rotate.cuh"
#include "polyop/cuda/token_heads.cuh"
#include "polyop/ops/qk_norm_rope_append/cuda/head_places.cuh"

namespace polyop::cuda {

// ---- norm and rotation ----------------------------------------------------------------------------------------------

/// Weights and angles of a token in one, for all heads of a kind: with f the norm's factor of the head, a pair becomes
/// (f x1 first_cos - f x2 second_sin, f x2 second_cos + f x1 first_sin).
template <int kWidth>
struct PairFactors {
  float first_cos[kWidth];
  float first_sin[kWidth];
  float second_cos[kWidth];
  float second_sin[kWidth];
};

/// A lane's weights of a kind, read long before they are needed; nothing when they are wider than T.
template <class T>
__device__ HeadWords load_weights(const HeadNorm& norm, const LaneChannels& at) {
  if (sizeof(T) < sizeof(float) && norm.weight_dtype == DType::kF32) return {};
  const T* weights = static_cast<const T*>(norm.weight);
  return {__ldg(reinterpret_cast<const uint4*>(weights + at.low)),
          __ldg(reinterpret_cast<const uint4*>(weights + at.high))};
}

/// `words` as load_weights read them.
template <class T, int kWidth, bool kInterleaved>
__device__ PairFactors<kWidth> pair_factors(const HeadNorm& norm, const HeadWords& words, const Angles<kWidth>& angles,
                                            const LaneChannels& at) {
  float weights[2][kWidth];
  if (sizeof(T) < sizeof(float) && norm.weight_dtype == DType::kF32) {
    load_floats(static_cast<const float*>(norm.weight) + at.low, true, weights[0]);
    load_floats(static_cast<const float*>(norm.weight) + at.high, true, weights[1]);
  } else {
    to_floats<T>(words.low, weights[0]);
    to_floats<T>(words.high, weights[1]);
  }
  const float* all = weights[0];
  PairFactors<kWidth> factors;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float first = all[kInterleaved ? 2 * j : j];
    const float second = all[kInterleaved ? 2 * j + 1 : kWidth + j];
    factors.first_cos[j] = __fmul_rn(first, angles.c[j]);
    factors.first_sin[j] = __fmul_rn(first, angles.s[j]);
    factors.second_cos[j] = __fmul_rn(second, angles.c[j]);
    factors.second_sin[j] = __fmul_rn(second, angles.s[j]);
  }
  if (!at.rotates) {  // an infinite weight is none of its neighbour's business
#pragma unroll
    for (int j = 0; j < kWidth; ++j) factors.first_sin[j] = factors.second_sin[j] = 0.0f;
  }
  return factors;
}

/// The norm's factor of a lane's head. Every lane of the warp takes part, those without channels with zeros.
template <class T, int kWidth>
__device__ float head_factor(const HeadWords& words, int lanes, bool has_channels, float per_channel, float epsilon) {
  float x[2 * kWidth];
  to_floats<T>(words.low, x);
  to_floats<T>(words.high, x + kWidth);
  float sum = 0.0f;
  float other = 0.0f;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    sum = fmaf(x[j], x[j], sum);
    other = fmaf(x[kWidth + j], x[kWidth + j], other);
  }
  return norm_factor(sum_over(has_channels ? sum + other : 0.0f, lanes), per_channel, epsilon);
}

template <class T, int kWidth, bool kInterleaved>
__device__ HeadWords norm_and_rotate(const HeadWords& words, float factor, const PairFactors<kWidth>& factors) {
  float x[2 * kWidth];
  to_floats<T>(words.low, x);
  to_floats<T>(words.high, x + kWidth);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float& first = x[kInterleaved ? 2 * j : j];
    float& second = x[kInterleaved ? 2 * j + 1 : kWidth + j];
    const float n1 = __fmul_rn(first, factor);
    const float n2 = __fmul_rn(second, factor);
    first = fmaf(n1, factors.first_cos[j], -__fmul_rn(n2, factors.second_sin[j]));
    second = fmaf(n2, factors.second_cos[j], __fmul_rn(n1, factors.first_sin[j]));
  }
  return {from_floats<T>(x), from_floats<T>(x + kWidth)};
}

template <class T, int kWidth, bool kInterleaved>
__device__ HeadWords rotate_words(const HeadWords& words, const Angles<kWidth>& angles) {
  float x[2 * kWidth];
  to_floats<T>(words.low, x);
  to_floats<T>(words.high, x + kWidth);
  rotate_lane<kWidth, kInterleaved>(angles, x);
  return {from_floats<T>(x), from_floats<T>(x + kWidth)};
}

// ---- quantization ---------------------------------------------------------------------------------------------------

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

}  // namespace polyop::cuda
