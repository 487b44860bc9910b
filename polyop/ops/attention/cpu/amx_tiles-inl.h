// Pieces of amx_attention that know tiles but no attention problem: rows of any dtype as bf16 pieces, the word layouts
// that right operands need, the two products, and the softmax of a chunk.
//
// Right operand: word [k / 2][n] holds depths k and k + 1 of column n. Sums of a product: per 32 depths as
// tile_multiply_bf16 says, blocks of 32 in ascending order, in each block the pairs of pieces in the order of their
// list.
//
// Included once per SIMD target.
#if defined(POLYOP_OPS_ATTENTION_CPU_AMX_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_OPS_ATTENTION_CPU_AMX_TILES_INL_H_
#undef POLYOP_OPS_ATTENTION_CPU_AMX_TILES_INL_H_
#else
#define POLYOP_OPS_ATTENTION_CPU_AMX_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "polyop/core/numeric_types.h"
#include "polyop/cpu/amx.h"
#include "polyop/cpu/bf16_pieces-inl.h"
#include "polyop/cpu/simd_convert-inl.h"
#include "polyop/ops/attention/cpu/flash_plan.h"
#include "polyop/ops/attention/cpu/flash_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

using U16 = hn::ScalableTag<uint16_t>;
using U32 = hn::ScalableTag<uint32_t>;
static_assert(kLanes == kAmxRows && hn::MaxLanes(U16()) == kAmxDepth);

constexpr int64_t round_up_to_depth(int64_t dim) { return (dim + kAmxDepth - 1) / kAmxDepth * kAmxDepth; }

// ---- rows as pieces

/// bf16 numbers whose sum is exactly a number of the dtype.
constexpr int exact_pieces(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 3;
    case DType::kF16:
      return 2;
    default:
      return 1;
  }
}

// Piece p of the row to to[p * piece_stride ..], zeros from `count` up to a whole block of depths. False when a number
// is infinite or NaN.
template <int kPieces, class T>
bool split_row(const T* from, size_t count, uint16_t* to, size_t piece_stride) {
  const F32 d;
  const U32 du;
  const auto magnitude_bits = hn::Set(du, 0x7fffffffu);
  auto largest = hn::Zero(du);
  const auto put = [&](F32Vec low, F32Vec high, size_t i) HWY_ATTR {
    largest = hn::Max(largest, hn::And(hn::BitCast(du, low), magnitude_bits));
    largest = hn::Max(largest, hn::And(hn::BitCast(du, high), magnitude_bits));
    store_bf16_pieces<kPieces>(d, low, high, to + i, piece_stride);
  };
  size_t i = 0;
  for (; i + kAmxDepth <= count; i += kAmxDepth) put(load_f32(d, from + i), load_f32(d, from + i + kLanes), i);
  if (i < count) {
    const size_t low = std::min(kLanes, count - i);
    const size_t high = count - i - low;
    put(load_f32_n(d, from + i, low), high > 0 ? load_f32_n(d, from + i + low, high) : hn::Zero(d), i);
  }
  return hn::AllTrue(du, hn::Lt(largest, hn::Set(du, 0x7f800000u)));
}

// A bf16 row is its own piece, whatever it holds.
inline void copy_row(const uint16_t* from, size_t count, uint16_t* to) {
  const U16 d16;
  size_t i = 0;
  for (; i + kAmxDepth <= count; i += kAmxDepth) hn::StoreU(hn::LoadU(d16, from + i), d16, to + i);
  if (i < count) hn::StoreU(hn::MaskedLoad(hn::FirstN(d16, count - i), d16, from + i), d16, to + i);
}

inline void copy_row(const std::byte* from, size_t count, uint16_t* to) {
  copy_row(reinterpret_cast<const uint16_t*>(from), count, to);
}

// The 256 values of a dtype of one byte as bf16: 128 magnitudes in four registers, and the sign.
class ByteTable {
 public:
  explicit ByteTable(DType dtype) : is_integer_(dtype == DType::kI8) {
    for (int i = 0; i < 128 && dtype == DType::kF8E4M3; ++i)
      magnitudes_[i] = BF16::from_float(byte_values(dtype)[i]).bits;
  }

