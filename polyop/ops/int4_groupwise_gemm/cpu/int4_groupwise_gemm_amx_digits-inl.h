// x as digits of integers, for the AMX kernel of int4_groupwise_gemm; int4_groupwise_gemm_amx.cpp derives the
// arithmetic.
//
// Included once per SIMD target.
#if defined(POLYOP_INT4_GROUPWISE_GEMM_AMX_DIGITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_INT4_GROUPWISE_GEMM_AMX_DIGITS_INL_H_
#undef POLYOP_INT4_GROUPWISE_GEMM_AMX_DIGITS_INL_H_
#else
#define POLYOP_INT4_GROUPWISE_GEMM_AMX_DIGITS_INL_H_
#endif

#include <hwy/highway.h>
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "polyop/cpu/bf16_pieces-inl.h"
#include "polyop/cpu/simd_convert-inl.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_plan.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF16 = hn::CappedTag<float, 16>;
using VF16 = hn::Vec<DF16>;
using DI16 = hn::RebindToSigned<DF16>;
using VI16 = hn::Vec<DI16>;

// Where the digits of a row go, in bytes: those of a segment at row + segment * segment_stride + slot * slot_stride,
// the slot being the group's place among those that share a tile of sums; digit d of them at d % 2 * digit_stride + d /
// 2 * half_stride.
struct DigitRow {
  int8_t* row;
  int64_t segment_stride;
  int64_t slot_stride;
  int64_t digit_stride;
  int64_t half_stride;

  [[nodiscard]] int64_t digit_offset(int digit) const { return digit % 2 * digit_stride + digit / 2 * half_stride; }
};

// 16 numbers of x from `depth`; what lies at k or beyond is not read, and zero.
template <class T>
HWY_INLINE VF16 load_step(const T* HWY_RESTRICT x, int64_t depth, int64_t k) {
  const DF16 df;
  if (depth + 16 <= k) return load_f32(df, x + depth);
  if (depth >= k) return hn::Zero(df);
  return load_f32_n(df, x + depth, static_cast<size_t>(k - depth));
}

// The bits of x's integers: |x| < 2^exponent becomes round(x 2^(bits - exponent)), at most 2^bits.
template <int kDigits>
inline constexpr int kIntegerBits = kDigits == 4 ? 26 : 20;

// The multiple of 2^exponent nearest to `number`, at most 2^22 of them: the sum has no bits below.
HWY_INLINE VF16 round_to(VF16 number, int exponent) {
  const DF16 df;
  const VF16 shifter = hn::Set(df, 0x1.8p23f * power_of_two(exponent));
  return hn::Sub(hn::Add(number, shifter), shifter);
}

// The integers of 16 numbers in units of 2^unit_exponent as kDigits digits, least first, digit d as a multiple of 128^d
// units; every step but the roundings is exact. What the upper digits leave is at most 2^13 units either way, two
// digits: so at most 256 products of it with weights of -8..7 add up to 2^24, and those of the upper digits as well.
template <int kDigits>
HWY_INLINE void split_digits(VF16 number, int unit_exponent, VF16 (&digits)[kDigits]) {
  const VF16 upper = round_to(number, unit_exponent + 14);
  const VF16 lower = hn::Sub(number, upper);
  digits[1] = round_to(lower, unit_exponent + 7);
  digits[0] = round_to(hn::Sub(lower, digits[1]), unit_exponent);
  if constexpr (kDigits == 4) {
    digits[3] = round_to(upper, unit_exponent + 21);
    digits[2] = hn::Sub(upper, digits[3]);
  } else {
    digits[2] = upper;
  }
}

// The digits of 16 depths as bytes, in the order of widen_block's rows.
template <int kDigits>
HWY_INLINE void store_digits(VF16 number, int unit_exponent, const DigitRow& to, int8_t* at) {
  const DF16 df;
  const __m512i depth_order = _mm512_set_epi32(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0);
  VF16 digits[kDigits];
  split_digits<kDigits>(VF16{_mm512_permutexvar_ps(depth_order, number.raw)}, unit_exponent, digits);
#pragma GCC unroll 4
  for (int digit = 0; digit < kDigits; ++digit) {
    const VF16 units = hn::Mul(digits[digit], hn::Set(df, power_of_two(-unit_exponent - 7 * digit)));
    _mm_store_si128(reinterpret_cast<__m128i*>(at + to.digit_offset(digit)),
                    _mm512_cvtepi32_epi8(hn::ConvertTo(DI16(), units).raw));
  }
}

