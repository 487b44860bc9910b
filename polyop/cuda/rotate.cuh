// Rotary embedding on the device: one pair of channels, and the channels of one lane.
#pragma once

#include <cstdint>

#include "polyop/core/rotary_table.h"

namespace polyop::cuda {

/// (x1, x2) turned by the angle with cosine c and sine s: one product rounded, the other fused into the sum.
__device__ inline void rotate_pair(float x1, float x2, float c, float s, float* y1, float* y2) {
  *y1 = fmaf(x1, c, -__fmul_rn(x2, s));
  *y2 = fmaf(x2, c, __fmul_rn(x1, s));
}

/// Where one lane's channels of a head stand: kWidth from `low` on and kWidth from `high` on. Half-split, these are
/// pairs; interleaved, or behind the rotary part, 2 kWidth neighbours.
struct LaneChannels {
  bool rotates = false;
  int32_t slot = 0;
  int32_t low = 0;
  int32_t high = 0;
};

/// Slot `slot` of the D / (2 kWidth) slots of a head.
template <int kWidth, bool kInterleaved>
__device__ LaneChannels lane_channels(const RotaryTable& table, int32_t slot) {
  const auto rotary_dim = static_cast<int32_t>(table.rotary_dim);
  const bool rotates = slot < rotary_dim / (2 * kWidth);
  const bool neighbours = kInterleaved || !rotates;
  const int32_t low = slot * kWidth * (neighbours ? 2 : 1);
  return {.rotates = rotates, .slot = slot, .low = low, .high = low + (neighbours ? kWidth : rotary_dim / 2)};
}

/// Cosines and sines of a lane's pairs.
template <int kWidth>
struct Angles {
  float c[kWidth];
  float s[kWidth];
};

/// kWidth neighbouring floats, in 16-byte accesses when `wide`.
template <int kWidth>
__device__ void load_floats(const float* from, bool wide, float (&to)[kWidth]) {
  static_assert(kWidth % 4 == 0);
  if (wide) {
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + j));
      to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[j] = __ldg(from + j);
  }
}

/// The angles of a position; angles of 0, nothing read, for a lane behind the rotary part.
template <int kWidth>
__device__ Angles<kWidth> load_angles(const RotaryTable& table, int64_t position, const LaneChannels& at, bool wide) {
  Angles<kWidth> angles;
  if (at.rotates) {
    const float* cosines = table.cosines(position) + at.slot * kWidth;
    load_floats(cosines, wide, angles.c);
    load_floats(cosines + table.rotary_dim / 2, wide, angles.s);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) angles.c[j] = 1.0f, angles.s[j] = 0.0f;
  }
  return angles;
}

/// The pairs of a lane, channels low ... then high ... in x.
template <int kWidth, bool kInterleaved>
__device__ void rotate_lane(const Angles<kWidth>& angles, float (&x)[2 * kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int first = kInterleaved ? 2 * j : j;
    const int second = kInterleaved ? 2 * j + 1 : kWidth + j;
    rotate_pair(x[first], x[second], angles.c[j], angles.s[j], &x[first], &x[second]);
  }
}

}  // namespace polyop::cuda
