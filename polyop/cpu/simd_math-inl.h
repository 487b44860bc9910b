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

/// 2^x, at most 2 ulp off. 2^0 is exactly 1; x < -126 (and -inf) gives 0, x >= 127.5 gives +inf, NaN gives NaN.
///
/// x = n + f with n the nearest integer, so |f| <= 1/2. 2^f = 1 + f P(f) with the minimax polynomial P of degree 5
/// (relative error 4.0e-9, rounded coefficients included); the rest of the error is the rounding of the last two steps.
template <class D>
HWY_INLINE hn::Vec<D> exp2(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto lowest = hn::Set(d, -126.0f);
  // The clamp keeps the integer in range; f comes from the unclamped x, so a NaN survives.
  const auto n = hn::NearestInt(hn::Min(hn::Max(x, lowest), hn::Set(d, 128.0f)));
  const auto f = hn::Sub(x, hn::ConvertTo(d, n));
  auto p = hn::Set(d, 0x1.3eb2ap-13f);
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.5f0b86p-10f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b320ap-7f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6af76p-5f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbd6p-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e43p-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127))));
  return hn::IfThenZeroElse(hn::Lt(x, lowest), hn::Mul(p, power));
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_CPU_SIMD_MATH_INL_H_
