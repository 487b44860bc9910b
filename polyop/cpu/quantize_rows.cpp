// Math      to = round(from / scale): f32 quotient, then nearest even to the target, saturated
// Work      one row after the other, full vectors, then vectors of 4, then scalars; all give the same bits
// Roofline  the exact division bounds it: about 14 cycles per 16 elements with AVX-512, 7 GB/s of f16 read by one core,
//           which is more than a core's share of memory bandwidth on most servers
// Numerics  as simd_quantize-inl.h
#include "polyop/cpu/quantize_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/cpu/quantize_rows.cpp"
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include "polyop/cpu/simd_convert-inl.h"
#include "polyop/cpu/simd_quantize-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR

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