  // to[i] = bf16 of from[i], exact; zeros up to a whole block of depths.
  void widen_row(const std::byte* from, size_t count, uint16_t* to) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(from);
    for (size_t i = 0; i < count; i += kAmxDepth) {
      const __mmask32 valid = count - i >= kAmxDepth ? ~__mmask32{0} : (__mmask32{1} << (count - i)) - 1;
      const __m256i raw = _mm256_maskz_loadu_epi8(valid, bytes + i);
      _mm512_storeu_si512(to + i, is_integer_ ? widen_integers(raw) : widen_floats(raw));
    }
  }

 private:
  static __m512i widen_integers(__m256i raw) {
    const F32 d;
    const auto widened = [](__m128i part) { return F32Vec{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part))}; };
    return pack_bf16(d, widened(_mm256_castsi256_si128(raw)), widened(_mm256_extracti128_si256(raw, 1))).raw;
  }

  __m512i widen_floats(__m256i raw) const {
    const auto part = [this](int i) { return _mm512_load_si512(magnitudes_ + 32 * i); };
    const __m512i codes = _mm512_cvtepu8_epi16(raw);
    const __m512i below_64 = _mm512_permutex2var_epi16(part(0), codes, part(1));
    const __m512i from_64 = _mm512_permutex2var_epi16(part(2), codes, part(3));
    const __mmask32 is_upper = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
    return _mm512_or_si512(_mm512_mask_blend_epi16(is_upper, below_64, from_64), sign);
  }

  alignas(64) uint16_t magnitudes_[128];
  bool is_integer_;
};

// ---- right operands

// words[i * stride + n] = word i of rows[n], for n < 16 and i < dim / 2; dim is a multiple of 32 bf16 numbers.
inline void transpose_row_words(const std::byte* const* rows, int64_t dim, uint32_t* words, int64_t stride) {
  const U32 du;
  for (int64_t i = 0; i < dim / 2; i += 4) {
    transpose_words(du, rows, i * sizeof(uint32_t),
                    [&](size_t c, auto word) HWY_ATTR { hn::StoreU(word, du, words + (i + c) * stride); });
  }
}

// Words {even[n], odd[n]} for n < dim, a multiple of 32, in tiles of 16 columns, tile_stride words apart. The columns
// of a block of 32 stand in the order 0-3, 8-11, 16-19, 24-27, 4-7, ...: restore_columns brings sums back. False when a
// number is infinite or NaN.
inline bool pair_rows(const uint16_t* even, const uint16_t* odd, int64_t dim, uint32_t* words, int64_t tile_stride) {
  const U16 d16;
  const U32 du;
  const auto magnitude_bits = hn::Set(d16, 0x7fffu);
  auto largest = hn::Zero(d16);
  for (int64_t i = 0; i < dim; i += kAmxDepth) {
    const auto a = hn::LoadU(d16, even + i);
    const auto b = hn::LoadU(d16, odd + i);
    largest = hn::Max(largest, hn::Max(hn::And(a, magnitude_bits), hn::And(b, magnitude_bits)));
    uint32_t* to = words + i / kAmxRows * tile_stride;
    hn::StoreU(hn::BitCast(du, hn::InterleaveLower(d16, a, b)), du, to);
    hn::StoreU(hn::BitCast(du, hn::InterleaveUpper(d16, a, b)), du, to + tile_stride);
  }
  return hn::AllTrue(d16, hn::Lt(largest, hn::Set(d16, 0x7f80u)));
}

// Puts the columns of pair_rows back in order.
inline void restore_columns(float* row, int64_t dim) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t i = 0; i < dim; i += kAmxDepth) {
    const __m512 a = _mm512_loadu_ps(row + i);
    const __m512 b = _mm512_loadu_ps(row + i + kLanes);
    _mm512_storeu_ps(row + i, _mm512_permutex2var_ps(a, first, b));
    _mm512_storeu_ps(row + i + kLanes, _mm512_permutex2var_ps(a, second, b));
  }
}

// ---- products

