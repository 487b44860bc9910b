// Register-blocked pieces of flash_attention: the f32 matrix tile, the transpose of keys, the softmax of a chunk and
// the merge of chunks. Each states the order of its sums: it never depends on how rows are grouped.
//
// Included once per SIMD target, from a file that uses hwy/foreach_target.h.
#if defined(POLYOP_OPS_ATTENTION_CPU_FLASH_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_OPS_ATTENTION_CPU_FLASH_TILES_INL_H_
#undef POLYOP_OPS_ATTENTION_CPU_FLASH_TILES_INL_H_
#else
#define POLYOP_OPS_ATTENTION_CPU_FLASH_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <limits>

#include "polyop/cpu/simd_convert-inl.h"
#include "polyop/cpu/simd_math-inl.h"
#include "polyop/ops/attention/cpu/flash_plan.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using F32Vec = hn::Vec<F32>;
constexpr size_t kLanes = hn::MaxLanes(F32());
static_assert(kLanes <= kLanePadding && kKeysPerTile % kLanes == 0);

// Accumulators of a tile are kTileRows x kTileVecs registers. With 32 registers 6 x 4 leave room for one row of b (4)
// and a broadcast; with 16 registers 6 x 2 do.
constexpr int kTileRows = 6;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_ARCH_ARM_A64
constexpr int kTileVecs = 4;
#else
constexpr int kTileVecs = 2;
#endif

// ---- c = [c +] a b
// ---------------------------------------------------------------------------------------------------

