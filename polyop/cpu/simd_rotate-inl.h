// rotate_row: one head of channels, its pairs turned by the angles of a position. Where the channels come from and
// where they go is up to the two row types it is called with, so the same arithmetic serves plain, normed, rounded and
// quantized rows. Numerics  f32 products and sum, each rounded, no fused multiply-add: full vectors, short vectors, the
// scalar tail and
//           every processor give the same bits
//
// Included once per SIMD target, from a file that uses hwy/foreach_target.h.
#if defined(POLYOP_CPU_SIMD_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_CPU_SIMD_ROTATE_INL_H_
#undef POLYOP_CPU_SIMD_ROTATE_INL_H_
#else
#define POLYOP_CPU_SIMD_ROTATE_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "polyop/core/numeric_types.h"
#include "polyop/core/rotary_table.h"
#include "polyop/cpu/simd_convert-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// ---- rows -----------------------------------------------------------------------------------------------------------

/// Reads channels as they are.
template <class T>
struct PlainRow {
  using Element = T;
  const T* x;

  template <class D>
  HWY_INLINE hn::Vec<D> load(D d, int64_t channel) const {
    return load_f32(d, x + channel);
  }
  [[nodiscard]] float load_one(int64_t channel) const { return to_float(x[channel]); }
};

/// Writes channels rounded to T. May be the memory that is read: of each pair both channels are read first.
template <class T>
struct RoundedRow {
  using Element = T;
  T* out;

  template <class D>
  HWY_INLINE void store(D d, hn::Vec<D> value, int64_t channel) const {
    store_f32(d, value, out + channel);
  }
  void store_one(float value, int64_t channel) const { out[channel] = from_float<T>(value); }
};

// ---- vectors --------------------------------------------------------------------------------------------------------

#if HWY_TARGET != HWY_SCALAR

/// Rotates the pairs (pair, pair + half), (pair + 1, pair + 1 + half), ... of one vector of each; returns how many.
template <class D, class From, class To>
HWY_INLINE int64_t rotate_split(D d, const float* cosines, int64_t half, int64_t pair, const From& from, const To& to) {
  const auto c = hn::LoadU(d, cosines + pair);
  const auto s = hn::LoadU(d, cosines + half + pair);
  const auto x1 = from.load(d, pair);
  const auto x2 = from.load(d, pair + half);
  to.store(d, hn::Sub(hn::Mul(x1, c), hn::Mul(x2, s)), pair);
  to.store(d, hn::Add(hn::Mul(x2, c), hn::Mul(x1, s)), pair + half);
  return static_cast<int64_t>(hn::Lanes(d));
}

/// Rotates the pairs (2 pair, 2 pair + 1), (2 pair + 2, 2 pair + 3), ... of one vector; returns how many.
template <class D, class From, class To>
HWY_INLINE int64_t rotate_interleaved(D d, const float* cosines, int64_t half, int64_t pair, const From& from,
                                      const To& to) {
  const hn::Half<D> d_half;
  const hn::RebindToSigned<D> di;
  const auto pair_of_lane = hn::IndicesFromVec(d, hn::ShiftRight<1>(hn::Iota(di, 0)));
  const auto c = hn::TableLookupLanes(hn::ZeroExtendVector(d, hn::LoadU(d_half, cosines + pair)), pair_of_lane);
  const auto s = hn::TableLookupLanes(hn::ZeroExtendVector(d, hn::LoadU(d_half, cosines + half + pair)), pair_of_lane);
  const auto value = from.load(d, 2 * pair);
  const auto partner = hn::Shuffle2301(value);
  to.store(d, hn::Add(hn::Mul(value, c), hn::Mul(partner, hn::OddEven(s, hn::Neg(s)))), 2 * pair);
  return static_cast<int64_t>(hn::Lanes(d)) / 2;
}

#endif

/// Channels [begin, end) without turning them; bits where both sides hold the same type as it is.
template <class From, class To>
HWY_INLINE void pass_through(int64_t begin, int64_t end, const From& from, const To& to) {
  using T = typename From::Element;
  if constexpr (std::is_same_v<From, PlainRow<T>> && std::is_same_v<To, RoundedRow<T>>) {
    if (from.x == to.out) return;
    std::memcpy(static_cast<void*>(to.out + begin), from.x + begin, static_cast<size_t>(end - begin) * sizeof(T));
  } else {
    int64_t channel = begin;
#if HWY_TARGET != HWY_SCALAR
    const hn::ScalableTag<float> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (; channel + lanes <= end; channel += lanes) to.store(d, from.load(d, channel), channel);
#endif
    for (; channel < end; ++channel) to.store_one(from.load_one(channel), channel);
  }
}

// ---- one head -------------------------------------------------------------------------------------------------------

/// One head of `head_dim` channels: those below table.rotary_dim turned by `cosines` (a row of the table), the others
/// as they are.
template <class From, class To>
void rotate_row(const RotaryTable& table, const float* cosines, int64_t head_dim, const From& from, const To& to) {
  const int64_t half = table.rotary_dim / 2;
  int64_t pair = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 4> d4;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto lanes4 = static_cast<int64_t>(hn::Lanes(d4));
  if (table.interleaved) {
    while (pair + lanes / 2 <= half) pair += rotate_interleaved(d, cosines, half, pair, from, to);
    while (pair + lanes4 / 2 <= half) pair += rotate_interleaved(d4, cosines, half, pair, from, to);
  } else {
    while (pair + lanes <= half) pair += rotate_split(d, cosines, half, pair, from, to);
    while (pair + lanes4 <= half) pair += rotate_split(d4, cosines, half, pair, from, to);
  }
#endif
  for (; pair < half; ++pair) {
    const int64_t first = table.first_channel(pair);
    const int64_t second = table.second_channel(pair);
    const float c = cosines[pair];
    const float s = cosines[half + pair];
    const float x1 = from.load_one(first);
    const float x2 = from.load_one(second);
    to.store_one(x1 * c - x2 * s, first);
    to.store_one(x2 * c + x1 * s, second);
  }
  pass_through(table.rotary_dim, head_dim, from, to);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_CPU_SIMD_ROTATE_INL_H_
