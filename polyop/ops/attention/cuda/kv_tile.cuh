// Tiles of sixteen keys in shared memory as operands of the matrix instruction m16n8k16, for 16-bit and 8-bit caches.
// The order of the channels inside a step of q k^T and inside a block of the output is free as long as q and the stores
// agree: 8-bit caches use the order in which ldmatrix hands out bytes, so nothing is moved between lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/ptx.cuh"

namespace polyop::cuda {

inline constexpr int kKeysPerTile = 16;  // M of the matrix instruction

template <class Kv>
inline constexpr bool kIsByte = sizeof(Kv) == 1;

/// Bytes 0 and 1, or 0 and 2, or 1 and 3 of `bytes`, as f16x2.
enum class BytePair : uint32_t { kLow = 0x10, kHigh = 0x32, kEven = 0x20, kOdd = 0x31 };

template <class Kv, BytePair kPair>
__device__ inline uint32_t widen_pair(uint32_t bytes) {
  constexpr auto kSelect = static_cast<uint32_t>(kPair);
  if constexpr (std::is_same_v<Kv, Fp8> && kPair == BytePair::kLow) {
    return widen_f8e4m3(bytes);
  } else if constexpr (std::is_same_v<Kv, Fp8> && kPair == BytePair::kHigh) {
    return widen_f8e4m3(bytes >> 16);
  } else if constexpr (std::is_same_v<Kv, Fp8>) {
    return widen_f8e4m3(__byte_perm(bytes, 0, 0x4400 | kSelect));
  } else {
    // 0x64xx is the f16 1024 + xx; flipping the sign bit of the byte adds 128.
    const uint32_t shifted =
        __byte_perm(bytes ^ 0x80808080u, 0x64646464u, 0x4040 | (kSelect & 0xf) | kSelect >> 4 << 8);
    const __half2 offset = __float2half2_rn(1152.0f);
    const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&shifted), offset);
    return *reinterpret_cast<const uint32_t*>(&value);
  }
}

/// A tile of sixteen rows (keys) of kHeadDim channels, dense. The 16-byte units of a row change places by the row's
/// number, so that one unit of eight rows lies in eight different groups of banks, and both halves of a 32-byte sector
/// stay in one line of 128 bytes: an asynchronous copy asks for a sector twice when they do not.
template <class Kv, int kHeadDim>
struct KvTile {
  static constexpr int kRowUnits = kHeadDim * static_cast<int>(sizeof(Kv)) / 16;
  static constexpr int kRowBytes = kRowUnits * 16;
  static constexpr int kBytes = 16 * kRowBytes;
  static constexpr int kPairBytes = 2 * kBytes;  // k, then v
  static constexpr int kSteps = kHeadDim / 16;   // of 16 channels

  /// 8-bit caches: one load brings two steps of 16 channels.
  static constexpr int kStepsPerLoad = kIsByte<Kv> ? 2 : 1;

  static constexpr int kFactor = kRowUnits % 8 == 0 ? 8 : kRowUnits % 4 == 0 ? 4 : kRowUnits % 2 == 0 ? 2 : 1;

  /// Byte offset in the tile of unit `unit` of row `row`.
  __device__ static int unit_offset(int row, int unit) {
    return row * kRowBytes + (unit ^ (row % 8 / (8 / kFactor))) * 16;
  }

  /// The same address for unit lane_unit + kUnit, kUnit a constant and even, lane_unit 0 or 1: one operation more than
  /// that of unit `lane_unit`, which all calls share. A row of an odd number of units: the second unit of the last load
  /// is not there, and nobody uses what comes instead.
  __device__ static uint32_t unit_address(uint32_t tile, int row, int lane_unit, int unit) {
    if constexpr (kFactor == 1) return tile + unit_offset(row, min(lane_unit + unit, kRowUnits - 1));
    const uint32_t first = tile + unit_offset(row, lane_unit);
    return (first ^ static_cast<uint32_t>(unit % kFactor * 16)) + static_cast<uint32_t>(unit / kFactor * kFactor * 16);
  }

  /// Keys as the A operand: the 16 keys by the channels of step `step` (and the next one in a[4..7]).
  __device__ static void load_keys(uint32_t tile, int step, uint32_t (&a)[4 * kStepsPerLoad]) {
    const int lane = threadIdx.x % 32;
    uint32_t r[4];  // rows 0-7 and 8-15 of one unit, then of the next
    load_matrices(r, unit_address(tile, lane % 16, lane / 16, kIsByte<Kv> ? step : step * 2));
    if constexpr (kIsByte<Kv>) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int rows = 0; rows < 2; ++rows) {
          a[4 * s + rows] = widen_pair<Kv, BytePair::kLow>(r[2 * s + rows]);
          a[4 * s + rows + 2] = widen_pair<Kv, BytePair::kHigh>(r[2 * s + rows]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = r[i];
    }
  }