/// An operand of a product: up to four tiles of 16 rows (left) or 16 columns (right), and strides in bytes. A left one
/// has rows of depths, a right one rows of words.
struct AmxOperand {
  const std::byte* tiles[4];
  int64_t row_bytes;
  int64_t piece_bytes;  // to the same number's next piece; 0 for an operand of one piece
  int64_t depth_bytes;  // to the next 32 depths

  /// The same strides; tile i starts at `first` + i * tile_bytes.
  void set_tiles(const void* first, int64_t tile_bytes) {
    for (int64_t i = 0; i < 4; ++i) tiles[i] = static_cast<const std::byte*>(first) + i * tile_bytes;
  }
};

// Tiles 0 .. kTiles - 1 are the sums of a product.
template <int kTiles>
void zero_sums() {
  [&]<int... kSum>(std::integer_sequence<int, kSum...>) { (tile_zero<kSum>(), ...); }
  (std::make_integer_sequence<int, kTiles>());
}

// sums (kLeftTiles x 16 rows, kRightTiles x 16 columns) from the tiles to memory.
template <int kLeftTiles, int kRightTiles>
void store_sums(float* sums, int64_t sums_stride) {
  [&]<int... kSum>(std::integer_sequence<int, kSum...>) {
    (tile_store<kSum>(sums + kSum / kRightTiles * kAmxRows * sums_stride + kSum % kRightTiles * kAmxRows,
                      sums_stride * static_cast<int64_t>(sizeof(float))),
     ...);
  }
  (std::make_integer_sequence<int, kLeftTiles * kRightTiles>());
}

constexpr int kLeftTile = 4;   // and 5
constexpr int kRightTile = 6;  // and 7

// sums (kLeftTiles x 16 rows, 2 x 16 columns) = left * right over `depth_blocks` times 32 depths, left of `pieces`
// pieces. The right tiles of a block are loaded once for all pieces.
template <int kLeftTiles>
void multiply_by_two(const AmxOperand& left, const AmxOperand& right, int pieces, int64_t depth_blocks, float* sums,
                     int64_t sums_stride) {
  static_assert(kLeftTiles <= 2);
  zero_sums<2 * kLeftTiles>();
  for (int64_t block = 0; block < depth_blocks; ++block) {
    const int64_t right_offset = block * right.depth_bytes;
    tile_load<kRightTile>(right.tiles[0] + right_offset, right.row_bytes);
    tile_load<kRightTile + 1>(right.tiles[1] + right_offset, right.row_bytes);
    for (int p = 0; p < pieces; ++p) {
      const int64_t left_offset = p * left.piece_bytes + block * left.depth_bytes;
      tile_load<kLeftTile>(left.tiles[0] + left_offset, left.row_bytes);
      tile_multiply_bf16<0, kLeftTile, kRightTile>();
      if constexpr (kLeftTiles == 2) {
        tile_load<kLeftTile + 1>(left.tiles[1] + left_offset, left.row_bytes);
        tile_multiply_bf16<2, kLeftTile + 1, kRightTile>();
      }
      tile_multiply_bf16<1, kLeftTile, kRightTile + 1>();
      if constexpr (kLeftTiles == 2) tile_multiply_bf16<3, kLeftTile + 1, kRightTile + 1>();
    }
  }
  store_sums<kLeftTiles, 2>(sums, sums_stride);
}

// sums (4 x 16 rows, 16 columns) = left * right, right of `pieces` pieces.
inline void multiply_four(const AmxOperand& left, const AmxOperand& right, int pieces, int64_t depth_blocks,
                          float* sums, int64_t sums_stride) {
  zero_sums<4>();
  for (int64_t block = 0; block < depth_blocks; ++block) {
    const int64_t left_offset = block * left.depth_bytes;
    for (int p = 0; p < pieces; ++p) {
      tile_load<kRightTile>(right.tiles[0] + p * right.piece_bytes + block * right.depth_bytes, right.row_bytes);
      tile_load<kLeftTile>(left.tiles[0] + left_offset, left.row_bytes);
      tile_multiply_bf16<0, kLeftTile, kRightTile>();
      tile_load<kLeftTile + 1>(left.tiles[1] + left_offset, left.row_bytes);
      tile_multiply_bf16<1, kLeftTile + 1, kRightTile>();
      tile_load<kLeftTile>(left.tiles[2] + left_offset, left.row_bytes);
      tile_multiply_bf16<2, kLeftTile, kRightTile>();
      tile_load<kLeftTile + 1>(left.tiles[3] + left_offset, left.row_bytes);
      tile_multiply_bf16<3, kLeftTile + 1, kRightTile>();
    }
  }
  store_sums<4, 1>(sums, sums_stride);
}