// The digits of 16 depths as bf16 numbers, in the order of widen_block_bf16's rows.
template <int kDigits>
HWY_INLINE void store_digits_bf16(VF16 number, int unit_exponent, const DigitRow& to, int8_t* at) {
  const DF16 df;
  VF16 digits[kDigits];
  split_digits<kDigits>(number, unit_exponent, digits);
#pragma GCC unroll 4
  for (int digit = 0; digit < kDigits; ++digit) {
    const auto packed = pack_bf16(df, digits[digit], digits[digit]);
    _mm256_store_si256(reinterpret_cast<__m256i*>(at + to.digit_offset(digit)), _mm512_castsi512_si256(packed.raw));
  }
}

// One row of x as digits. Few rows: at factors[group * tile_rows] what a sum of products with them stands for; many:
// the digits contain it. Returns false if there is a group that must be left to another kernel; it counts as zero.
template <int kDigits, bool kFew, class T>
bool pack_row(const T* HWY_RESTRICT x, int64_t k, int64_t group_size, const AmxPlan& plan, const DigitRow& to,
              float* HWY_RESTRICT factors) {
  constexpr int kBits = kIntegerBits<kDigits>;
  constexpr int kWeightBits = 4;  // weight bytes are 16 (q - 8)
  const DF16 df;
  const hn::RebindToUnsigned<DF16> du;
  bool all_taken = true;
  for (int64_t group = 0; group < plan.groups; ++group) {
    const int64_t first = group * group_size;
    const int64_t end = std::min(first + group_size, plan.segments * plan.segment_depth);
    auto largest = hn::Zero(du);
    for (int64_t depth = first; depth < end; depth += 16) {
      largest = hn::Max(largest, hn::BitCast(du, hn::Abs(load_step(x, depth, k))));
    }
    const uint32_t largest_bits = _mm512_reduce_max_epu32(largest.raw);
    const int exponent = std::max(static_cast<int>(largest_bits >> 23) - 126, kAmxLeastExponent);
    const bool taken = exponent <= kAmxGreatestExponent;
    all_taken &= taken;
    const int unit_exponent = taken ? exponent - kBits : 0;
    if constexpr (kFew) factors[group * plan.tile_rows] = power_of_two(unit_exponent - kWeightBits);
    int8_t* slot = to.row + group % plan.span_groups * to.slot_stride;
    for (int64_t depth = first; depth < end; depth += 16) {
      const VF16 number = taken ? load_step(x, depth, k) : hn::Zero(df);
      int8_t* at = slot + depth / plan.segment_depth * to.segment_stride;
      if constexpr (kFew) {
        store_digits<kDigits>(number, unit_exponent, to, at + depth % plan.segment_depth);
      } else {
        store_digits_bf16<kDigits>(number, unit_exponent, to, at + 2 * (depth % plan.segment_depth));
      }
    }
  }
  return all_taken;
}

// Where digits stand. 16 rows: a left tile for each digit. Up to 8 rows: a tile of even and one of odd digits, the
// upper digits in its upper half. Up to 4 rows: all digits below each other in one tile.
template <int kRows>
DigitRow digits_of_row(int8_t* left, int64_t row, const AmxPlan& plan) {
  const int64_t row_bytes = plan.left_tile_bytes() / kAmxRows;
  const int64_t tile_bytes = plan.left_tile_bytes();
  return {.row = left + row * row_bytes,
          .segment_stride = plan.digits * tile_bytes,
          .slot_stride = 0,
          .digit_stride = kRows == 4 ? 4 * row_bytes : tile_bytes,
          .half_stride = kRows == 16 ? 2 * tile_bytes : 8 * row_bytes};
}

// Calls fn.operator()<kRows>() with the row count of the tile for `rows` of 1 to 16 rows.
template <class Fn>
auto with_tile_rows(int64_t rows, Fn&& fn) {
  if (rows <= 4) return fn.template operator()<4>();
  if (rows <= 8) return fn.template operator()<8>();
  return fn.template operator()<16>();
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_INT4_GROUPWISE_GEMM_AMX_DIGITS_INL_H_
