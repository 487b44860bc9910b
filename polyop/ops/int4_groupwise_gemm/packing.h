// The fragment layout of INT4 weights (README.md has the drawing): what exporters write, what the GPU's tensor cores
// load without a shuffle, and what the CPU kernel reads as lanes of 4 columns x 4 depths.
#pragma once

#include <cstdint>

#include "polyop/core/status.h"

namespace polyop {

inline constexpr int64_t kFragmentColumns = 128;  // n of one fragment block
inline constexpr int64_t kFragmentDepth = 64;     // k of one fragment block
inline constexpr int64_t kFragmentRowBytes = 512;
inline constexpr int64_t kFragmentRowsPerBlock = 8;
inline constexpr int kInt4Bias = 8;  // a nibble q stands for the weight q - 8

/// Rows of 512 bytes that w [N, K] packs into: ceil(N / 128) * ceil(K / 64) * 8.
constexpr int64_t int4_fragment_rows(int64_t n, int64_t k) {
  const int64_t column_blocks = (n + kFragmentColumns - 1) / kFragmentColumns;
  const int64_t depth_blocks = (k + kFragmentDepth - 1) / kFragmentDepth;
  return column_blocks * depth_blocks * kFragmentRowsPerBlock;
}

/// Position of one weight in the packed buffer.
struct NibbleAddress {
  int64_t byte;
  int shift;  // 0 or 4
};

/// Where w[column, depth] lies in fragments of a matrix with ceil(K / 64) = `depth_blocks`.
constexpr NibbleAddress int4_fragment_address(int64_t column, int64_t depth, int64_t depth_blocks) {
  const int64_t column_in_block = column % kFragmentColumns;
  const int64_t strip = column_in_block / 64;  // p
  const int64_t high_half = column_in_block % 64 / 32;
  const int64_t lane = column_in_block % 32;
  const int64_t depth_in_block = depth % kFragmentDepth;
  const int64_t step = depth_in_block / 16;
  const int64_t high_depth = depth_in_block % 16 / 8;
  const int64_t pair = depth_in_block % 8 / 2;
  const int64_t odd = depth_in_block % 2;
  const int64_t row =
      (column / kFragmentColumns * depth_blocks + depth / kFragmentDepth) * kFragmentRowsPerBlock + 2 * step + strip;
  const int64_t word = 4 * lane + pair;
  const int64_t nibble = 4 * odd + 2 * high_half + high_depth;
  return {row * kFragmentRowBytes + 4 * word + nibble / 2, static_cast<int>(nibble % 2 * 4)};
}

/// Packs q [N, K] u8 (values 0 to 15, row-major; the weight is q - 8) into `packed` [int4_fragment_rows(n, k), 512].
/// Columns past N and depths past K get nibble 8, the weight zero. kInvalidArgument, and `packed` untouched, for a
/// negative extent or a value above 15.
Status pack_int4_fragments(const uint8_t* q, int64_t n, int64_t k, uint8_t* packed);

/// The inverse: q [N, K] u8 of `packed`; padding is dropped. kInvalidArgument for a negative extent.
Status unpack_int4_fragments(const uint8_t* packed, int64_t n, int64_t k, uint8_t* q);

}  // namespace polyop
