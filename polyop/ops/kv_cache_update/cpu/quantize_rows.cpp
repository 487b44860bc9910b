// Math      to = round(from / scale): f32 quotient, then nearest even to the target, saturated
// Work      one row after the other, full vectors, then vectors of 4, then scalars; all give the same bits
// Roofline  the exact division bounds it: about 14 cycles per 16 elements with AVX-512, 7 GB/s of f16 read by one core,
//           which is more than a core's share of memory bandwidth on most servers
// Numerics  f8e4m3: NaN stays NaN, beyond +-448 saturates · i8: NaN gives 0, beyond [-128, 127] saturates
#include "polyop/ops/kv_cache_update/cpu/quantize_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/ops/kv_cache_update/cpu/quantize_rows.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "polyop/cpu/simd_convert-inl.h"

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

/// As many full vectors as fit below `width` from `begin` on; returns where they end.
template <class D, class From, class To>
HWY_INLINE int64_t quantize_vectors(D d, const From* from, To* to, int64_t begin, int64_t width, float scale) {
  const auto divisor = hn::Set(d, scale);
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (; begin + lanes <= width; begin += lanes) {
    store_quantized(d, hn::Div(load_f32(d, from + begin), divisor), to + begin);
  }
  return begin;
}

#endif

template <class From, class To>
void quantize_rows_as(const QuantizeRows& rows) {
  for (int64_t row = 0; row < rows.rows; ++row) {
    const From* from = static_cast<const From*>(rows.from) + row * rows.from_stride;
    To* to = static_cast<To*>(rows.to) + row * rows.to_stride;
    int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
    i = quantize_vectors(hn::ScalableTag<float>(), from, to, i, rows.width, rows.scale);
    i = quantize_vectors(hn::CappedTag<float, 4>(), from, to, i, rows.width, rows.scale);
#endif
    for (; i < rows.width; ++i) to[i] = from_float<To>(to_float(from[i]) / rows.scale);
  }
}

template <class To>
void quantize_rows_to(const QuantizeRows& rows) {
  switch (rows.from_dtype) {
    case DType::kF16:
      return quantize_rows_as<F16, To>(rows);
    case DType::kBF16:
      return quantize_rows_as<BF16, To>(rows);
    default:
      return quantize_rows_as<float, To>(rows);
  }
}

void quantize_rows_here(const QuantizeRows& rows) {
  return rows.to_dtype == DType::kI8 ? quantize_rows_to<int8_t>(rows) : quantize_rows_to<F8E4M3>(rows);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyop::cpu {

HWY_EXPORT(quantize_rows_here);

void quantize_rows(const QuantizeRows& rows) { HWY_DYNAMIC_DISPATCH(quantize_rows_here)(rows); }

}  // namespace polyop::cpu
#endif  // HWY_ONCE
