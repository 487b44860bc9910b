// f32 numbers as sums of bf16 numbers, so that matrix products on bf16 tiles keep the accuracy of f32.
//
// x = piece 0 + piece 1 + ...: piece 0 is x cut to 8 significant bits, piece 1 the rest cut to 8 bits, and so on. bf16
// numbers are one piece, f16 numbers (11 bits) two, f32 numbers (24 bits) three, each exactly, as long as the last
// piece is not below the smallest normal number (that needs |x| < 2^-110). Infinities and NaN cannot be split: their
// pieces are NaN.
//
// For AVX-512 with AVX512-BF16 only.
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

/// {low, high} as 32 bf16 numbers, nearest even; subnormal numbers become 0. AVX512-BF16, which every machine has that
/// has_amx_bf16(): the instruction stands as inline assembly because Highway's AVX-512 targets do not name it.
template <class D>
HWY_INLINE hn::Vec<hn::Repartition<uint16_t, D>> pack_bf16(D, hn::Vec<D> low, hn::Vec<D> high) {
  __m512i packed;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(packed) : "v"(high.raw), "v"(low.raw));
  return hn::Vec<hn::Repartition<uint16_t, D>>{packed};
}

/// Writes piece p < kPieces of the 2 * Lanes(d) numbers {low, high} to pieces + p * piece_stride, as bf16 bits. The
/// last piece is rounded to nearest where it cannot hold the rest.
template <int kPieces, class D>
HWY_INLINE void store_bf16_pieces(D d, hn::Vec<D> low, hn::Vec<D> high, uint16_t* pieces, size_t piece_stride) {
  const hn::RebindToUnsigned<D> du;
  const hn::Repartition<uint16_t, D> d16;
  const auto upper = hn::BitCast(d, hn::Set(du, 0xffff0000u));
#pragma GCC unroll 3
  for (int p = 0; p < kPieces; ++p) {
    if (p + 1 == kPieces) {
      hn::StoreU(pack_bf16(d, low, high), d16, pieces + p * piece_stride);
      return;
    }
    const auto low_piece = hn::And(low, upper);
    const auto high_piece = hn::And(high, upper);
    hn::StoreU(pack_bf16(d, low_piece, high_piece), d16, pieces + p * piece_stride);
    low = hn::Sub(low, low_piece);
    high = hn::Sub(high, high_piece);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_CPU_BF16_PIECES_INL_H_
