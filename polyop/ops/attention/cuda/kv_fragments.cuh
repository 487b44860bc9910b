// Fragments of K and V tiles for the matrix instruction m16n8k16, from shared memory, for 16-bit and 8-bit caches.
// The order of the 16 channels inside a step of q k^T and of the channels inside an output tile is free as long as q
// and the stores agree: 8-bit caches use the order in which ldmatrix hands out bytes, so nothing is moved between
// lanes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/ptx.cuh"

namespace polyop::cuda {

template <class Kv>
inline constexpr bool kIsByte = sizeof(Kv) == 1;

/// Two stored bytes (low half of `pair`) as f16x2.
template <class Kv>
__device__ inline uint32_t widen_pair(uint32_t pair) {
  if constexpr (std::is_same_v<Kv, Fp8>) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    return static_cast<uint32_t>(halves.x) | (static_cast<uint32_t>(halves.y) << 16);
  } else {
    // 0x64xx is the f16 1024 + xx; flipping the sign bit of the byte adds 128.
    const uint32_t shifted = __byte_perm(pair ^ 0x8080u, 0x64646464u, 0x4140);
    const __half2 offset = __float2half2_rn(1152.0f);
    const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&shifted), offset);
    return *reinterpret_cast<const uint32_t*>(&value);
  }
}

/// A tile of rows (keys) of kHeadDim channels in shared memory. The distance of rows is an odd number of 16-byte units:
/// eight rows start in eight different bank groups.
template <class Kv, int kHeadDim>
struct KvTile {
  static constexpr int kRowUnits = kHeadDim * static_cast<int>(sizeof(Kv)) / 16;
  static constexpr int kRowBytes = (kRowUnits | 1) * 16;

  /// A row of an odd number of units: the second unit of the last load is not there, and nobody uses what comes
  /// instead.
  __device__ static int inside(int unit) {
    if constexpr (kRowUnits % 2 == 1) return min(unit, kRowUnits - 1);
    return unit;
  }

  /// B fragments of q k^T: 16 keys from `key`, the 16 channels of step `step`: b[0..1] keys 0-7, b[2..3] keys 8-15.
  /// For 8-bit caches steps come in pairs; `step` is even and b holds both: b[4 * s + ...].
  static constexpr int kStepsPerLoad = kIsByte<Kv> ? 2 : 1;

  __device__ static void load_k(uint32_t tile, int key, int step, uint32_t (&b)[4 * kStepsPerLoad]) {
    const int lane = threadIdx.x % 32;
    const int row = key + lane / 16 * 8 + lane % 8;
    const int unit = inside((kIsByte<Kv> ? step : step * 2) + lane / 8 % 2);
    uint32_t registers[4];
    load_matrices(registers, tile + row * kRowBytes + unit * 16);
    if constexpr (kIsByte<Kv>) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int keys = 0; keys < 2; ++keys) {
          b[4 * s + 2 * keys] = widen_pair<Kv>(registers[2 * keys + s] & 0xffffu);
          b[4 * s + 2 * keys + 1] = widen_pair<Kv>(registers[2 * keys + s] >> 16);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = registers[i];
    }
  }

  /// B fragments of p v: keys `key` .. key + 15, output tiles tile0 .. tile0 + kTilesPerLoad - 1 of 8 channels: b[2 *
  /// t], b[2 * t + 1].
  static constexpr int kTilesPerLoad = kIsByte<Kv> ? 4 : 2;

  __device__ static void load_v(uint32_t tile, int key, int tile0, uint32_t (&b)[2 * kTilesPerLoad]) {
    const int lane = threadIdx.x % 32;
    const int row = key + lane / 8 % 2 * 8 + lane % 8;
    const int unit = inside((kIsByte<Kv> ? tile0 / 2 : tile0) + lane / 16);
    uint32_t registers[4];
    load_matrices_transposed(registers, tile + row * kRowBytes + unit * 16);
    if constexpr (kIsByte<Kv>) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {  // of 16 channels: the even ones, then the odd ones
#pragma unroll
        for (int keys = 0; keys < 2; ++keys) {
          const uint32_t bytes = registers[2 * block + keys];
          b[4 * block + keys] = widen_pair<Kv>(__byte_perm(bytes, 0, 0x4420));
          b[4 * block + 2 + keys] = widen_pair<Kv>(__byte_perm(bytes, 0, 0x4431));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = registers[i];
    }
  }

  /// Channel of column `column` (0 or 1) that this lane holds of output tile `tile`.
  __device__ static int output_channel(int tile, int column) {
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
