// Scalar float types below 32 bits: storage plus exact widening and round-to-nearest-even narrowing. Used by references
// and by the scalar edges of kernels; vector code uses the bricks in polyop/cpu.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "polyop/core/dtype.h"

namespace polyop {

/// IEEE binary16.
struct F16 {
  uint16_t bits;

  static F16 from_float(float value) {
    const uint32_t x = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (x >> 16) & 0x8000u;
    const uint32_t magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu))};  // NaN
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds past 65504: infinity
    if (magnitude < 0x33000001u) return {static_cast<uint16_t>(sign)};             // at most half the least subnormal
    if (magnitude < 0x38800000u) {  // subnormal result: shift the explicit mantissa, round to nearest even
      const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      const uint32_t shift = 126u - (magnitude >> 23);
      uint32_t rounded = mantissa >> shift;
      const uint32_t rest = mantissa & ((1u << shift) - 1u);
      const uint32_t half = 1u << (shift - 1u);
      if (rest > half || (rest == half && (rounded & 1u))) ++rounded;
      return {static_cast<uint16_t>(sign | rounded)};
    }
    const uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
    const uint32_t rounded = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
    return {static_cast<uint16_t>(sign | rounded)};
  }

  [[nodiscard]] float to_float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
};

/// bfloat16: the upper half of a binary32.
struct BF16 {
  uint16_t bits;

  static BF16 from_float(float value) {
    const uint32_t x = std::bit_cast<uint32_t>(value);
    if ((x & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((x >> 16) | 0x40u)};  // quiet NaN
    return {static_cast<uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16)};
  }

  [[nodiscard]] float to_float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

/// FP8 E4M3FN: exponent bias 7, no infinity, NaN is 0x7f/0xff, largest finite value 448.
struct F8E4M3 {
  uint8_t bits;

  static constexpr float kMax = 448.0f;

  /// Nearest even, saturated to +-448 (infinities too); NaN stays NaN.
  static F8E4M3 from_float(float value) {
    const uint32_t x = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (x >> 24) & 0x80u;
    const uint32_t magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
    if (magnitude >= std::bit_cast<uint32_t>(kMax)) return {static_cast<uint8_t>(sign | 0x7eu)};
    if (magnitude <
        0x3c800000u) {  // below 2^-6: steps of 2^-9; adding 2^14 leaves the rounded multiple in the low bits
      const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
      return {static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) & 0xffu))};
    }
    const uint32_t rebased = magnitude - (120u << 23);  // exponent bias 127 -> 7
    const uint32_t rounded = (rebased + 0x7ffffu + ((rebased >> 20) & 1u)) >> 20;
    return {static_cast<uint8_t>(sign | rounded)};
  }

  [[nodiscard]] float to_float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
    const uint32_t magnitude = bits & 0x7fu;
    if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
    if (magnitude >= 8u) return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign ? -value : value;
  }
};

inline float to_float(float value) { return value; }
inline float to_float(F16 value) { return value.to_float(); }
inline float to_float(BF16 value) { return value.to_float(); }
inline float to_float(F8E4M3 value) { return value.to_float(); }
inline float to_float(int8_t value) { return static_cast<float>(value); }

/// `value` rounded to T (nearest even). int8_t saturates to [-128, 127] and makes 0 of a NaN.
template <class T>
T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, int8_t>) {
    if (std::isnan(value)) return 0;
    return static_cast<int8_t>(std::nearbyint(std::clamp(value, -128.0f, 127.0f)));
  } else {
    return T::from_float(value);
  }
}

/// DType of a C++ element type.
template <class T>
inline constexpr DType kDTypeOf = [] {
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, F16>) return DType::kF16;
  if constexpr (std::is_same_v<T, BF16>) return DType::kBF16;
  if constexpr (std::is_same_v<T, F8E4M3>) return DType::kF8E4M3;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kI64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, int8_t>) return DType::kI8;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::kU8;
  if constexpr (std::is_same_v<T, bool>) return DType::kBool;
}();

}  // namespace polyop
