// Storage types to f32 and back on the device, with the rounding of polyop/core/numeric_types.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "polyop/core/dtype.h"

namespace polyop::cuda {

/// FP8 E4M3FN as it lies in memory.
struct Fp8 {
  uint8_t bits;
};

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(int8_t value) { return static_cast<float>(value); }
__device__ inline float to_float(Fp8 value) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(value.bits, __NV_E4M3)));
}

/// Two E4M3 bytes (low half of `pair`) as f16x2, exactly.
__device__ inline uint32_t widen_f8e4m3(uint32_t pair) {
  const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return static_cast<uint32_t>(halves.x) | (static_cast<uint32_t>(halves.y) << 16);
}

/// `value` rounded to nearest even; FP8 saturates to +-448, int8 to [-128, 127] with 0 for a NaN.
template <class T>
__device__ inline T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<T, Fp8>) {
    return {static_cast<uint8_t>(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3))};
  } else {
    static_assert(std::is_same_v<T, int8_t>);
    if (isnan(value)) return 0;
    return static_cast<int8_t>(__float2int_rn(fminf(fmaxf(value, -128.0f), 127.0f)));
  }
}

/// The elements of 16 bytes as to_float widens them.
template <class T>
__device__ void to_floats(const uint4& words, float* values) {
  const uint32_t parts[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      values[i] = __uint_as_float(parts[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&parts[i]));
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    } else {
      static_assert(std::is_same_v<T, __nv_bfloat16>);
      values[2 * i] = __uint_as_float(parts[i] << 16), values[2 * i + 1] = __uint_as_float(parts[i] & 0xffff0000u);
    }
  }
}

/// 16 bytes of elements, rounded as from_float rounds them.
template <class T>
__device__ uint4 from_floats(const float* values) {
  uint32_t parts[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      parts[i] = __float_as_uint(values[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      parts[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      static_assert(std::is_same_v<T, __nv_bfloat16>);
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      parts[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return {parts[0], parts[1], parts[2], parts[3]};
}

/// Element `index` of memory whose dtype is known at run time only (f32, f16, bf16, f8e4m3, i8).
__device__ inline float load_float(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[index];
    case DType::kF16:
      return to_float(static_cast<const __half*>(data)[index]);
    case DType::kBF16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::kF8E4M3:
      return to_float(static_cast<const Fp8*>(data)[index]);
    default:
      return to_float(static_cast<const int8_t*>(data)[index]);
  }
}

/// Rounds and stores element `index` (f32, f16, bf16, f8e4m3).
__device__ inline void store_float(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kF32:
      static_cast<float*>(data)[index] = value;
      break;
    case DType::kF16:
      static_cast<__half*>(data)[index] = from_float<__half>(value);
      break;
    case DType::kBF16:
      static_cast<__nv_bfloat16*>(data)[index] = from_float<__nv_bfloat16>(value);
      break;
    default:
      static_cast<Fp8*>(data)[index] = from_float<Fp8>(value);
      break;
  }
}

}  // namespace polyop::cuda
