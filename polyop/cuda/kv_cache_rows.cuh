// Appending to a KV cache on the device: the row of a token, and the quantization of what goes there.
#pragma once

#include <cstdint>

#include "polyop/core/kv_cache_append.h"
#include "polyop/cuda/error_flags.h"

namespace polyop::cuda {

/// x / scale, correctly rounded: a reciprocal and one correction (Markstein) where neither over- nor underflows.
class Divisor {
 public:
  __device__ explicit Divisor(float scale) : scale_(scale) {
    reciprocal_ = __frcp_rn(scale);
    is_plain_ = fabsf(scale) > 0x1p-60f && fabsf(scale) < 0x1p60f;
  }

  [[nodiscard]] __device__ float divide(float x) const {
    if (!is_plain_) return __fdiv_rn(x, scale_);
    const float quotient = __fmul_rn(x, reciprocal_);
    // Below 2^-60 the remainder could be rounded; all such quotients store as 0. Infinities have no remainder.
    if (!(fabsf(quotient) > 0x1p-60f && fabsf(quotient) < 0x1p60f)) return quotient;
    return fmaf(fmaf(-quotient, scale_, x), reciprocal_, quotient);
  }

 private:
  float scale_ = 1.0f;
  float reciprocal_ = 1.0f;
  bool is_plain_ = true;
};

__device__ inline void raise_flag(ErrorFlag flag) {
  if (flag != nullptr) *flag = 1;
}

/// Flags of the operands that say where a token goes.
struct CacheFlags {
  ErrorFlag positions = nullptr;  // write_positions
  ErrorFlag pages = nullptr;      // page_table
};

/// Where a token's row stands in the cache.
struct CacheRow {
  int64_t page = 0;
  int64_t row = 0;
  bool valid = false;
};

/// The row of position `start + index` of a sequence; invalid and flagged when it lies outside the sequence's capacity
/// or its page outside the pool.
__device__ inline CacheRow find_cache_row(const KvCacheAppend& append, const CacheFlags& flags, int64_t sequence,
                                          int64_t start, int64_t index) {
  const int64_t position = start + index;
  if (start < 0 || position >= append.capacity) {
    raise_flag(flags.positions);
    return {};
  }
  const int64_t column = position / append.page_size;
  const int64_t page = append.page(sequence, column);
  if (page < 0 || page >= append.num_pages) {
    raise_flag(flags.pages);
    return {};
  }
  return {.page = page, .row = position - column * append.page_size, .valid = true};
}

}  // namespace polyop::cuda
