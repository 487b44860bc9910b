// Elementary functions on f32 vectors.
//
// Included once per SIMD target, from a file that uses hwy/foreach_target.h.
#if defined(POLYOP_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_CPU_SIMD_MATH_INL_H_
#undef POLYOP_CPU_SIMD_MATH_INL_H_
#else
#define POLYOP_CPU_SIMD_MATH_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 2^x for x <= 127, at most 2 ulp off. 2^0 is exactly 1; x < -126 (and -inf) gives 0, NaN gives NaN.
///
/// x = n + f with n the nearest integer, so |f| <= 1/2. 2^f = 1 + f P(f) with the minimax polynomial P of degree 5
/// (relative error 4.0e-9, rounded coefficients included); the rest of the error is the rounding of the last two steps.
template <class D>
HWY_INLINE hn::Vec<D> exp2(D d, hn::Vec<D> x) {
  const auto lowest = hn::Set(d, -126.0f);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  const auto n = hn::Round(x);
  const auto f = hn::Sub(x, n);
#else
  const hn::RebindToSigned<D> di;
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum.
  const auto to_integer = hn::Set(d, 0x1.8p23f);
  const auto shifted = hn::Add(hn::Max(x, lowest), to_integer);
  // From x and not from its clamped value: a NaN survives.
  const auto f = hn::Sub(x, hn::Sub(shifted, to_integer));
#endif
  auto p = hn::Set(d, 0x1.3eb2ap-13f);
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.5f0b86p-10f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b320ap-7f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6af76p-5f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbd6p-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e43p-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  static_assert(hn::MaxLanes(d) == 16);
  const __mmask16 is_kept = _mm512_cmp_ps_mask(x.raw, lowest.raw, _CMP_NLT_UQ);
  return hn::Vec<D>{_mm512_maskz_scalef_ps(is_kept, p.raw, n.raw)};
#else
  const auto one_bits = hn::Set(di, 0x3f800000);
  const auto power = hn::BitCast(d, hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), one_bits));
  return hn::IfThenZeroElse(hn::Lt(x, lowest), hn::Mul(p, power));
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_CPU_SIMD_MATH_INL_H_
