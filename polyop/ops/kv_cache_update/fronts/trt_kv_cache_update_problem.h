// TrtKvCacheUpdateProblem: one bound call of trt_kv_cache_update; the only thing its kernels receive.
#pragma once

#include <cstdint>

#include "polyop/core/kernel_list.h"
#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop {

/// The update of Y, a linear cache with one plane, and the cache that Y starts from.
struct TrtKvCacheUpdateProblem {
  KvCacheUpdateProblem update;
  const void* past_cache = nullptr;  // [B, Hkv, Lmax, D], D dense; Y's own memory: in place, there is nothing to copy
  int64_t past_sequence_stride = 0;  // elements
  int64_t past_head_stride = 0;
  int64_t past_row_stride = 0;

  /// Y as the copy of past_cache fills it.
  [[nodiscard]] const KvCachePlane& result() const { return update.planes[0]; }
  [[nodiscard]] int64_t num_sequences() const { return update.num_pages; }  // B; the update may have fewer
  [[nodiscard]] int64_t row_bytes() const { return update.head_dim * dtype_bytes(update.cache_dtype); }
  [[nodiscard]] int64_t cache_bytes() const {
    return num_sequences() * update.num_kv_heads * update.page_size * row_bytes();
  }
  [[nodiscard]] bool is_in_place() const { return past_cache == result().cache; }
  /// Both caches lie in memory without gaps, in the order of their axes.
  [[nodiscard]] bool is_dense() const {
    const int64_t head_stride = update.page_size * update.head_dim;
    const int64_t sequence_stride = update.num_kv_heads * head_stride;
    const auto fits = [this](int64_t stride, int64_t other, int64_t dense, int64_t extent) {
      return extent == 1 || (stride == dense && other == dense);
    };
    return fits(past_row_stride, result().row_stride, update.head_dim, update.page_size) &&
           fits(past_head_stride, result().cache_head_stride, head_stride, update.num_kv_heads) &&
           fits(past_sequence_stride, result().page_stride, sequence_stride, num_sequences());
  }
};

namespace cuda {

/// past_cache copied to Y where that is other memory, then kv_cache_update's kernel for the update. Rows outside the
/// cache are left out; sequences with a negative write index are too, and flagged, as are update_lengths that are no
/// cut of the update's rows.
Status supports_trt_kv_cache_update_tokens(const TrtKvCacheUpdateProblem& problem);
Status trt_kv_cache_update_tokens(const TrtKvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda
}  // namespace polyop
