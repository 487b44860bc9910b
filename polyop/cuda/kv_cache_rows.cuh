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

/// The search for a token's owner, whose first reads are on their way once it is made. All 32 lanes of a warp make it
/// with the same token and ask for the owner. Packed: one round of reads for up to 32 sequences and for a batch with
/// one token each, two for up to 1024; offsets [B + 1] never decrease.
class OwnerSearch {
 public:
  __device__ OwnerSearch(const KvCacheAppend& append, int64_t batch_token)
      : append_(append), token_(static_cast<int32_t>(batch_token)) {
    if (!append.is_packed()) {
      guess_ = static_cast<int32_t>(static_cast<uint32_t>(token_) / static_cast<uint32_t>(append.padded_tokens));
      guess_begin_ = guess_ * static_cast<int32_t>(append.padded_tokens);
      guess_end_ = guess_begin_ + static_cast<int32_t>(append.padded_tokens);
      guess_start_ = static_cast<int32_t>(append.write_position(guess_));
      return;
    }
    // A decode step's token t is sequence t's; this guess is on its way together with the search's first probes.
    count_ = static_cast<uint32_t>(append.num_sequences);
    guess_ = min(token_, static_cast<int32_t>(count_) - 1);
    guess_begin_ = append.update_offsets[guess_];
    guess_end_ = append.update_offsets[guess_ + 1];
    guess_start_ = static_cast<int32_t>(append.write_position(guess_));
    end_ = append.update_offsets[count_];
    probe();
  }

  __device__ TokenOwner owner() {
    if (guess_begin_ <= token_ && token_ < guess_end_) {
      return {.sequence = guess_, .index = token_ - guess_begin_, .start = guess_start_};
    }
    while (true) {
      const uint32_t reached = __ballot_sync(0xffffffffu, probes_ && begin_ <= token_);
      if (reached == 0 || token_ >= end_) return {};
      const auto last = static_cast<uint32_t>(31 - __clz(static_cast<int>(reached)));
      first_ += last * step_;
      if (step_ == 1) {
        return {.sequence = static_cast<int32_t>(first_),
                .index = token_ - __shfl_sync(0xffffffffu, begin_, static_cast<int>(last)),
                .start = __shfl_sync(0xffffffffu, start_, static_cast<int>(last))};
      }
      count_ = min(step_, count_ - last * step_);
      probe();
    }
  }

 private:
  /// Reads a lane's candidate: the owner is the last of [first, first + count) that begins at the token or before it.
  __device__ void probe() {
    step_ = (count_ + 31) / 32;
    const uint32_t mine = threadIdx.x % 32 * step_;
    probes_ = mine < count_;
    begin_ = probes_ ? append_.update_offsets[first_ + mine] : 0;
    start_ = probes_ && step_ == 1 ? static_cast<int32_t>(append_.write_position(first_ + mine)) : 0;
  }

  const KvCacheAppend& append_;
  int32_t token_;
  int32_t guess_ = 0;
  int32_t guess_begin_ = 0;
  int32_t guess_end_ = 0;
  int32_t guess_start_ = 0;
  int32_t end_ = 0;  // of the last sequence
  uint32_t first_ = 0;
  uint32_t count_ = 0;
  uint32_t step_ = 0;
  bool probes_ = false;
  int32_t begin_ = 0;
  int32_t start_ = 0;
};

__device__ inline TokenOwner find_owner(const KvCacheAppend& append, int64_t batch_token) {
  return OwnerSearch(append, batch_token).owner();
}

/// Where a token's row stands in the cache.
struct CacheRow {
  int64_t page = 0;
  int64_t row = 0;
  bool valid = false;
};

/// Where a token with an owner goes by the page table, not yet checked: its page is on its way from memory.
struct CachePlace {
  int32_t page = 0;
  uint32_t row = 0;
  bool in_capacity = false;
};

__device__ inline CachePlace find_cache_place(const KvCacheAppend& append, const TokenOwner& owner) {
  const int64_t position = int64_t{owner.start} + owner.index;
  const bool in_capacity = (owner.start | owner.index) >= 0 && position < append.capacity;
  // Two i32 sum up to less than 2^32 - 1, a page may have more rows.
  const auto page_size = static_cast<uint32_t>(min(append.page_size, int64_t{0xffffffff}));
  const bool shifts = (page_size & (page_size - 1)) == 0;
  const uint32_t column = shifts ? static_cast<uint32_t>(position) >> (31 - __clz(static_cast<int>(page_size)))
                                 : static_cast<uint32_t>(position) / page_size;
  const int32_t* entry = append.page_table + owner.sequence * append.page_table_stride + column;
  return {.page = load_if(in_capacity && append.page_table != nullptr, entry, owner.sequence),
          .row = static_cast<uint32_t>(position) - column * page_size,
          .in_capacity = in_capacity};
}

/// False, and flagged, when the place lies outside the sequence's capacity or its page outside the pool.
__device__ inline bool check_cache_place(const KvCacheAppend& append, const CacheFlags& flags,
                                         const CachePlace& place) {
  if (!place.in_capacity) {
    raise_flag(flags.positions);
    return false;
  }
  // Negative ones are above all others; nothing is made of a page before that waits for it.
  if (static_cast<uint32_t>(place.page) >= static_cast<uint32_t>(min(append.num_pages, int64_t{1} << 31))) {
    raise_flag(flags.pages);
    return false;
  }
  return true;
}

/// The row of a token with an owner, checked. A row past the end is no fault of an append that skips such rows.
__device__ inline CacheRow find_cache_row(const KvCacheAppend& append, const CacheFlags& flags,
                                          const TokenOwner& owner) {
  const CachePlace place = find_cache_place(append, owner);
  if (append.skips_outside && !place.in_capacity && (owner.start | owner.index) >= 0) return {};
  return {.page = place.page, .row = place.row, .valid = check_cache_place(append, flags, place)};
}

}  // namespace polyop::cuda
