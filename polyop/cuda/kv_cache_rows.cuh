// Appending to a KV cache on the device: the row of a token, and the quantization of what goes there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "polyop/core/kv_cache_append.h"
#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/ptx.cuh"
#include "polyop/cuda/vectors.cuh"

namespace polyop::cuda {

// ---- quantization ---------------------------------------------------------------------------------------------------

/// x / scale, correctly rounded where the quotient neither stores as 0 nor saturates in 8 bits: a reciprocal and one
/// correction (Markstein). A scale far from 1 is brought near it first, by a power of two that x is multiplied by too.
class Divisor {
 public:
  __device__ explicit Divisor(float scale) {
    is_plain_ = fabsf(scale) > 0x1p-60f && fabsf(scale) < 0x1p60f;
    if (!is_plain_) power_ = fabsf(scale) < 1.0f ? 0x1p64f : 0x1p-64f;
    scale_ = __fmul_rn(scale, power_);
    reciprocal_ = __frcp_rn(scale_);
  }

  /// No power of two is needed: a question for a vector, so that its elements share no branches.
  [[nodiscard]] __device__ bool is_plain() const { return is_plain_; }
  [[nodiscard]] __device__ float prepare(float x) const { return __fmul_rn(x, power_); }

  /// `x` as `prepare` returned it.
  [[nodiscard]] __device__ float divide(float x) const {
    const float quotient = __fmul_rn(x, reciprocal_);
    const float corrected = fmaf(fmaf(-quotient, scale_, x), reciprocal_, quotient);
    // Infinities have no remainder, and that of -0 would take its sign. Below 2^-60 the remainder may be rounded: all
    // such quotients store as 0.
    return fabsf(quotient) > 0.0f && fabsf(quotient) < 0x1p60f ? corrected : quotient;
  }

 private:
  float scale_ = 1.0f;
  float reciprocal_ = 1.0f;
  float power_ = 1.0f;
  bool is_plain_ = true;
};

/// Two values as from_float rounds them, the first in the low byte.
template <class Cache>
__device__ uint32_t round_pair(float first, float second) {
  if constexpr (std::is_same_v<Cache, Fp8>) {
    return __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, __NV_E4M3);
  } else {
    return __byte_perm(static_cast<uint32_t>(round_to_int8(first)), static_cast<uint32_t>(round_to_int8(second)),
                       0x0040);
  }
}

template <class Cache>
__device__ uint32_t divide_four(const float* x, const Divisor& divisor) {
  const uint32_t low = round_pair<Cache>(divisor.divide(x[0]), divisor.divide(x[1]));
  const uint32_t high = round_pair<Cache>(divisor.divide(x[2]), divisor.divide(x[3]));
  return __byte_perm(low, high, 0x5410);
}

/// values / scale, rounded to the cache's type: 1, 2, 4 or 8 of them.
template <class Cache, int kWidth>
__device__ Words<kWidth> quantize(const float (&values)[kWidth], const Divisor& divisor) {
  float x[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) x[j] = values[j];
  if (!divisor.is_plain()) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = divisor.prepare(x[j]);
  }
  if constexpr (kWidth == 8) {
    return {divide_four<Cache>(x, divisor), divide_four<Cache>(x + 4, divisor)};
  } else if constexpr (kWidth == 4) {
    return divide_four<Cache>(x, divisor);
  } else if constexpr (kWidth == 2) {
    return static_cast<uint16_t>(round_pair<Cache>(divisor.divide(x[0]), divisor.divide(x[1])));
  } else {
    static_assert(kWidth == 1);
    return static_cast<uint8_t>(round_pair<Cache>(divisor.divide(x[0]), 0.0f));
  }
}

// ---- where a token goes ---------------------------------------------------------------------------------------------

/// Flags of the operands that say where a token goes.
struct CacheFlags {
  ErrorFlag offsets = nullptr;    // update_offsets
  ErrorFlag positions = nullptr;  // write_positions
  ErrorFlag pages = nullptr;      // page_table
};