// Adds the product of depth block `block` of one left tile and 16 rows of words to the sums of kRightTiles tiles.
template <int kRightTiles>
void multiply_block(const AmxOperand& left, int64_t block, int pieces, const uint32_t* words, int64_t words_stride) {
  for (int p = 0; p < pieces; ++p) {
    tile_load<kLeftTile>(left.tiles[0] + p * left.piece_bytes + block * left.depth_bytes, left.row_bytes);
    [&]<int... kN>(std::integer_sequence<int, kN...>) {
      ((tile_load<kRightTile + kN % 2>(words + kN * kAmxRows, words_stride * static_cast<int64_t>(sizeof(uint32_t))),
        tile_multiply_bf16<kN, kLeftTile, kRightTile + kN % 2>()),
       ...);
    }
    (std::make_integer_sequence<int, kRightTiles>());
  }
}

// ---- softmax

// Base-2 softmax of the scores keys.begin .. keys.end of a chunk: weight = 2^(factor score - max), as kPieces bf16
// numbers in weights + p * piece_stride. Other weights of [fill.begin, fill.end), multiples of 32, become 0. Lane l of
// the sum adds the keys of that lane in ascending order, then lanes are added.
template <int kPieces>
void weigh_chunk(const float* scores, float factor, IndexRange keys, IndexRange fill, uint16_t* weights,
                 size_t piece_stride, float* max, float* sum) {
  const F32 d;
  const F32Vec factors = hn::Set(d, factor);
  const F32Vec minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  constexpr auto kStep = static_cast<int64_t>(kLanes);
  const auto is_whole = [&](int64_t i) { return i >= keys.begin && i + kStep <= keys.end; };
  const auto is_hidden = [&](int64_t i) { return i + kStep <= keys.begin || i >= keys.end; };
  const auto visible = [&](int64_t i) HWY_ATTR {
    const auto below_end = hn::FirstN(d, std::clamp<int64_t>(keys.end - i, 0, kStep));
    return hn::AndNot(hn::FirstN(d, std::clamp<int64_t>(keys.begin - i, 0, kStep)), below_end);
  };
  F32Vec maxima = minus_infinity;
  for (int64_t i = keys.begin / kStep * kStep; i < keys.end; i += kStep) {
    F32Vec logits = hn::Mul(hn::LoadU(d, scores + i), factors);
    if (!is_whole(i)) logits = hn::IfThenElse(visible(i), logits, minus_infinity);
    maxima = hn::Max(maxima, logits);
  }
  *max = hn::GetLane(hn::MaxOfLanes(d, maxima));
  const F32Vec reference = hn::Set(d, finite_reference(*max));
  F32Vec sums = hn::Zero(d);
  const auto weigh = [&](int64_t i)
                         HWY_ATTR { return exp2(d, hn::MulSub(hn::LoadU(d, scores + i), factors, reference)); };
  const auto weigh_partly = [&](int64_t i) HWY_ATTR {
    if (is_hidden(i)) return hn::Zero(d);
    return is_whole(i) ? weigh(i) : hn::IfThenElseZero(visible(i), weigh(i));
  };
  for (int64_t i = fill.begin; i < fill.end; i += kAmxDepth) {
    const bool both_whole = i >= keys.begin && i + kAmxDepth <= keys.end;
    const F32Vec low = both_whole ? weigh(i) : weigh_partly(i);
    const F32Vec high = both_whole ? weigh(i + kStep) : weigh_partly(i + kStep);
    sums = hn::Add(hn::Add(sums, low), high);
    store_bf16_pieces<kPieces>(d, low, high, weights + i, piece_stride);
  }
  *sum = hn::GetLane(hn::SumOfLanes(d, sums));
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_OPS_ATTENTION_CPU_AMX_TILES_INL_H_
