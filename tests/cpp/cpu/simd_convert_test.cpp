// simd_convert: every f16 and bf16 value widens, and a dense sample of f32 narrows, to the bits of numeric_types.h on
// every target that this processor runs.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "simd_convert_test.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
#include "polyop/cpu/simd_convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR
template <class T>
void widen(const T*, float*, size_t) {}
template <class T>
void narrow(const float*, T*, size_t) {}
size_t lanes() { return 0; }
#else
size_t lanes() { return hn::Lanes(hn::ScalableTag<float>()); }

template <class T>
void widen(const T* from, float* to, size_t count) {
  const hn::ScalableTag<float> df;
  size_t i = 0;
  for (; i + hn::Lanes(df) <= count; i += hn::Lanes(df)) store_f32(df, load_f32(df, from + i), to + i);
  store_f32_n(df, load_f32_n(df, from + i, count - i), to + i, count - i);
}

template <class T>
void narrow(const float* from, T* to, size_t count) {
  const hn::ScalableTag<float> df;
  size_t i = 0;
  for (; i + hn::Lanes(df) <= count; i += hn::Lanes(df)) store_f32(df, load_f32(df, from + i), to + i);
  store_f32_n(df, load_f32_n(df, from + i, count - i), to + i, count - i);
}
#endif

void widen_f16(const F16* from, float* to, size_t count) { widen(from, to, count); }
void widen_bf16(const BF16* from, float* to, size_t count) { widen(from, to, count); }
void narrow_f16(const float* from, F16* to, size_t count) { narrow(from, to, count); }
void narrow_bf16(const float* from, BF16* to, size_t count) { narrow(from, to, count); }

}  // namespace polyop::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

namespace polyop::cpu {
HWY_EXPORT(lanes);
HWY_EXPORT(widen_f16);
HWY_EXPORT(widen_bf16);
HWY_EXPORT(narrow_f16);
HWY_EXPORT(narrow_bf16);

namespace {

// Runs `check` once on every vector target of this processor.
template <class Check>
void on_every_target(Check check) {
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t targets = supported; targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    SCOPED_TRACE(hwy::TargetName(target));
    if (HWY_DYNAMIC_DISPATCH(lanes)() != 0) check();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

bool same_value(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

constexpr size_t kAllHalves = 65536 - 3;  // not a multiple of any vector: the last call is a partial one

template <class T, class Widen>
void check_widen(Widen widen_fn) {
  std::vector<T> from(kAllHalves);
  for (size_t i = 0; i < from.size(); ++i) from[i].bits = static_cast<uint16_t>(i + 3);
  std::vector<float> to(from.size());
  widen_fn(from.data(), to.data(), from.size());
  for (size_t i = 0; i < from.size(); ++i) ASSERT_TRUE(same_value(to[i], from[i].to_float())) << from[i].bits;
}

template <class T, class Narrow>
void check_narrow(Narrow narrow_fn) {
  std::vector<float> from;
  constexpr uint64_t kStep = 9973;  // prime: visits every exponent and all kinds of mantissas
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += kStep) from.push_back(std::bit_cast<float>(uint32_t(bits)));
  for (uint32_t half = 0; half < 65536; ++half) {  // exact halves between neighbours, both kinds of even
    const float value = F16{static_cast<uint16_t>(half)}.to_float();
    const float next = F16{static_cast<uint16_t>(half + 1)}.to_float();
    if (std::isfinite(value) && std::isfinite(next)) from.push_back(0.5f * (value + next));
    from.push_back(std::bit_cast<float>(half << 16 | 0x8000u));
  }
  std::vector<T> to(from.size());
  narrow_fn(from.data(), to.data(), from.size());
  for (size_t i = 0; i < from.size(); ++i) {
    ASSERT_TRUE(same_value(to[i].to_float(), T::from_float(from[i]).to_float()))
        << std::hex << std::bit_cast<uint32_t>(from[i]) << " gives " << to[i].bits << ", wanted "
        << T::from_float(from[i]).bits;
  }
}

TEST(SimdConvert, WidensAsScalarCode_EveryTarget) {
  on_every_target([] {
    check_widen<F16>(HWY_DYNAMIC_DISPATCH(widen_f16));
    check_widen<BF16>(HWY_DYNAMIC_DISPATCH(widen_bf16));
  });
}

TEST(SimdConvert, NarrowsAsScalarCode_EveryTarget) {
  on_every_target([] {
    check_narrow<F16>(HWY_DYNAMIC_DISPATCH(narrow_f16));
    check_narrow<BF16>(HWY_DYNAMIC_DISPATCH(narrow_bf16));
  });
}

}  // namespace
}  // namespace polyop::cpu
#endif  // HWY_ONCE
