// KvCacheUpdateProblem: one bound call of kv_cache_update; the only thing its kernels receive. Both forms of the cache
// and of the update are one here: a linear cache is a paged one in which sequence b owns page b of Lmax rows, and
// padded tokens are packed ones with S tokens a sequence.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "polyop/core/dtype.h"
#include "polyop/core/kernel_list.h"

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

struct KvCacheUpdateProblem {
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
  [[nodiscard]] bool quantizes() const { return cache_dtype != update_dtype; }
};

/// Token by token and element by element; the specification in code.
Status kv_cache_update_reference(const KvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

namespace cpu {

/// Runs of rows that lie in one page, with all threads: copied as bytes, or quantized in vectors.
Status kv_cache_update_runs(const KvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

}  // namespace cpu

namespace cuda {

/// A warp for each token's share of heads, 16-byte accesses; takes every call. Tokens outside the cache and pages
/// outside the pool are skipped and flagged.
Status kv_cache_update_tokens(const KvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda
}  // namespace polyop
