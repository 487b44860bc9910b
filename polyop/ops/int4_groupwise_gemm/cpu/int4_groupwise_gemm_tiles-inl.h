// The register tiles of the CPU kernel of int4_groupwise_gemm. Every function here keeps the one order of f32
// operations that int4_groupwise_gemm_simd.cpp derives; they differ in how many rows and word vectors they hold in
// registers and in whether weights come packed or already widened.
//
// Terms: a step is 16 depths of a strip of 64 columns; in memory it is one fragment row of 128 words (4 bytes, 8
// nibbles) and the next step lies two fragment rows on. A unit is half a strip: 64 consecutive words of each step, 32
// columns. Lane l of word vector v holds column v * kLanes / 4 + l / 4 of the unit's lower or upper 16 columns and
// depths = l % 4.
//
// Included once per SIMD target, from a file that uses hwy/foreach_target.h.
#if defined(POLYOP_INT4_GROUPWISE_GEMM_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_INT4_GROUPWISE_GEMM_TILES_INL_H_
#undef POLYOP_INT4_GROUPWISE_GEMM_TILES_INL_H_
#else
#define POLYOP_INT4_GROUPWISE_GEMM_TILES_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <utility>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "polyop/cpu/simd_convert-inl.h"

#if HWY_TARGET != HWY_SCALAR
HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using VF = hn::Vec<DF>;
using VU = hn::Vec<DU>;

inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
inline constexpr bool kTableOfAllNibbles = kLanes == 16;  // a register holds q - 8 for all 16 values of q
inline constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64;  // 32 vector registers, else 16

inline constexpr int64_t kStepDepth = 16;
inline constexpr int64_t kStepWords = 256;  // distance of two steps of a strip
inline constexpr int kUnitWords = 64;
inline constexpr int kUnitVectors = kUnitWords / kLanes;
inline constexpr int kUnitFloats = 2 * kUnitWords;  // partial sums of one row and unit: vector 2 * v + high_half

// Bytes that a step's words are fetched ahead of their use: the same words two 64-depth blocks later.
inline constexpr int64_t kPrefetchWords = 2 * 4 * kStepWords;

#define POLYOP_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))

// Calls fn(std::integral_constant<int, i>) for i < kCount; indices are constants, so arrays of vectors become
// registers.
template <int kCount, class Fn>
HWY_INLINE void unroll(Fn&& fn) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) POLYOP_INLINE_LAMBDA {
    (fn(std::integral_constant<int, kIndex>()), ...);
  }
  (std::make_integer_sequence<int, kCount>());
}

// ---- one nibble of every word as a weight
// -----------------------------------------------------------------------------

// Words as nibble_weights wants them. Without a 16-entry table the bias goes here: q ^ 8 is q - 8 in two's complement.
HWY_INLINE VU load_words(const uint32_t* words) {
  const VU raw = hn::LoadU(DU(), words);
  if constexpr (kTableOfAllNibbles) return raw;
  return hn::Xor(raw, hn::Set(DU(), 0x88888888u));
}

// -8 .. 7; used where kTableOfAllNibbles.
HWY_INLINE VF weight_table() { return hn::ConvertTo(DF(), hn::Iota(DI(), -8)); }

// q - 8 of nibble kNibble of each word, exact.
template <int kNibble>
HWY_INLINE VF nibble_weights(VU words, [[maybe_unused]] VF table) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  // The permutation reads the low four bits of a lane and ignores the rest: no mask.
  return hn::TableLookupLanes(table, hwy::HWY_NAMESPACE::Indices512<float>{hn::ShiftRight<4 * kNibble>(words).raw});
#else
  const auto at_top = hn::BitCast(DI(), hn::ShiftLeft<28 - 4 * kNibble>(words));
  return hn::ConvertTo(DF(), hn::ShiftRight<28>(at_top));
#endif
}

// The four depths of a lane in the order they are added: sub-step i = 2 * high_depth + odd holds depth 8 * high_depth +
// 2 * (lane % 4) + odd of the step, and x is permuted the same way. Nibble of sub-step i and half of the columns:
constexpr int nibble_of(int sub_step, int high_half) { return 4 * (sub_step % 2) + 2 * high_half + sub_step / 2; }

// ---- group sums
// -------------------------------------------------------------------------------------------------------

// kLanes / 4 scales from `scales`, each in the four lanes of its column; reads kLanes floats.
HWY_INLINE VF spread_scales(const float* scales) {
  const DF df;
  const auto column_of_lane = hn::IndicesFromVec(df, hn::ShiftRight<2>(hn::Iota(DI(), 0)));
  return hn::TableLookupLanes(hn::LoadU(df, scales), column_of_lane);
}

// Where vector `vec` of a tile finds its scales, from those of the tile's first column: those of the upper columns lie
// 32 on.
constexpr int scale_offset(int vec) { return vec % 2 * 32 + vec / 2 * (kLanes / 4); }

