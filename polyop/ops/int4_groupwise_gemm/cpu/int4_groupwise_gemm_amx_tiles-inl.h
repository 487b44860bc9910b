// The parts of the AMX kernel of int4_groupwise_gemm that work on vectors and tiles: widened weights, products of a few
// groups, and what becomes of their sums. int4_groupwise_gemm_amx.cpp derives the arithmetic.
//
// Terms: a unit is 32 columns of a fragment block, two tiles of 16: columns from column_in_block(unit) and 32 further
// on. Inside a tile the columns stand transposed, as a 4 x 4 square: place 4 b + v holds column 4 v + b.
//
// Included once per SIMD target.
#if defined(POLYOP_INT4_GROUPWISE_GEMM_AMX_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_INT4_GROUPWISE_GEMM_AMX_TILES_INL_H_
#undef POLYOP_INT4_GROUPWISE_GEMM_AMX_TILES_INL_H_
#else
#define POLYOP_INT4_GROUPWISE_GEMM_AMX_TILES_INL_H_
#endif

#include <hwy/highway.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "polyop/cpu/amx.h"
#include "polyop/cpu/simd_convert-inl.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_digits-inl.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_plan.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int64_t kStepWordCount = 256;              // from one step of 16 depths of a strip to the next
inline constexpr int64_t kBlockWords = 4 * kStepWordCount;  // from one fragment block of a strip to the next
inline constexpr int64_t kFetchAheadWords = 2 * kBlockWords;

// ---- widened weights
// -------------------------------------------------------------------------------------------------

// For each half of a unit: the start of the 8 bits whose upper four are the nibble of depths 2 p, 2 p + 1, 2 p + 8 and
// 2 p + 9, from two words of 32 bits.
HWY_INLINE __m512i nibble_windows(int half) {
  alignas(64) uint8_t start[64];
  for (int byte = 0; byte < 64; ++byte) {
    const int odd = byte % 2;
    const int high_depth = byte % 4 / 2;
    const int nibble = 4 * odd + 2 * half + high_depth;
    start[byte] = static_cast<uint8_t>((byte % 8 / 4 * 32 + 4 * nibble - 4) & 63);
  }
  return _mm512_load_si512(start);
}

// Bytes 16 (q - 8) of the chosen nibbles: what is below them goes, and the sign of q - 8 is the negated top bit of q.
HWY_INLINE __m512i weight_bytes(__m512i words, __m512i windows) {
  constexpr int kAndXor = 0x6a;  // (a & b) ^ c
  return _mm512_ternarylogic_epi32(_mm512_multishift_epi64_epi8(windows, words), _mm512_set1_epi32(0xf0f0f0f0),
                                   _mm512_set1_epi32(0x80808080), kAndXor);
}

// q - 8 for every q, twice.
HWY_INLINE __m512i bf16_weights() {
  alignas(64) uint16_t bits[32];
  for (int i = 0; i < 32; ++i) {
    bits[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(i % 16 - kInt4Bias)) >> 16);
  }
  return _mm512_load_si512(bits);
}

// The words of a unit at one step: p[i] has word i of each of the 16 columns.
struct WordPairs {
  __m512i p[4];
};

HWY_INLINE WordPairs load_pairs(const uint32_t* words) {
  __m512i columns[4];  // of 4 columns each, 4 words a column
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    columns[v] = _mm512_loadu_si512(words + 16 * v);
    _mm_prefetch(reinterpret_cast<const char*>(words + 16 * v + kFetchAheadWords), _MM_HINT_T0);
  }
  const __m512i a = _mm512_unpacklo_epi32(columns[0], columns[1]);
  const __m512i b = _mm512_unpackhi_epi32(columns[0], columns[1]);
  const __m512i c = _mm512_unpacklo_epi32(columns[2], columns[3]);
  const __m512i d = _mm512_unpackhi_epi32(columns[2], columns[3]);
  return {{_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
           _mm512_unpackhi_epi64(b, d)}};
}

// The words of a unit and a block of 64 depths as bytes, one tile [16, 64] at `low` for its lower 16 columns and one at
// `high`. Row 4 s + p of a tile holds depths 16 s + {2 p, 2 p + 1, 2 p + 8, 2 p + 9}.
HWY_INLINE void widen_block(const uint32_t* HWY_RESTRICT words, int8_t* HWY_RESTRICT low, int8_t* HWY_RESTRICT high) {
  const __m512i low_windows = nibble_windows(0);
  const __m512i high_windows = nibble_windows(1);
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step, words += kStepWordCount) {
    const WordPairs pairs = load_pairs(words);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      _mm512_store_si512(low + (4 * step + p) * 64, weight_bytes(pairs.p[p], low_windows));
      _mm512_store_si512(high + (4 * step + p) * 64, weight_bytes(pairs.p[p], high_windows));
    }
  }
}

