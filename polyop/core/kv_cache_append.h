// KvCacheAppend: where the keys and values of new tokens come from and which rows of a KV cache they go to. The part
// that the problems of all operators that write to a cache have in common.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "polyop/core/dtype.h"
#include "polyop/core/status.h"
#include "polyop/core/tensor_view.h"

namespace polyop {

/// The keys or the values: where they come from and where they go. D is dense on both sides; strides are in elements.
struct KvCachePlane {
  void* cache = nullptr;  // pages of rows of [Hkv, D]
  int64_t page_stride = 0;
  int64_t row_stride = 0;
  int64_t cache_head_stride = 0;
  const void* update = nullptr;        // token t of sequence b at b * update_sequence_stride + t * update_token_stride
  int64_t update_sequence_stride = 0;  // 0 when packed: tokens are counted through the whole batch
  int64_t update_token_stride = 0;
  int64_t update_head_stride = 0;
  const float* scale = nullptr;  // null: 1
  int64_t scale_stride = 0;      // 0: one scale for all heads
};

/// One append to a KV cache: whose tokens, from where, to where. Both forms of the cache and of the update are one
/// here: a linear cache is a paged one in which sequence b owns page b of Lmax rows, and padded tokens are packed ones
/// with S tokens a sequence.
struct KvCacheAppend {
  std::array<KvCachePlane, 2> planes;  // keys, then values
  int32_t num_planes = 1;              // 1: no values
  DType cache_dtype = DType::kF32;
  DType update_dtype = DType::kF32;          // differs from cache_dtype when that is f8e4m3 or i8
  int64_t num_sequences = 0;                 // B
  int64_t num_kv_heads = 0;                  // Hkv
  int64_t head_dim = 0;                      // D
  int64_t page_size = 0;                     // R, or Lmax of a linear cache
  int64_t num_pages = 0;                     // P, or B of a linear cache
  int64_t capacity = 0;                      // positions a sequence can have: W * R, or Lmax
  int64_t num_tokens = 0;                    // T, or B * S
  int64_t padded_tokens = 0;                 // S; counts when update_offsets is null
  const int32_t* update_offsets = nullptr;   // [B + 1]; null: padded
  const int32_t* write_positions = nullptr;  // [B]; null: zeros
  const int32_t* page_table = nullptr;       // [B, W]; null: linear
  int64_t page_table_stride = 0;             // entries between rows
  bool skips_outside = false;                // linear only: tokens outside [0, page_size) are left out

  [[nodiscard]] constexpr bool is_packed() const { return update_offsets != nullptr; }
  /// Tokens of all sequences before `sequence`.
  [[nodiscard]] constexpr int64_t token_offset(int64_t sequence) const {
    return is_packed() ? update_offsets[sequence] : sequence * padded_tokens;
  }
  [[nodiscard]] constexpr int64_t write_position(int64_t sequence) const {
    return write_positions == nullptr ? 0 : write_positions[sequence];
  }
  /// First token of a sequence that is stored, and the one past the last: all, or those that land in the cache.
  [[nodiscard]] std::array<int64_t, 2> stored_tokens(int64_t sequence) const {
    const int64_t tokens = token_offset(sequence + 1) - token_offset(sequence);
    if (!skips_outside) return {0, tokens};
    const int64_t position = write_position(sequence);
    const int64_t end = std::clamp<int64_t>(page_size - position, 0, tokens);
    return {std::clamp<int64_t>(-position, 0, end), end};
  }
  /// Page that holds rows [column * page_size, (column + 1) * page_size) of a sequence.
  [[nodiscard]] constexpr int64_t page(int64_t sequence, int64_t column) const {
    return page_table == nullptr ? sequence : page_table[sequence * page_table_stride + column];
  }
  /// Element offset into plane.update of token `token` of `sequence`.
  [[nodiscard]] constexpr int64_t update_offset(const KvCachePlane& plane, int64_t sequence, int64_t token) const {
    const int64_t row = is_packed() ? update_offsets[sequence] + token : token;
    return sequence * plane.update_sequence_stride + row * plane.update_token_stride;
  }
  [[nodiscard]] constexpr bool quantizes() const { return cache_dtype != update_dtype; }
};

/// The plane of one cache: k_cache [P, R, Hkv, D] when paged, else [B, Hkv, Lmax, D], and update [T, Hkv, D] or
/// [B, S, Hkv, D]. `scale` is [1] or [Hkv], null when absent.
KvCachePlane make_kv_cache_plane(const TensorView& cache, bool is_paged, const TensorView& update,
                                 const TensorView* scale);

/// The scale of `plane` for a head; 1 without scales.
constexpr float kv_cache_scale(const KvCachePlane& plane, int64_t head) {
  return plane.scale == nullptr ? 1.0f : plane.scale[head * plane.scale_stride];
}

/// True for the dtypes of a quantized cache.
constexpr bool is_quantized_kv_cache(DType dtype) { return dtype == DType::kF8E4M3 || dtype == DType::kI8; }

/// kInvalidArgument when k of another dtype than a cache of floats, or scales for one, are given. `scale_name` is the
/// first scale operand that is there, or empty.
Status check_kv_cache_dtypes(std::string_view op_name, DType cache_dtype, DType update_dtype,
                             std::string_view scale_name);

/// Stores one element of the update in the cache: its bits, or round(x / scale). For references.
void store_kv_cache_element(const KvCacheAppend& append, const void* from, float scale, void* to);

}  // namespace polyop