  /// Values as the A operand, transposed: the 16 channels of block `block` (and the next one in a[4..7]) by the 16
  /// keys.
  __device__ static void load_values(uint32_t tile, int block, uint32_t (&a)[4 * kStepsPerLoad]) {
    const int lane = threadIdx.x % 32;
    uint32_t r[4];
    if constexpr (kIsByte<Kv>) {  // keys 0-7 and 8-15 of one block, then of the next
      load_matrices_transposed(r, unit_address(tile, lane % 16, lane / 16, block));
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int keys = 0; keys < 2; ++keys) {
          a[4 * s + 2 * keys] = widen_pair<Kv, BytePair::kEven>(r[2 * s + keys]);
          a[4 * s + 2 * keys + 1] = widen_pair<Kv, BytePair::kOdd>(r[2 * s + keys]);
        }
      }
    } else {
      const int row = lane % 8 + lane / 16 * 8;
      load_matrices_transposed(r, unit_address(tile, row, lane / 8 % 2, block * 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = r[i];
    }
  }

  /// Channel that this lane holds in half `half` (rows lane / 4 and lane / 4 + 8 of the operand) of block `block`.
  __device__ static int block_channel(int block, int half) {
    const int g = threadIdx.x % 32 / 4;
    return block * 16 + (kIsByte<Kv> ? 2 * g + half : g + 8 * half);
  }

  /// Keys as the B operand: b[0..1] keys 0-7, b[2..3] keys 8-15 by the channels of step `step` (and of the next one).
  __device__ static void load_key_columns(uint32_t tile, int step, uint32_t (&b)[4 * kStepsPerLoad]) {
    const int lane = threadIdx.x % 32;
    const int row = lane / 16 * 8 + lane % 8;
    uint32_t r[4];
    load_matrices(r, unit_address(tile, row, lane / 8 % 2, kIsByte<Kv> ? step : step * 2));
    if constexpr (kIsByte<Kv>) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int keys = 0; keys < 2; ++keys) {
          b[4 * s + 2 * keys] = widen_pair<Kv, BytePair::kLow>(r[2 * keys + s]);
          b[4 * s + 2 * keys + 1] = widen_pair<Kv, BytePair::kHigh>(r[2 * keys + s]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = r[i];
    }
  }

  /// Values as the B operand: the 16 keys by output tiles tile0 .. tile0 + kTilesPerLoad - 1 of 8 channels: b[2 * t],
  /// b[2 * t + 1].
  static constexpr int kTilesPerLoad = kIsByte<Kv> ? 4 : 2;

  __device__ static void load_value_columns(uint32_t tile, int tile0, uint32_t (&b)[2 * kTilesPerLoad]) {
    const int lane = threadIdx.x % 32;
    const int row = lane / 8 % 2 * 8 + lane % 8;
    uint32_t r[4];
    load_matrices_transposed(r, unit_address(tile, row, lane / 16, kIsByte<Kv> ? tile0 / 2 : tile0));
    if constexpr (kIsByte<Kv>) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {  // of 16 channels: the even ones, then the odd ones
#pragma unroll
        for (int keys = 0; keys < 2; ++keys) {
          b[4 * block + keys] = widen_pair<Kv, BytePair::kEven>(r[2 * block + keys]);
          b[4 * block + 2 + keys] = widen_pair<Kv, BytePair::kOdd>(r[2 * block + keys]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = r[i];
    }
  }

  /// Channel of column `column` (0 or 1) that this lane holds of output tile `tile`.
  __device__ static int column_channel(int tile, int column) {
    const int t = threadIdx.x % 4;
    if constexpr (kIsByte<Kv>) return tile / 2 * 16 + 4 * t + 2 * column + tile % 2;
    return tile * 8 + 2 * t + column;
  }

  /// First of two neighbouring channels that this lane holds in half `half` of step `step` of q.
  __device__ static int query_channel(int step, int half) {
    const int t = threadIdx.x % 4;
    if constexpr (kIsByte<Kv>) return step * 16 + 4 * t + 2 * half;
    return step * 16 + 2 * t + 8 * half;
  }
};

}  // namespace polyop::cuda