// Widens as widen_block does, to bf16 numbers q - 8: four tiles [16, 32], depths 0-31 and 32-63 at `low` and behind it,
// the same at `high`. Row 8 s + 4 h + p of a tile holds depths 16 s + 8 h + {2 p, 2 p + 1}.
HWY_INLINE void widen_block_bf16(const uint32_t* HWY_RESTRICT words, int8_t* HWY_RESTRICT low,
                                 int8_t* HWY_RESTRICT high) {
  const __m512i table = bf16_weights();
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step, words += kStepWordCount) {
    const WordPairs pairs = load_pairs(words);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      const int64_t row = (8 * step + p) * 64;
      // Lanes of 16 bits; the permutation reads five bits of each, and both halves of the table are the same.
      _mm512_store_si512(low + row, _mm512_permutexvar_epi16(pairs.p[p], table));
      _mm512_store_si512(low + row + 256, _mm512_permutexvar_epi16(_mm512_srli_epi32(pairs.p[p], 4), table));
      _mm512_store_si512(high + row, _mm512_permutexvar_epi16(_mm512_srli_epi32(pairs.p[p], 8), table));
      _mm512_store_si512(high + row + 256, _mm512_permutexvar_epi16(_mm512_srli_epi32(pairs.p[p], 12), table));
    }
  }
}

// ---- sums -----------------------------------------------------------------------------------------------------------

// The 16 sums of one row and group from those of its digits (`sums`, 16 numbers apart, least digit first), times
// `factor`, a power of two. Exact in each half of the digits, which one rounding joins; chained: see join_sums.
template <int kDigits, bool kChained>
HWY_INLINE VF16 join_digits(const int32_t* HWY_RESTRICT sums, float factor) {
  const DF16 df;
  const DI16 di;
  const auto load = [&](int digit) HWY_ATTR { return hn::Load(di, sums + 16 * digit); };
  VI16 upper = load(2);
  if constexpr (kDigits == 4) upper = hn::Add(upper, hn::ShiftLeft<7>(load(3)));
  const VF16 scaled = hn::ConvertTo(df, upper);
  const auto weight = hn::Set(df, 0x1p14f);
  if constexpr (kChained) {
    const VF16 first = hn::MulAdd(scaled, weight, hn::ConvertTo(df, hn::ShiftLeft<7>(load(1))));
    return hn::Mul(hn::Add(first, hn::ConvertTo(df, load(0))), hn::Set(df, factor));
  } else {
    const VI16 lower = hn::Add(load(0), hn::ShiftLeft<7>(load(1)));
    return hn::Mul(hn::MulAdd(scaled, weight, hn::ConvertTo(df, lower)), hn::Set(df, factor));
  }
}

HWY_INLINE __m512i transposed_columns() {
  return _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);  // its own inverse
}

// 16 scales from `column` of one group's row in the order of a tile, zeros from column n on, which are not read.
template <class S>
HWY_INLINE VF16 load_tile_scales(const S* HWY_RESTRICT scales, int64_t column, int64_t n) {
  const DF16 df;
  VF16 wide = hn::Zero(df);
  if (column + 16 <= n) {
    wide = load_f32(df, scales + column);
  } else if (column < n) {
    wide = load_f32_n(df, scales + column, static_cast<size_t>(n - column));
  }
  return VF16{_mm512_permutexvar_ps(transposed_columns(), wide.raw)};
}

