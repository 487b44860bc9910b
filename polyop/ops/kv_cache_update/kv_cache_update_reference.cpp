#include <cstring>

#include "polyop/core/numeric_types.h"
#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop {
namespace {

/// Stores one element of the update in the cache.
void store_element(const KvCacheUpdateProblem& problem, const void* from, float scale, void* to) {
  if (!problem.quantizes()) {
    std::memcpy(to, from, static_cast<size_t>(dtype_bytes(problem.cache_dtype)));
    return;
  }
  float value = 0.0f;
  switch (problem.update_dtype) {
    case DType::kF16:
      value = static_cast<const F16*>(from)->to_float();
      break;
    case DType::kBF16:
      value = static_cast<const BF16*>(from)->to_float();
      break;
    default:
      value = *static_cast<const float*>(from);
      break;
  }
  if (problem.cache_dtype == DType::kI8) {
    *static_cast<int8_t*>(to) = from_float<int8_t>(value / scale);
  } else {
    *static_cast<F8E4M3*>(to) = F8E4M3::from_float(value / scale);
  }
}

}  // namespace

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
          const float scale = plane.scale == nullptr ? 1.0f : plane.scale[head * plane.scale_stride];
          const int64_t to = page * plane.page_stride + row * plane.row_stride + head * plane.cache_head_stride;
          const int64_t from = problem.update_offset(plane, sequence, token) + head * plane.update_head_stride;
          for (int64_t channel = 0; channel < problem.head_dim; ++channel) {
            store_element(problem, static_cast<const char*>(plane.update) + (from + channel) * update_bytes, scale,
                          static_cast<char*>(plane.cache) + (to + channel) * cache_bytes);
          }
        }
      }
    }
  }
  return Status::ok();
}

}  // namespace polyop
