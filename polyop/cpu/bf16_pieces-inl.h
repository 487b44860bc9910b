// f32 numbers as sums of bf16 numbers, so that matrix products on bf16 tiles keep the accuracy of f32.
//
// x = piece 0 + piece 1 + ...: piece 0 is x cut to 8 significant bits, piece 1 the rest cut to 8 bits, and so on. bf16
// numbers are one piece, f16 numbers (11 bits) two, f32 numbers (24 bits) three, each exactly, as long as the last
// piece is not below the smallest normal number (that needs |x| < 2^-110). Infinities and NaN cannot be split: their
// pieces are NaN.
//
// Included once per SIMD target.
#if defined(POLYOP_CPU_BF16_PIECES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_CPU_BF16_PIECES_INL_H_
#undef POLYOP_CPU_BF16_PIECES_INL_H_
#else
#define POLYOP_CPU_BF16_PIECES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Writes piece p < kPieces of the 2 * Lanes(d) numbers {low, high} to pieces + p * piece_stride, as bf16 bits. The
/// last piece is rounded to nearest (ties away from zero) where it cannot hold the rest.
template <int kPieces, class D>
HWY_INLINE void store_bf16_pieces(D d, hn::Vec<D> low, hn::Vec<D> high, uint16_t* pieces, size_t piece_stride) {
  const hn::RebindToUnsigned<D> du;
  const hn::Repartition<uint16_t, D> d16;
  const auto upper = hn::Set(du, 0xffff0000u);
#pragma GCC unroll 3
  for (int p = 0; p < kPieces; ++p) {
    auto low_bits = hn::BitCast(du, low);
    auto high_bits = hn::BitCast(du, high);
    if (p + 1 == kPieces) {
      if (kPieces < 3) {  // three pieces hold all 24 bits: the last one is exact
        const auto half = hn::Set(du, 0x8000u);
        low_bits = hn::Add(low_bits, half);
        high_bits = hn::Add(high_bits, half);
      }
    } else {
      low = hn::Sub(low, hn::BitCast(d, hn::And(low_bits, upper)));
      high = hn::Sub(high, hn::BitCast(d, hn::And(high_bits, upper)));
    }
    hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, high_bits), hn::BitCast(d16, low_bits)), d16,
               pieces + p * piece_stride);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_CPU_BF16_PIECES_INL_H_
