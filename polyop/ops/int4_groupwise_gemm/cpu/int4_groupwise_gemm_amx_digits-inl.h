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

// The lowest 7 bits of `number` as a digit of -64..63; returns the rest.
HWY_INLINE VI16 take_digit(VI16 number, VI16* digit) {
  const DI16 di;
  const VI16 shifted = hn::Add(number, hn::Set(di, 64));
  *digit = hn::Sub(hn::And(shifted, hn::Set(di, 127)), hn::Set(di, 64));
  return hn::ShiftRight<7>(shifted);
}

// 16 integers as kDigits digits, least first: the lower 14 bits become two, balanced around zero, each with its sign;
// so that at most 256 products of {digit 0 + 128 digit 1} with weights of -8..7 add up to 2^24, the upper digits as
// well.
template <int kDigits>
HWY_INLINE void split_digits(VI16 integer, VI16 (&digits)[kDigits]) {
  const DI16 di;
  const VI16 shifted = hn::Add(integer, hn::Set(di, 8192));
  const VI16 lower = hn::Sub(hn::And(shifted, hn::Set(di, 16383)), hn::Set(di, 8192));
  const VI16 upper = hn::ShiftRight<14>(shifted);
  digits[1] = take_digit(lower, &digits[0]);
  if constexpr (kDigits == 4) {
    digits[3] = take_digit(upper, &digits[2]);
  } else {
    digits[2] = upper;
  }
}

// The digits of 16 depths as bytes, in the order of widen_block's rows.
template <int kDigits>
HWY_INLINE void store_digits(VI16 integer, const DigitRow& to, int8_t* at) {
  const __m512i depth_order = _mm512_set_epi32(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0);
  VI16 digits[kDigits];
  split_digits<kDigits>(VI16{_mm512_permutexvar_epi32(depth_order, integer.raw)}, digits);
#pragma GCC unroll 4
  for (int digit = 0; digit < kDigits; ++digit) {
    _mm_store_si128(reinterpret_cast<__m128i*>(at + to.digit_offset(digit)), _mm512_cvtepi32_epi8(digits[digit].raw));
  }
}

// The digits of 16 depths as bf16 numbers, digit d times 128^d 2^unit_exponent, in the order of widen_block_bf16's
// rows.
template <int kDigits>
HWY_INLINE void store_digits_bf16(VI16 integer, int unit_exponent, const DigitRow& to, int8_t* at) {
  const DF16 df;
  VI16 digits[kDigits];
  split_digits<kDigits>(integer, digits);
#pragma GCC unroll 4
  for (int digit = 0; digit < kDigits; ++digit) {
    const VF16 unit = hn::Set(df, power_of_two(unit_exponent + 7 * digit));
    const VF16 number = hn::Mul(hn::ConvertTo(df, digits[digit]), unit);
    _mm256_store_si256(reinterpret_cast<__m256i*>(at + to.digit_offset(digit)),
                       _mm512_cvtepi32_epi16(hn::ShiftRight<16>(hn::BitCast(DI16(), number)).raw));
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
    const auto scale = hn::Set(df, taken ? power_of_two(kBits - exponent) : 0.0f);
    if constexpr (kFew) factors[group * plan.tile_rows] = taken ? power_of_two(exponent - kBits - kWeightBits) : 0.0f;
    int8_t* slot = to.row + group % plan.span_groups * to.slot_stride;
    for (int64_t depth = first; depth < end; depth += 16) {
      auto number = load_step(x, depth, k);
      if (!taken) number = hn::Zero(df);
      const VI16 integer{
          _mm512_cvt_roundps_epi32(hn::Mul(number, scale).raw, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
      int8_t* at = slot + depth / plan.segment_depth * to.segment_stride;
      if constexpr (kFew) {
        store_digits<kDigits>(integer, to, at + depth % plan.segment_depth);
      } else {
        const int unit_exponent = taken ? exponent - kBits : 0;
        store_digits_bf16<kDigits>(integer, unit_exponent, to, at + 2 * (depth % plan.segment_depth));
      }
    }
  }
  return all_taken;
}

// Where digits and their sums stand. 16 rows: a left tile for each digit; tile 0 sums the lower ones, tile 1 the upper
// ones. Up to 8 rows: the upper half of a tile has the upper digits, so there is a tile of even and one of odd digits,
// and one tile of sums. Up to 4 rows: all digits below each other in one tile, and their sums as well.
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