// The sums of one group over its steps, kRows rows by kVecs word vectors, and where they go: scaled by their columns'
// scales and added to the running totals.
template <int kRows, int kVecs>
struct GroupSums {
  VF sum[kRows][2 * kVecs];

  // Written out, because GCC makes an implicit constructor without the target's instructions.
  HWY_INLINE GroupSums() {
    unroll<kRows>([&](auto row) POLYOP_INLINE_LAMBDA {
      unroll<2 * kVecs>([&](auto vec) POLYOP_INLINE_LAMBDA { sum[row][vec] = hn::Zero(DF()); });
    });
  }

  // scale_of(vec): the spread scales of a vector. totals: row r at r * totals_stride.
  template <class ScaleOf>
  HWY_INLINE void scale_into(const ScaleOf& scale_of, float* totals, int64_t totals_stride) const {
    const DF df;
    unroll<2 * kVecs>([&](auto vec) POLYOP_INLINE_LAMBDA {
      const VF scale = scale_of(vec);
      unroll<kRows>([&](auto row) POLYOP_INLINE_LAMBDA {
        float* total = totals + row * totals_stride + vec * kLanes;
        hn::Store(hn::MulAdd(sum[row][vec], scale, hn::Load(df, total)), df, total);
      });
    });
  }
};

// One group from packed words: each weight is widened in registers and used for all rows at once.
template <int kRows, int kVecs>
HWY_INLINE void add_packed_group(const uint32_t* HWY_RESTRICT words, int64_t steps, const float* HWY_RESTRICT x,
                                 const float* HWY_RESTRICT scales, float* HWY_RESTRICT totals, int64_t totals_stride) {
  const DF df;
  const VF table = weight_table();
  GroupSums<kRows, kVecs> sums;
  for (int64_t step = 0; step < steps; ++step) {
    VU packed[kVecs];
    unroll<kVecs>([&](auto v) POLYOP_INLINE_LAMBDA {
      packed[v] = load_words(words + v * kLanes);
      if constexpr (v * kLanes % 16 == 0) hwy::Prefetch(words + v * kLanes + kPrefetchWords);
    });
    unroll<4>([&](auto i) POLYOP_INLINE_LAMBDA {
      VF x_four[kRows];
      unroll<kRows>([&](auto row)
                        POLYOP_INLINE_LAMBDA { x_four[row] = hn::LoadDup128(df, x + 4 * (i * kRows + row)); });
      unroll<2 * kVecs>([&](auto vec) POLYOP_INLINE_LAMBDA {
        const VF weights = nibble_weights<nibble_of(i, vec % 2)>(packed[vec / 2], table);
        unroll<kRows>([&](auto row) POLYOP_INLINE_LAMBDA {
          sums.sum[row][vec] = hn::MulAdd(weights, x_four[row], sums.sum[row][vec]);
        });
      });
    });
    words += kStepWords;
    x += kRows * kStepDepth;
  }
  sums.scale_into([&](int vec) POLYOP_INLINE_LAMBDA { return spread_scales(scales + scale_offset(vec)); }, totals,
                  totals_stride);
}

// Widens kVecs word vectors of `steps` steps into `panel` [steps, 4, 2 * kVecs] vectors, in the order they are used.
template <int kVecs>
HWY_INLINE void widen_panel(const uint32_t* HWY_RESTRICT words, int64_t steps, float* HWY_RESTRICT panel) {
  const VF table = weight_table();
  for (int64_t step = 0; step < steps; ++step) {
    VU packed[kVecs];
    unroll<kVecs>([&](auto v) POLYOP_INLINE_LAMBDA { packed[v] = load_words(words + v * kLanes); });
    unroll<4>([&](auto i) POLYOP_INLINE_LAMBDA {
      unroll<2 * kVecs>([&](auto vec) POLYOP_INLINE_LAMBDA {
        const VF weights = nibble_weights<nibble_of(i, vec % 2)>(packed[vec / 2], table);
        hn::Store(weights, DF(), panel + (i * 2 * kVecs + vec) * kLanes);
      });
    });
    words += kStepWords;
    panel += 4 * 2 * kVecs * kLanes;
  }
}

