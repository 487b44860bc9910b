#include "polyop/ops/int4_groupwise_gemm/packing.h"

#include <string>

namespace polyop {
namespace {

Status check_extents(const char* function, int64_t n, int64_t k) {
  if (n >= 0 && k >= 0) return Status::ok();
  return invalid_argument(std::string(function) + ": q has shape [" + std::to_string(n) + ", " + std::to_string(k) +
                          "], wanted extents of at least 0");
}

// Calls visit(bytes of the word, column, depth) for every 32-bit word of the buffer in order. Its nibble j belongs to
// (column + column_of_nibble(j), depth + depth_of_nibble(j)).
template <class Byte, class Visit>
void for_each_word(Byte* packed, int64_t n, int64_t k, Visit visit) {
  for (int64_t block_column = 0; block_column < n; block_column += kFragmentColumns) {
    for (int64_t block_depth = 0; block_depth < k; block_depth += kFragmentDepth) {
      for (int64_t row = 0; row < kFragmentRowsPerBlock; ++row) {
        for (int64_t word = 0; word < kFragmentRowBytes / 4; ++word, packed += 4) {
          visit(packed, block_column + row % 2 * 64 + word / 4, block_depth + row / 2 * 16 + word % 4 * 2);
        }
      }
    }
  }
}

constexpr int64_t column_of_nibble(int nibble) { return nibble / 2 % 2 * 32; }
constexpr int64_t depth_of_nibble(int nibble) { return nibble % 2 * 8 + nibble / 4; }

}  // namespace

Status pack_int4_fragments(const uint8_t* q, int64_t n, int64_t k, uint8_t* packed) {
  POLYOP_RETURN_IF_ERROR(check_extents("pack_int4_fragments", n, k));
  for (int64_t i = 0; i < n * k; ++i) {
    if (q[i] > 15) {
      return invalid_argument("pack_int4_fragments: q[" + std::to_string(i / k) + ", " + std::to_string(i % k) +
                              "] is " + std::to_string(q[i]) + ", wanted 0 to 15");
    }
  }
  for_each_word(packed, n, k, [&](uint8_t* word, int64_t first_column, int64_t first_depth) {
    for (int nibble = 0; nibble < 8; nibble += 2) {
      int byte = 0;
      for (int half = 0; half < 2; ++half) {
        const int64_t column = first_column + column_of_nibble(nibble + half);
        const int64_t depth = first_depth + depth_of_nibble(nibble + half);
        const int value = column < n && depth < k ? q[column * k + depth] : kInt4Bias;
        byte |= value << 4 * half;
      }
      word[nibble / 2] = static_cast<uint8_t>(byte);
    }
  });
  return Status::ok();
}

Status unpack_int4_fragments(const uint8_t* packed, int64_t n, int64_t k, uint8_t* q) {
  POLYOP_RETURN_IF_ERROR(check_extents("unpack_int4_fragments", n, k));
  for_each_word(packed, n, k, [&](const uint8_t* word, int64_t first_column, int64_t first_depth) {
    for (int nibble = 0; nibble < 8; ++nibble) {
      const int64_t column = first_column + column_of_nibble(nibble);
      const int64_t depth = first_depth + depth_of_nibble(nibble);
      if (column < n && depth < k) q[column * k + depth] = word[nibble / 2] >> (nibble % 2 * 4) & 0xf;
    }
  });
  return Status::ok();
}

}  // namespace polyop