// c[r][n] = (kFromZero ? 0 : c[r][n]) + a[r][k] * b(k)[n], one fused step for each k of [k_begin, k_end) in ascending
// order; r < kRows, n < kVecs vectors. b(k) is the address of row k (f32, f16 or bf16).
template <int kRows, int kVecs, bool kFromZero, class BRow>
HWY_INLINE void multiply_tile(const float* HWY_RESTRICT a, size_t a_stride, size_t k_begin, size_t k_end, BRow b,
                              float* HWY_RESTRICT c, size_t c_stride) {
  const F32 d;
  F32Vec sums[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[r][v] = kFromZero ? hn::Zero(d) : hn::LoadU(d, c + r * c_stride + v * kLanes);
  }
  for (size_t k = k_begin; k < k_end; ++k) {
    const auto* HWY_RESTRICT b_row = b(k);
    F32Vec row[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) row[v] = load_f32(d, b_row + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F32Vec factor = hn::Set(d, a[r * a_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[r][v] = hn::MulAdd(factor, row[v], sums[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sums[r][v], d, c + r * c_stride + v * kLanes);
  }
}

// The same over `columns` floats of c, rounded up to whole vectors.
template <int kRows, bool kFromZero, class BRow>
HWY_INLINE void multiply_rows(const float* a, size_t a_stride, size_t k_begin, size_t k_end, BRow b, float* c,
                              size_t c_stride, size_t columns) {
  const size_t vecs = (columns + kLanes - 1) / kLanes;
  size_t v = 0;
  const auto shifted = [&](size_t k) HWY_ATTR { return b(k) + v * kLanes; };
  for (; v + kTileVecs <= vecs; v += kTileVecs) {
    multiply_tile<kRows, kTileVecs, kFromZero>(a, a_stride, k_begin, k_end, shifted, c + v * kLanes, c_stride);
  }
  if (v + 2 <= vecs) {
    multiply_tile<kRows, 2, kFromZero>(a, a_stride, k_begin, k_end, shifted, c + v * kLanes, c_stride);
    v += 2;
  }
  if (v < vecs) multiply_tile<kRows, 1, kFromZero>(a, a_stride, k_begin, k_end, shifted, c + v * kLanes, c_stride);
}

// The same for any number of rows up to kTileRows.
template <bool kFromZero, class BRow>
void multiply(size_t rows, const float* a, size_t a_stride, size_t k_begin, size_t k_end, BRow b, float* c,
              size_t c_stride, size_t columns) {
  switch (rows) {
    case 1:
      return multiply_rows<1, kFromZero>(a, a_stride, k_begin, k_end, b, c, c_stride, columns);
    case 2:
      return multiply_rows<2, kFromZero>(a, a_stride, k_begin, k_end, b, c, c_stride, columns);
    case 3:
      return multiply_rows<3, kFromZero>(a, a_stride, k_begin, k_end, b, c, c_stride, columns);
    case 4:
      return multiply_rows<4, kFromZero>(a, a_stride, k_begin, k_end, b, c, c_stride, columns);
    case 5:
      return multiply_rows<5, kFromZero>(a, a_stride, k_begin, k_end, b, c, c_stride, columns);
    default:
      return multiply_rows<kTileRows, kFromZero>(a, a_stride, k_begin, k_end, b, c, c_stride, columns);
  }
}

// ---- rows of any dtype to f32
// ----------------------------------------------------------------------------------------

// to[i] = from[i] * factor for i < count, then zeros up to a whole vector.
template <class T>
HWY_INLINE void widen_row(const T* from, size_t count, float factor, float* to) {
  const F32 d;
  const F32Vec factors = hn::Set(d, factor);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(hn::Mul(load_f32(d, from + i), factors), d, to + i);
  if (i < count) hn::StoreU(hn::Mul(load_f32_n(d, from + i, count - i), factors), d, to + i);
}

// The same for numbers of one byte, by a table of their values.
inline void widen_bytes(const float* values, const std::byte* from, size_t count, float factor, float* to) {
  size_t i = 0;
  for (; i < count; ++i) to[i] = values[static_cast<uint8_t>(from[i])] * factor;
  for (; i % kLanes != 0; ++i) to[i] = 0.0f;
}

inline void widen_row(DType dtype, const std::byte* from, size_t count, float factor, float* to) {
  switch (dtype) {
    case DType::kF8E4M3:
    case DType::kI8:
      return widen_bytes(byte_values(dtype), from, count, factor, to);
    case DType::kF16:
      return widen_row(reinterpret_cast<const F16*>(from), count, factor, to);
    case DType::kBF16:
      return widen_row(reinterpret_cast<const BF16*>(from), count, factor, to);
    default:
      return widen_row(reinterpret_cast<const float*>(from), count, factor, to);
  }
}

// to[i] = from[i] * factor for i < count, rounded once to the dtype.
template <class T>
HWY_INLINE void narrow_row(const float* from, size_t count, float factor, T* to) {
  const F32 d;
  const F32Vec factors = hn::Set(d, factor);
  for (size_t i = 0; i < count; i += kLanes) {
    const F32Vec value = hn::Mul(hn::LoadU(d, from + i), factors);
    if (i + kLanes <= count) {
      store_f32(d, value, to + i);
    } else {
      store_f32_n(d, value, to + i, count - i);
    }
  }
}

inline void narrow_row(DType dtype, const float* from, size_t count, float factor, std::byte* to) {
  switch (dtype) {
    case DType::kF8E4M3:
      for (size_t i = 0; i < count; ++i) reinterpret_cast<F8E4M3*>(to)[i] = F8E4M3::from_float(from[i] * factor);
      return;
    case DType::kF16:
      return narrow_row(from, count, factor, reinterpret_cast<F16*>(to));
    case DType::kBF16:
      return narrow_row(from, count, factor, reinterpret_cast<BF16*>(to));
    default:
      return narrow_row(from, count, factor, reinterpret_cast<float*>(to));
  }
}

// ---- transpose of keys
// -----------------------------------------------------------------------------------------------

#if HWY_TARGET != HWY_SCALAR

// Block b (16 bytes) of the result is the 16 bytes at rows[4 * b].
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const std::byte* const* rows, size_t offset_bytes) {
  if constexpr (hn::MaxLanes(D()) <= 4) {
    return hn::LoadU(d, reinterpret_cast<const hn::TFromD<D>*>(rows[0] + offset_bytes));
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, load_blocks(half, rows + hn::MaxLanes(half), offset_bytes),
                       load_blocks(half, rows, offset_bytes));
  }
}

// Calls take(c, vector) for c = 0 .. 3: lane r of the vector is 32-bit word c of the 16 bytes at rows[r] +
// offset_bytes.
template <class D, class Take>
HWY_INLINE void transpose_words(D d, const std::byte* const* rows, size_t offset_bytes, Take take) {
  const hn::Repartition<double, D> d64;
  // Block b of the r-th vector belongs to row 4 b + r, which is the lane where it ends.
  const auto r0 = load_blocks(d, rows, offset_bytes);
  const auto r1 = load_blocks(d, rows + 1, offset_bytes);
  const auto r2 = load_blocks(d, rows + 2, offset_bytes);
  const auto r3 = load_blocks(d, rows + 3, offset_bytes);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
  const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  take(0, hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)));
  take(1, hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)));
  take(2, hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)));
  take(3, hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)));
}
#endif

