// Ragged batches on the device: which sequence a packed token belongs to, and sums over sequences.
#pragma once

#include <cstdint>

namespace polyop::cuda {

/// Sum of the values of all lanes, to all; all 32 lanes of a warp call it.
template <class T>
__device__ inline T warp_sum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

/// Sum of the values of lanes 0 to this one; all 32 lanes of a warp call it.
template <class T>
__device__ inline T warp_prefix_sum(T value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

/// The sequence b with offsets[b] <= token < offsets[b + 1], or -1 when no sequence has the token. All 32 lanes of a
/// warp call it with the same arguments; offsets [num_sequences + 1] never decrease. Two dependent reads up to 1024
/// sequences.
__device__ inline int64_t find_sequence(const int32_t* offsets, int64_t num_sequences, int64_t token) {
  const int lane = threadIdx.x % 32;
  // The answer is the last index in [first, first + count) whose offset is at most the token.
  int64_t first = 0;
  int64_t count = num_sequences + 1;
  if (token < offsets[0]) return -1;
  while (count > 1) {
    const int64_t step = (count + 31) / 32;
    const int64_t probe = first + lane * step;
    const bool reached = lane * step < count && offsets[probe] <= token;
    const int last = 31 - __clz(__ballot_sync(0xffffffffu, reached));
    first += last * step;
    count = min(step, count - last * step);
  }
  return first < num_sequences ? first : -1;
}

}  // namespace polyop::cuda
