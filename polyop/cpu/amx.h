// Intel AMX: tiles of 16 rows x 64 bytes and the matrix products of bf16 numbers and bytes on them. One wrapper per
// instruction, as inline assembly: the callers are compiled for AVX-512, and only has_amx_bf16() decides at run time
// whether they are called.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define POLYOP_AMX 1
#else
#define POLYOP_AMX 0
#endif

namespace polyop::cpu {

/// Rows of a tile, and its columns when they are f32 sums.
inline constexpr int kAmxRows = 16;
/// bf16 numbers in a row of a left operand: the depth that one product sums over.
inline constexpr int kAmxDepth = 32;
inline constexpr int kAmxRowBytes = 64;

/// Whether this process may run bf16 products on tiles: the processor has AMX-BF16, AVX-512 and its bf16
/// conversion, and the system has granted the tile registers (asked for once). POLYOP_AMX=0 in the environment says no,
/// for machines that must give the bits of others.
bool has_amx_bf16();

/// The same for products of 8-bit integers (AMX-INT8).
bool has_amx_int8();

#if POLYOP_AMX

/// The shapes of tiles 0 to 7.
struct alignas(64) AmxShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows, kAmxRows};
};
static_assert(sizeof(AmxShapes) == 64);

/// Tiles 0 to 7 of this thread while the object lives; all 16 rows x 64 bytes unless told otherwise.
class AmxTiles {
 public:
  explicit AmxTiles(const AmxShapes& shapes = {}) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  ~AmxTiles() { asm volatile("tilerelease"); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

/// Reads 64 bytes from each of the 16 addresses rows + i * stride_bytes.
template <int kTile>
inline void tile_load(const void* rows, ptrdiff_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}

template <int kTile>
inline void tile_store(void* rows, ptrdiff_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride_bytes), "i"(kTile) : "memory");
}

/// sums[m][n] += sum over k < 32 of left[m][k] * right[k / 2][2 n + k % 2] (bf16): even and odd k are summed from zero
/// in f32, ascending, then added together and to sums[m][n]. Subnormal numbers count as 0. Which operand stands on the
/// left does not change a bit.
template <int kSums, int kLeft, int kRight>
inline void tile_multiply_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
}

/// sums[m][n] += sum over k < 64 of left[m][k] * right[k / 4][4 n + k % 4] (signed bytes, 32-bit sums that wrap). Tiles
/// of other shapes: k runs over the bytes of a row of left, which are four times the rows of right.
template <int kSums, int kLeft, int kRight>
inline void tile_multiply_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
}

#endif  // POLYOP_AMX

}  // namespace polyop::cpu
