#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop {
Status kv_cache_update_reference(const KvCacheUpdateProblem& problem, Workspace, Stream) {
  const int64_t cache_bytes = dtype_bytes(problem.cache_dtype);
  const int64_t update_bytes = dtype_bytes(problem.update_dtype);
  for (int64_t sequence = 0; sequence < problem.num_sequences; ++sequence) {
    const auto [first, end] = problem.stored_tokens(sequence);
    for (int64_t token = first; token < end; ++token) {
      const int64_t position = problem.write_position(sequence) + token;
      const int64_t page = problem.page(sequence, position / problem.page_size);
      const int64_t row = position % problem.page_size;
      for (int32_t i = 0; i < problem.num_planes; ++i) {
        const KvCachePlane& plane = problem.planes[i];
        for (int64_t head = 0; head < problem.num_kv_heads; ++head) {
          const float scale = kv_cache_scale(plane, head);
          const int64_t to = page * plane.page_stride + row * plane.row_stride + head * plane.cache_head_stride;
          const int64_t from = problem.update_offset(plane, sequence, token) + head * plane.update_head_stride;
          for (int64_t channel = 0; channel < problem.head_dim; ++channel) {
            store_kv_cache_element(problem, static_cast<const char*>(plane.update) + (from + channel) * update_bytes,
                                   scale, static_cast<char*>(plane.cache) + (to + channel) * cache_bytes);
          }
        }
      }
    }
  }
  return Status::ok();
}

}  // namespace polyop