// One group from a widened panel; scales [2 * kVecs] vectors, spread.
template <int kRows, int kVecs>
HWY_INLINE void add_widened_group(const float* HWY_RESTRICT panel, int64_t steps, const float* HWY_RESTRICT x,
                                  const float* HWY_RESTRICT scales, float* HWY_RESTRICT totals, int64_t totals_stride) {
  const DF df;
  GroupSums<kRows, kVecs> sums;
  for (int64_t step = 0; step < steps; ++step) {
    unroll<4>([&](auto i) POLYOP_INLINE_LAMBDA {
      VF weights[2 * kVecs];
      unroll<2 * kVecs>(
          [&](auto vec) POLYOP_INLINE_LAMBDA { weights[vec] = hn::Load(df, panel + (i * 2 * kVecs + vec) * kLanes); });
      unroll<kRows>([&](auto row) POLYOP_INLINE_LAMBDA {
        const VF x_four = hn::LoadDup128(df, x + 4 * (i * kRows + row));
        unroll<2 * kVecs>([&](auto vec) POLYOP_INLINE_LAMBDA {
          sums.sum[row][vec] = hn::MulAdd(weights[vec], x_four, sums.sum[row][vec]);
        });
      });
    });
    panel += 4 * 2 * kVecs * kLanes;
    x += kRows * kStepDepth;
  }
  sums.scale_into([&](int vec) POLYOP_INLINE_LAMBDA { return hn::Load(df, scales + vec * kLanes); }, totals,
                  totals_stride);
}

// ---- edges
// ------------------------------------------------------------------------------------------------------------

// One row of x as f32 in the order the tiles read it: of every 8 depths the even ones, then the odd ones, in fours that
// lie `stride` floats apart (4 times the rows of its row panel). Depths from k up to the next multiple of 16 are zero;
// x is not read there.
template <class T>
HWY_INLINE void permute_row(const T* HWY_RESTRICT x, int64_t k, int64_t stride, float* HWY_RESTRICT permuted) {
  const hn::CappedTag<float, 4> d4;
  const auto permute_eight = [&](const T* from) POLYOP_INLINE_LAMBDA {
    const auto low = load_f32(d4, from);
    const auto high = load_f32(d4, from + 4);
    hn::Store(hn::ConcatEven(d4, high, low), d4, permuted);
    hn::Store(hn::ConcatOdd(d4, high, low), d4, permuted + stride);
    permuted += 2 * stride;
  };
  int64_t depth = 0;
  for (; depth + 8 <= k; depth += 8) permute_eight(x + depth);
  for (; depth < k || depth % kStepDepth != 0; depth += 8) {
    T eight[8] = {};
    for (int64_t i = depth; i < k; ++i) eight[i - depth] = x[i];
    permute_eight(eight);
  }
}

// kLanes scales from column `column` of one group's row as f32, zeros past column n; nothing there is read.
template <class T>
HWY_INLINE void widen_scales(const T* HWY_RESTRICT scales, int64_t column, int64_t n, float* HWY_RESTRICT to) {
  const DF df;
  const int64_t valid = n - column;
  if (valid >= kLanes) {
    hn::Store(load_f32(df, scales + column), df, to);
  } else if (valid > 0) {
    hn::Store(load_f32_n(df, scales + column, static_cast<size_t>(valid)), df, to);
  } else {
    hn::Store(hn::Zero(df), df, to);
  }
}

// Sums the four depth lanes of each column, (t0 + t2) + (t1 + t3), for 16 columns of one half of a unit (`totals` at
// vector high_half) and stores those below n. out: the row's element at the first of the columns.
template <class T>
HWY_INLINE void store_columns(const float* HWY_RESTRICT totals, T* HWY_RESTRICT out, int64_t valid_columns) {
  const DF df;
  const hn::Repartition<double, DF> dd;
  // Lane 4 * block + i of the sums belongs to column i * kLanes / 4 + block.
  HWY_ALIGN int32_t sum_of_column[kLanes];
  for (int column = 0; column < kLanes; ++column) {
    sum_of_column[column] = column % (kLanes / 4) * 4 + column / (kLanes / 4);
  }
  const auto order = hn::SetTableIndices(df, sum_of_column);
  for (int v = 0; v < kUnitVectors; v += 4) {
    const int64_t valid = valid_columns - v / 4 * kLanes;
    if (valid <= 0) return;
    const auto load = [&](int i) POLYOP_INLINE_LAMBDA { return hn::Load(df, totals + (v + i) * 2 * kLanes); };
    const VF a = load(0), b = load(1), c = load(2), d = load(3);
    const auto ab = hn::BitCast(dd, hn::Add(hn::InterleaveLower(df, a, b), hn::InterleaveUpper(df, a, b)));
    const auto cd = hn::BitCast(dd, hn::Add(hn::InterleaveLower(df, c, d), hn::InterleaveUpper(df, c, d)));
    const VF sums =
        hn::Add(hn::BitCast(df, hn::InterleaveLower(dd, ab, cd)), hn::BitCast(df, hn::InterleaveUpper(dd, ab, cd)));
    const VF columns = hn::TableLookupLanes(sums, order);
    if (valid >= kLanes) {
      store_f32(df, columns, out + v / 4 * kLanes);
    } else {
      store_f32_n(df, columns, out + v / 4 * kLanes, static_cast<size_t>(valid));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET != HWY_SCALAR

#endif  // POLYOP_INT4_GROUPWISE_GEMM_TILES_INL_H_