/// Flags update_offsets that do not begin at 0, decrease or pass T. One warp behind all tokens calls it.
__device__ inline void check_offsets(const KvCacheAppend& append, const CacheFlags& flags) {
  if (!append.is_packed()) return;
  for (auto b = static_cast<int64_t>(threadIdx.x % 32); b < append.num_sequences; b += 32) {
    const int32_t begin = append.update_offsets[b];
    const int32_t end = append.update_offsets[b + 1];
    if (begin > end || end > append.num_tokens || (b == 0 && begin != 0)) raise_flag(flags.offsets);
  }
}

/// Whose token it is.
struct TokenOwner {
  int32_t sequence = -1;  // -1: nobody's
  int32_t index = 0;      // of the token in its sequence
  int32_t start = 0;      // of the sequence's tokens in its cache
};

/// All 32 lanes of a warp call it with the same token. Packed: one round of reads for up to 32 sequences and for a
/// batch with one token each, two for up to 1024; offsets [B + 1] never decrease.
__device__ inline TokenOwner find_owner(const KvCacheAppend& append, int64_t batch_token) {
  const auto token = static_cast<int32_t>(batch_token);
  if (!append.is_packed()) {
    const auto sequence =
        static_cast<int32_t>(static_cast<uint32_t>(token) / static_cast<uint32_t>(append.padded_tokens));
    const auto start = static_cast<int32_t>(append.write_position(sequence));
    return {
        .sequence = sequence, .index = token - sequence * static_cast<int32_t>(append.padded_tokens), .start = start};
  }
  const int lane = threadIdx.x % 32;
  const int32_t* offsets = append.update_offsets;
  const auto num_sequences = static_cast<int32_t>(append.num_sequences);
  // A decode step's token t is sequence t's; this guess is on its way together with the search's first probes.
  const int32_t guess = min(token, num_sequences - 1);
  const int32_t guess_begin = offsets[guess];
  const int32_t guess_end = offsets[guess + 1];
  const auto guess_start = static_cast<int32_t>(append.write_position(guess));
  const int32_t end = offsets[num_sequences];
  // The owner is the last of [first, first + count) that begins at the token or before it.
  int32_t first = 0;
  int32_t count = num_sequences;
  while (true) {
    const int32_t step = (count + 31) / 32;
    const int32_t mine = first + lane * step;
    const bool probes = lane * step < count;
    const int32_t begin = probes ? offsets[mine] : 0;
    const int32_t start = probes && step == 1 ? static_cast<int32_t>(append.write_position(mine)) : 0;
    if (guess_begin <= token && token < guess_end) {
      return {.sequence = guess, .index = token - guess_begin, .start = guess_start};
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, probes && begin <= token);
    if (reached == 0 || token >= end) return {};
    const int last = 31 - __clz(static_cast<int>(reached));
    first += last * step;
    if (step == 1) {
      return {.sequence = first,
              .index = token - __shfl_sync(0xffffffffu, begin, last),
              .start = __shfl_sync(0xffffffffu, start, last)};
    }
    count = min(step, count - last * step);
  }
}

/// Where a token's row stands in the cache.
struct CacheRow {
  int64_t page = 0;
  int64_t row = 0;
  bool valid = false;
};

/// The row of a token with an owner; invalid and flagged when it lies outside the sequence's capacity or its page
/// outside the pool.
__device__ inline CacheRow find_cache_row(const KvCacheAppend& append, const CacheFlags& flags,
                                          const TokenOwner& owner) {
  const int64_t position = int64_t{owner.start} + owner.index;
  if (owner.start < 0 || owner.index < 0 || position >= append.capacity) {
    raise_flag(flags.positions);
    return {};
  }
  // Two i32 sum up to less than 2^32 - 1, a page may have more rows.
  const auto page_size = static_cast<uint32_t>(min(append.page_size, int64_t{0xffffffff}));
  const uint32_t column = static_cast<uint32_t>(position) / page_size;
  const int64_t page = append.page(owner.sequence, column);
  if (page < 0 || page >= append.num_pages) {
    raise_flag(flags.pages);
    return {};
  }
  return {.page = page, .row = position - int64_t{column} * page_size, .valid = true};
}

}  // namespace polyop::cuda
