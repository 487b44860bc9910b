#include "polyop/cpu/kv_cache_runs.h"

#include <cstring>

#include "polyop/cpu/quantize_rows.h"

namespace polyop::cpu {
namespace {

template <int64_t kBytes>
void copy_rows_of(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) std::memcpy(to + row * to_stride, from + row * from_stride, kBytes);
}

/// `rows` rows of `bytes`; strides in bytes. Short rows of the usual sizes are copied without a call.
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows, int64_t bytes) {
  if (from_stride == bytes && to_stride == bytes) {
    std::memcpy(to, from, static_cast<size_t>(rows * bytes));
    return;
  }
  switch (bytes) {
    case 128:
      return copy_rows_of<128>(from, from_stride, to, to_stride, rows);
    case 256:
      return copy_rows_of<256>(from, from_stride, to, to_stride, rows);
    default:
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(to + row * to_stride, from + row * from_stride, static_cast<size_t>(bytes));
      }
  }
}

}  // namespace

void store_run(const KvCacheAppend& append, const KvCachePlane& plane, const KvCacheRun& run) {
  const int64_t head_dim = append.head_dim;
  const bool one_block = append.num_kv_heads == 1 || (plane.cache_head_stride == head_dim &&
                                                      plane.update_head_stride == head_dim && plane.scale_stride == 0);
  const int64_t blocks = one_block ? 1 : append.num_kv_heads;
  const int64_t width = one_block ? append.num_kv_heads * head_dim : head_dim;  // elements
  const int64_t update_bytes = dtype_bytes(append.update_dtype);
  const int64_t cache_bytes = dtype_bytes(append.cache_dtype);
  const char* from =
      static_cast<const char*>(plane.update) + append.update_offset(plane, run.sequence, run.token) * update_bytes;
  char* to =
      static_cast<char*>(plane.cache) + (run.page * plane.page_stride + run.row * plane.row_stride) * cache_bytes;
  for (int64_t block = 0; block < blocks; ++block) {
    const char* block_from = from + block * plane.update_head_stride * update_bytes;
    char* block_to = to + block * plane.cache_head_stride * cache_bytes;
    if (append.quantizes()) {
      quantize_rows({.from = block_from,
                     .from_dtype = append.update_dtype,
                     .from_stride = plane.update_token_stride,
                     .to = block_to,
                     .to_dtype = append.cache_dtype,
                     .to_stride = plane.row_stride,
                     .rows = run.tokens,
                     .width = width,
                     .scale = kv_cache_scale(plane, block)});
    } else {
      copy_rows(block_from, plane.update_token_stride * update_bytes, block_to, plane.row_stride * cache_bytes,
                run.tokens, width * cache_bytes);
    }
  }
}

}  // namespace polyop::cpu
