// Vectors of f32 lanes to f8e4m3 or i8 memory, rounded to nearest even: bit for bit what polyop/core/numeric_types.h
// gives. f8e4m3: NaN stays NaN, beyond +-448 saturates · i8: NaN gives 0, beyond [-128, 127] saturates.
//
// Included once per SIMD target, from a file that uses hwy/foreach_target.h.
#if defined(POLYOP_CPU_SIMD_QUANTIZE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_CPU_SIMD_QUANTIZE_INL_H_
#undef POLYOP_CPU_SIMD_QUANTIZE_INL_H_
#else
#define POLYOP_CPU_SIMD_QUANTIZE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "polyop/core/numeric_types.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

template <class D>
HWY_INLINE void store_quantized(D d, hn::Vec<D> value, int8_t* to) {
  const hn::Rebind<int8_t, D> d8;
  const auto number = hn::IfThenZeroElse(hn::IsNaN(value), value);
  const auto clamped = hn::Min(hn::Max(number, hn::Set(d, -128.0f)), hn::Set(d, 127.0f));
  hn::StoreU(hn::DemoteTo(d8, hn::NearestInt(clamped)), d8, to);
}

template <class D>
HWY_INLINE void store_quantized(D d, hn::Vec<D> value, F8E4M3* to) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint8_t, D> d8;
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, value)), hn::Set(du, 0x80u));
  const auto magnitude = hn::Min(hn::Abs(value), hn::Set(d, F8E4M3::kMax));
  // Below 2^-6 the steps are 2^-9: adding 2^14 leaves the rounded multiple in the low bits.
  const auto subnormal = hn::And(hn::BitCast(du, hn::Add(magnitude, hn::Set(d, 0x1p14f))), hn::Set(du, 0xffu));
  // Exponent bias 127 -> 7, 20 of 23 mantissa bits rounded away.
  const auto rebased = hn::Sub(hn::BitCast(du, magnitude), hn::Set(du, 120u << 23));
  const auto odd = hn::And(hn::ShiftRight<20>(rebased), hn::Set(du, 1u));
  const auto normal = hn::ShiftRight<20>(hn::Add(hn::Add(rebased, hn::Set(du, 0x7ffffu)), odd));
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(magnitude, hn::Set(d, 0x1p-6f)));
  const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
  const auto finite = hn::IfThenElse(is_subnormal, subnormal, normal);
  const auto code = hn::Or(hn::IfThenElse(is_nan, hn::Set(du, 0x7fu), finite), sign);
  hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, code)), d8, &to->bits);
}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_CPU_SIMD_QUANTIZE_INL_H_