// A row of totals of a tile to its columns of `out`, those below `valid_columns`.
template <class T>
HWY_INLINE void store_tile_row(const float* HWY_RESTRICT totals, T* HWY_RESTRICT out, int64_t valid_columns) {
  const DF16 df;
  const VF16 columns{_mm512_permutexvar_ps(transposed_columns(), hn::Load(df, totals).raw)};
  if (valid_columns >= 16) {
    store_f32(df, columns, out);
  } else {
    store_f32_n(df, columns, out, static_cast<size_t>(valid_columns));
  }
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// What a tile of rows and 16 columns gets from consecutive groups.
struct TileGroups {
  const int8_t* left;   // digits of the rows, from the first segment on
  const int8_t* right;  // weights of the columns, from the first segment on: [segments, segment_depth / 2, 32]
  int64_t segment_depth;
  int64_t segment_bytes;  // of left
  int64_t groups;
  int64_t group_segments;
  int64_t segments;     // in all; fewer than groups * group_segments where K ends
  const float* scales;  // [groups, tiles, 16]
  int64_t scales_stride;
};

template <int kRows, bool kChained>
inline constexpr bool needs_two_tiles = kRows == 16 ? !kChained : kRows == 8 && kChained;

// The sums of `group`. 16 rows: lower digits to tile 0, upper ones to tile 1, or all to tile 0 if chained, upper ones
// first. 8 rows: to tile 0, or, chained, odd digits to tile 1. 4 rows: to tile 0.
template <int kDigits, int kRows, bool kChained>
HWY_INLINE void multiply_group(const TileGroups& tile, int64_t group) {
  constexpr bool kTwoTiles = needs_two_tiles<kRows, kChained>;
  tile_zero<0>();
  if constexpr (kTwoTiles) tile_zero<1>();
  const ptrdiff_t row_bytes = 2 * tile.segment_depth;
  const int64_t tile_bytes = kAmxRows * row_bytes;
  const int64_t first = group * tile.group_segments;
  const int64_t end = std::min(tile.segments, first + tile.group_segments);
  for (int64_t segment = first; segment < end; ++segment) {
    const int8_t* left = tile.left + segment * tile.segment_bytes;
    tile_load<6>(tile.right + segment * tile.segment_depth * 32, kAmxRowBytes);
    if constexpr (kRows == 16) {
      constexpr int kUpperSums = kTwoTiles ? 1 : 0;
      if constexpr (kDigits == 4) {
        tile_load<4>(left + 3 * tile_bytes, row_bytes);
        tile_multiply_bf16<kUpperSums, 4, 6>();
      }
      tile_load<5>(left + 2 * tile_bytes, row_bytes);
      tile_multiply_bf16<kUpperSums, 5, 6>();
    }
    if constexpr (kRows >= 8) {
      tile_load<7>(left + tile_bytes, row_bytes);
      tile_multiply_bf16<kRows == 8 && kTwoTiles ? 1 : 0, 7, 6>();
    }
    tile_load<4>(left, row_bytes);
    tile_multiply_bf16<0, 4, 6>();
  }
}

template <int kRows, bool kChained>
HWY_INLINE void store_sums(float* sums) {
  tile_store<0>(sums, kAmxRowBytes);
  if constexpr (needs_two_tiles<kRows, kChained>) tile_store<1>(sums + kAmxSumBytes / 4, kAmxRowBytes);
}

// The sums of a row with all its digits. Each half of the digits is exact, and one rounding joins them. Chained: the
// upper half is exact, and digit 1, then digit 0 are added to it with a rounding each: a single tile can do that, if a
// group is one product deep.
template <int kDigits, int kRows, bool kChained>
HWY_INLINE VF16 join_sums(const float* HWY_RESTRICT sums, int row) {
  const DF16 df;
  const auto load = [&](int at) HWY_ATTR { return hn::Load(df, sums + 16 * at); };
  if constexpr (kRows == 16) {
    if constexpr (kChained) return load(row);
    return hn::Add(load(16 + row), load(row));
  } else if constexpr (kRows == 8) {
    if constexpr (!kChained) return hn::Add(load(8 + row), load(row));
    const VF16 upper = hn::Add(load(24 + row), load(8 + row));
    return hn::Add(hn::Add(upper, load(16 + row)), load(row));
  } else {
    VF16 upper = load(8 + row);
    if constexpr (kDigits == 4) upper = hn::Add(upper, load(12 + row));
    if constexpr (kChained) return hn::Add(hn::Add(upper, load(4 + row)), load(row));
    return hn::Add(upper, hn::Add(load(4 + row), load(row)));
  }
}

// Adds the groups to totals [kRows, 16]. The sums of a group are scaled after the next group's products have been
// issued, and before its sums are stored: loads wait for older stores to the same place in a page.
template <int kDigits, int kRows, bool kChained>
void add_tile_groups(const TileGroups& tile, float* HWY_RESTRICT sums, float* HWY_RESTRICT totals) {
  const DF16 df;
  VF16 total[kRows];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) total[row] = hn::Load(df, totals + 16 * row);
  multiply_group<kDigits, kRows, kChained>(tile, 0);
  store_sums<kRows, kChained>(sums);
  for (int64_t group = 0; group < tile.groups; ++group) {
    const bool more = group + 1 < tile.groups;
    if (more) multiply_group<kDigits, kRows, kChained>(tile, group + 1);
    const VF16 scale = hn::Load(df, tile.scales + group * tile.scales_stride);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      total[row] = hn::MulAdd(join_sums<kDigits, kRows, kChained>(sums, row), scale, total[row]);
    }
    if (more) store_sums<kRows, kChained>(sums);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) hn::Store(total[row], df, totals + 16 * row);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_INT4_GROUPWISE_GEMM_AMX_TILES_INL_H_