// tile[i][j] = rows[j][i] for j < columns (a multiple of kLanes) and i < depth. f32 rows are read up to a multiple of
// 4, bf16 rows up to a multiple of 8, and the tile is written as far.
inline void transpose_keys(DType dtype, const std::byte* const* rows, size_t columns, size_t depth, float* tile) {
#if HWY_TARGET == HWY_SCALAR
  for (size_t i = 0; i < depth; ++i) {
    for (size_t j = 0; j < columns; ++j) {
      tile[i * kKeysPerTile + j] = dtype == DType::kBF16 ? reinterpret_cast<const BF16*>(rows[j])[i].to_float()
                                                         : reinterpret_cast<const float*>(rows[j])[i];
    }
  }
#else
  const F32 d;
  const hn::RebindToUnsigned<F32> du;
  const auto upper_half = hn::Set(du, 0xffff0000u);
  for (size_t j = 0; j < columns; j += kLanes) {
    if (dtype == DType::kBF16) {
      // A word holds two dims; widening is a shift for the lower one and a mask for the upper one.
      for (size_t i = 0; i < depth; i += 8) {
        float* to = tile + i * kKeysPerTile + j;
        transpose_words(du, rows + j, i * sizeof(BF16), [&](size_t c, auto pairs) HWY_ATTR {
          hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(pairs)), d, to + 2 * c * kKeysPerTile);
          hn::StoreU(hn::BitCast(d, hn::And(pairs, upper_half)), d, to + (2 * c + 1) * kKeysPerTile);
        });
      }
    } else {
      for (size_t i = 0; i < depth; i += 4) {
        float* to = tile + i * kKeysPerTile + j;
        transpose_words(d, rows + j, i * sizeof(float),
                        [&](size_t c, auto dims) HWY_ATTR { hn::StoreU(dims, d, to + c * kKeysPerTile); });
      }
    }
  }
#endif
}

// ---- softmax
// ---------------------------------------------------------------------------------------------------------

// -inf as the reference point of exponents would make NaN of the zero weights of an empty row.
HWY_INLINE float finite_reference(float max) { return max == -std::numeric_limits<float>::infinity() ? 0.0f : max; }

HWY_INLINE float exp2_of(float x) {
  const F32 d;
  return hn::GetLane(exp2(d, hn::Set(d, x)));
}

// Replaces the base-2 logits scores[begin .. end) by 2^(score - max) and fills up with zeros to whole vectors; other
// scores are neither used nor counted. Lane l of the sum adds the keys of that lane in ascending order, then lanes are
// added.
HWY_INLINE void softmax_chunk(float* scores, size_t begin, size_t end, float* max, float* sum) {
  const F32 d;
  const F32Vec minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  const size_t first = begin / kLanes * kLanes;
  const auto is_whole = [&](size_t i) { return i >= begin && i + kLanes <= end; };
  const auto visible = [&](size_t i) HWY_ATTR {
    const auto below_end = hn::FirstN(d, std::min(end - i, kLanes));
    return i >= begin ? below_end : hn::AndNot(hn::FirstN(d, begin - i), below_end);
  };
  F32Vec maxima = minus_infinity;
  for (size_t i = first; i < end; i += kLanes) {
    F32Vec logits = hn::LoadU(d, scores + i);
    if (!is_whole(i)) logits = hn::IfThenElse(visible(i), logits, minus_infinity);
    maxima = hn::Max(maxima, logits);
  }
  *max = hn::GetLane(hn::MaxOfLanes(d, maxima));
  const F32Vec reference = hn::Set(d, finite_reference(*max));
  F32Vec sums = hn::Zero(d);
  for (size_t i = first; i < end; i += kLanes) {
    F32Vec weights = exp2(d, hn::Sub(hn::LoadU(d, scores + i), reference));
    if (!is_whole(i)) weights = hn::IfThenElseZero(visible(i), weights);
    hn::StoreU(weights, d, scores + i);
    sums = hn::Add(sums, weights);
  }
  *sum = hn::GetLane(hn::SumOfLanes(d, sums));
}

// total = total + chunk, both (max, sum, out) relative to their own maximum. An empty chunk (sum 0) changes nothing,
// the first other one is copied, so that a row of one chunk is exact. `width` floats, a multiple of kLanes.
HWY_INLINE void merge_chunk(float chunk_max, float chunk_sum, const float* HWY_RESTRICT chunk_out, float* total_max,
                            float* total_sum, float* HWY_RESTRICT total_out, size_t width) {
  if (chunk_sum == 0.0f) return;
  const F32 d;
  if (*total_sum == 0.0f) {
    *total_max = chunk_max;
    *total_sum = chunk_sum;
    for (size_t i = 0; i < width; i += kLanes) hn::StoreU(hn::LoadU(d, chunk_out + i), d, total_out + i);
    return;
  }
  const float max = std::max(*total_max, chunk_max);
  const float total_weight = exp2_of(*total_max - max);
  const float chunk_weight = exp2_of(chunk_max - max);
  const F32Vec total_weights = hn::Set(d, total_weight);
  const F32Vec chunk_weights = hn::Set(d, chunk_weight);
  for (size_t i = 0; i < width; i += kLanes) {
    const F32Vec total = hn::Mul(hn::LoadU(d, total_out + i), total_weights);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, chunk_out + i), chunk_weights, total), d, total_out + i);
  }
  *total_sum = *total_sum * total_weight + chunk_sum * chunk_weight;
  *total_max = max;
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_OPS_ATTENTION_CPU_FLASH_TILES_INL_H_
