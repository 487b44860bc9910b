#include "polyop/core/kv_cache_append.h"

#include <cstring>
#include <string>

#include "polyop/core/numeric_types.h"

namespace polyop {

KvCachePlane make_kv_cache_plane(const TensorView& cache, bool is_paged, const TensorView& update,
                                 const TensorView* scale) {
  const bool is_packed = update.rank == 3;
  KvCachePlane plane = {.cache = cache.data,
                        .page_stride = cache.strides[0],
                        .row_stride = cache.strides[is_paged ? 1 : 2],
                        .cache_head_stride = cache.strides[is_paged ? 2 : 1],
                        .update = update.data,
                        .update_sequence_stride = is_packed ? 0 : update.strides[0],
                        .update_token_stride = update.strides[is_packed ? 0 : 1],
                        .update_head_stride = update.strides[is_packed ? 1 : 2]};
  if (scale != nullptr) {
    plane.scale = static_cast<const float*>(scale->data);
    plane.scale_stride = scale->rank == 1 && scale->shape[0] > 1 ? scale->strides[0] : 0;
  }
  return plane;
}

Status check_kv_cache_dtypes(std::string_view op_name, DType cache_dtype, DType update_dtype,
                             std::string_view scale_name) {
  if (is_quantized_kv_cache(cache_dtype)) return Status::ok();
  const std::string cache_name(dtype_name(cache_dtype));
  if (update_dtype != cache_dtype) {
    return invalid_argument(std::string(op_name) + ": k is " + std::string(dtype_name(update_dtype)) + ", wanted " +
                            cache_name + " as k_cache");
  }
  if (!scale_name.empty()) {
    return invalid_argument(std::string(op_name) + ": " + std::string(scale_name) +
                            " is given, but belongs only to a cache of f8e4m3 or i8; k_cache is " + cache_name);
  }
  return Status::ok();
}

void store_kv_cache_element(const KvCacheAppend& append, const void* from, float scale, void* to) {
  if (!append.quantizes()) {
    std::memcpy(to, from, static_cast<size_t>(dtype_bytes(append.cache_dtype)));
    return;
  }
  float value = 0.0f;
  switch (append.update_dtype) {
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
  if (append.cache_dtype == DType::kI8) {
    *static_cast<int8_t*>(to) = from_float<int8_t>(value / scale);
  } else {
    *static_cast<F8E4M3*>(to) = F8E4M3::from_float(value / scale);
  }
}

}  // namespace polyop
