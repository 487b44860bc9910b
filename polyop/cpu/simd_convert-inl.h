// Vector loads and stores of f32, f16 and bf16 memory as f32 lanes. Widening is exact; narrowing rounds to nearest
// even, as the scalar types in polyop/core/numeric_types.h do. No access reaches past the elements asked for.
//
// Included once per SIMD target, from a file that uses hwy/foreach_target.h.
#if defined(POLYOP_CPU_SIMD_CONVERT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_CPU_SIMD_CONVERT_INL_H_
#undef POLYOP_CPU_SIMD_CONVERT_INL_H_
#else
#define POLYOP_CPU_SIMD_CONVERT_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "polyop/core/numeric_types.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// One where the target converts binary16 in hardware; elsewhere it is done with integer arithmetic, because Highway's
/// own fallback turns infinities into finite numbers.
#undef POLYOP_SIMD_HAS_F16
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2) || HWY_ARCH_ARM_A64  // better targets have lower numbers
#define POLYOP_SIMD_HAS_F16 1
#else
#define POLYOP_SIMD_HAS_F16 0
#endif

// ---- widening
// --------------------------------------------------------------------------------------------------------

template <class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const BF16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> du;
  const auto bits = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

template <class D>
HWY_INLINE hn::Vec<D> load_f32(D d, const F16* from) {
#if POLYOP_SIMD_HAS_F16
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
#else
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::PromoteTo(du, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffu));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto rebias = hn::Set(du, 112u << 23);
  const auto finite = hn::Add(shifted, rebias);
  const auto special = hn::Add(finite, rebias);  // exponent 31 becomes 255: infinity and NaN keep their kind
  const auto subnormal = hn::Mul(hn::ConvertTo(d, hn::BitCast(di, magnitude)), hn::Set(d, 0x1p-24f));
  const auto signed_magnitude = hn::BitCast(di, magnitude);
  const auto is_special = hn::Gt(signed_magnitude, hn::Set(di, 0x7bff));
  const auto is_subnormal = hn::Lt(signed_magnitude, hn::Set(di, 0x0400));
  auto wide = hn::IfThenElse(is_special, hn::BitCast(di, special), hn::BitCast(di, finite));
  wide = hn::IfThenElse(is_subnormal, hn::BitCast(di, subnormal), wide);
  return hn::BitCast(d, hn::Or(hn::BitCast(du, wide), sign));
#endif
}

/// The first `count` elements in the low lanes, zero in the others; count <= Lanes(d).
template <class D, class T>
HWY_INLINE hn::Vec<D> load_f32_n(D d, const T* from, size_t count) {
  HWY_ALIGN T lanes[hn::MaxLanes(d)] = {};
  std::memcpy(static_cast<void*>(lanes), from, count * sizeof(T));
  return load_f32(d, lanes);
}

// ---- narrowing
// -------------------------------------------------------------------------------------------------------

template <class D>
HWY_INLINE void store_f32(D d, hn::Vec<D> value, float* to) {
  hn::StoreU(value, d, to);
}

template <class D>
HWY_INLINE void store_f32(D, hn::Vec<D> value, BF16* to) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  const auto is_nan = hn::RebindMask(di, hn::IsNaN(value));
  const auto narrow = hn::IfThenElse(is_nan, hn::BitCast(di, quiet_nan), hn::BitCast(di, rounded));
  hn::StoreU(hn::DemoteTo(d16, narrow), d16, reinterpret_cast<uint16_t*>(to));
}

template <class D>
HWY_INLINE void store_f32([[maybe_unused]] D d, hn::Vec<D> value, F16* to) {
#if POLYOP_SIMD_HAS_F16
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::DemoteTo(d16, value), d16, reinterpret_cast<hwy::float16_t*>(to));
#else
  // Adding 2^(e+13) to a number of exponent e leaves the rounded ten-bit mantissa in the low bits of the sum. Below
  // 2^-14 the exponent stays -14, which rounds to a multiple of the least subnormal; scaling up first overflows to
  // infinity exactly where binary16 does.
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(du, value);
  const auto sign = hn::ShiftRight<16>(hn::And(bits, hn::Set(du, 0x80000000u)));
  const auto scaled = hn::Mul(hn::Mul(hn::Abs(value), hn::Set(d, 0x1p112f)), hn::Set(d, 0x1p-110f));
  const auto exponent = hn::And(hn::Add(bits, bits), hn::Set(du, 0xff000000u));
  const auto floor = hn::Set(di, 0x38800000);  // half of 0x71000000, so that the comparison may be signed
  const auto half_exponent = hn::Max(hn::BitCast(di, hn::ShiftRight<1>(exponent)), floor);
  const auto shifter = hn::BitCast(d, hn::Add(half_exponent, hn::Set(di, 0x07800000)));
  const auto sum = hn::BitCast(du, hn::Add(shifter, scaled));
  const auto magnitude =
      hn::Add(hn::And(hn::ShiftRight<13>(sum), hn::Set(du, 0x7c00u)), hn::And(sum, hn::Set(du, 0x0fffu)));
  const auto is_nan = hn::RebindMask(di, hn::IsNaN(value));
  const auto narrow = hn::IfThenElse(is_nan, hn::Set(di, 0x7e00), hn::BitCast(di, magnitude));
  const auto with_sign = hn::Or(narrow, hn::BitCast(di, sign));
  hn::StoreU(hn::DemoteTo(d16, with_sign), d16, reinterpret_cast<uint16_t*>(to));
#endif
}

/// Stores the low `count` lanes; count <= Lanes(d).
template <class D, class T>
HWY_INLINE void store_f32_n(D d, hn::Vec<D> value, T* to, size_t count) {
  HWY_ALIGN T lanes[hn::MaxLanes(d)];
  store_f32(d, value, lanes);
  std::memcpy(static_cast<void*>(to), lanes, count * sizeof(T));
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_CPU_SIMD_CONVERT_INL_H_
