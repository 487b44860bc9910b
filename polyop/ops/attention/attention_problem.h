// AttentionProblem: the one attention of this library, after binding. Every front (the operator `attention`, TensorRT's
// attention layers, ragged plugins, PyTorch backends) fills this struct, and kernels see nothing else.
//
// For query row i of sequence b, query head h, key j, with kv head h / G:
//   score(i, j) = scale * k_scale * sum_d q[b, i, h, d] k[b, j, h / G, d]  (+ additive mask)
//   key j is visible when 0 <= j < kv_length(b) and the causal kind, the window, the bool mask and the tree bits agree
//   weight(i, j) = softmax over the visible keys (a sink joins the denominator), or the score; optionally quantized
//   out(i)       = sum over visible j of weight(i, j) * v_scale * v[b, j, h / G, :]
// The README states the numerics and what is done where the sources are silent.
//
// Shape symbols: B sequences, S query rows per padded sequence, T packed query rows, Lmax key capacity of a padded
// sequence, Tkv packed keys, P pages, R rows per page, W page table width, Hq and Hkv heads, G = Hq / Hkv, D and Dv
// head sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "polyop/core/dtype.h"

namespace polyop {

enum class AttentionQueryForm : uint8_t {
  kPacked,  // q [T, Hq, D]; sequence b has rows query_offsets[b] .. query_offsets[b + 1]
  kPadded,  // q [B, S, Hq, D]
};

enum class AttentionKvForm : uint8_t {
  kPaged,   // k [P, R, Hkv, D], v [P, R, Hkv, Dv]; key j of sequence b is row j % R of page page_table[b, j / R]
  kPacked,  // k [Tkv, Hkv, D], v [Tkv, Hkv, Dv]; key j of sequence b is row kv_offsets[b] + j
  kPadded,  // k [B, Lmax, Hkv, D], v [B, Lmax, Hkv, Dv]
};

enum class AttentionCausal : uint8_t {
  kNone,
  kUpperLeft,   // row i sees keys j <= i
  kLowerRight,  // row i sees keys j <= i + kv_length - query_length
};

/// Where the last key of a row's sliding window stands.
enum class AttentionWindowEnd : uint8_t {
  kOwnPosition,  // at the row itself: i for kUpperLeft, otherwise i + kv_length - query_length
  kLastKey,      // at the sequence's last key, for all rows alike
};

enum class AttentionNormalization : uint8_t { kSoftmax, kNone };

/// Rounding of the final weights before they meet v: dequantize(quantize(weight / scale)) * scale, nearest even,
/// saturated to +-448 (kF8E4M3) or [-128, 127] (kInt8).
enum class AttentionWeightQuantization : uint8_t { kNone, kF8E4M3, kInt8 };

/// Rows of heads in memory, element strides; the innermost axis is dense. The meaning of `outer_stride` depends on the
/// form: next sequence (padded), next page (paged), unused (packed).
struct HeadRows {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t outer_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  /// Address of element 0 of one head in one row.
  [[nodiscard]] std::byte* at(int64_t outer, int64_t row, int64_t head) const {
    const int64_t elems = outer * outer_stride + row * row_stride + head * head_stride;
    return static_cast<std::byte*>(data) + elems * dtype_bytes(dtype);
  }
};

/// A mask [B|1, Hq|1, S|1, L|1] indexed by sequence, query head, row and key inside the sequence; an axis of extent 1
/// has stride 0. bool: true = visible. f32, f16, bf16: added to the score; -inf hides the key.
struct AttentionMask {
  const void* data = nullptr;  // null: no mask
  DType dtype = DType::kBool;
  int64_t sequence_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t key_stride = 0;

  [[nodiscard]] int64_t offset(int64_t sequence, int64_t head, int64_t row, int64_t key) const {
    return sequence * sequence_stride + head * head_stride + row * row_stride + key * key_stride;
  }
};

/// Bits [T | B * S, words] i32, least significant first. Bit c of a row's words: the row may see key kv_length - N + c,
/// where N is tree_width(b), the number of query rows of its sequence. Earlier keys are the committed prefix: always
/// visible.
struct AttentionTreeMask {
  const int32_t* words = nullptr;  // null: no tree
  int64_t row_stride = 0;
};

/// Dequantization factors of an FP8 or INT8 cache, f32 [1] (per tensor, stride 0) or [Hkv] (stride 1). An element is
/// stored * scale.
struct AttentionKvScale {
  const float* data = nullptr;  // null: 1
  int64_t head_stride = 0;

  [[nodiscard]] float of_head(int64_t kv_head) const { return data == nullptr ? 1.0f : data[kv_head * head_stride]; }
};

/// Half-open range of row or key indices; empty when begin >= end.
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;

  [[nodiscard]] int64_t size() const { return std::max<int64_t>(0, end - begin); }
};

struct AttentionProblem {
  int64_t num_sequences = 0;    // B
  int64_t num_query_heads = 0;  // Hq, a multiple of Hkv
  int64_t num_kv_heads = 0;     // Hkv
  int64_t head_dim = 0;         // D of q and k
  int64_t value_head_dim = 0;   // Dv of v and out

  // ---- queries and results
  AttentionQueryForm query_form = AttentionQueryForm::kPacked;
  int64_t num_query_rows = 0;              // T, or B * S
  int64_t padded_query_length = 0;         // S; padded only
  const int32_t* query_offsets = nullptr;  // [B + 1], packed only: 0 <= ... <= T, never decreasing
  const int32_t* query_lengths = nullptr;  // [B] in [0, S], padded only: later rows give 0; null: all S rows count
  HeadRows q;                              // [T, Hq, D] | [B, S, Hq, D]  f32, f16, bf16
  HeadRows out;                            // [T, Hq, Dv] | [B, S, Hq, Dv]  q's dtype, or f8e4m3
  const float* output_scale = nullptr;     // [1], f8e4m3 out only: stored = f8e4m3(out / scale); null: 1
  HeadRows lse;                            // f32 [T, Hq] | [B, S, Hq], natural log; data null: not wanted

  // ---- keys and values
  AttentionKvForm kv_form = AttentionKvForm::kPaged;
  HeadRows k;  // f32, f16, bf16, f8e4m3, i8
  HeadRows v;  // k's dtype
  AttentionKvScale k_scale;
  AttentionKvScale v_scale;
  const int32_t* kv_lengths = nullptr;  // [B] keys of each sequence, new ones included; padded: null = Lmax each
  const int32_t* kv_offsets = nullptr;  // [B + 1], packed only
  int64_t kv_capacity = 0;              // keys a sequence can have: W * R, Lmax, or Tkv
  const int32_t* page_table = nullptr;  // [B, W], paged only; entries past a length are never read
  int64_t page_table_stride = 0;
  int64_t page_size = 0;  // R
  int64_t num_pages = 0;  // P

  // ---- visibility
  AttentionCausal causal = AttentionCausal::kLowerRight;
  int64_t window = -1;  // keys that a row sees, its own position included; -1: no limit
  AttentionWindowEnd window_end = AttentionWindowEnd::kOwnPosition;
  AttentionMask mask;
  AttentionTreeMask tree_mask;
  // What mask and tree bits cover of a packed sequence. Hosts check it where they see lengths; on a device the rows of
  // a sequence with more rows or keys see nothing.
  int64_t most_rows = std::numeric_limits<int64_t>::max();
  int64_t most_keys = std::numeric_limits<int64_t>::max();

  // ---- weights
  float scale = 1.0f;
  float operand_scale = 1.0f;    // q and k are multiplied by it before they meet, each product rounded to its dtype
  const float* sinks = nullptr;  // [Hq] logits that join the softmax denominator only; null: none
  AttentionNormalization normalization = AttentionNormalization::kSoftmax;
  AttentionWeightQuantization weight_quantization = AttentionWeightQuantization::kNone;
  const float* weight_scale = nullptr;  // [1]; given when weights are quantized, or else its value:
  float weight_scale_value = 0.0f;      // counts where weight_scale is null

  /// G: query heads that share one kv head.
  [[nodiscard]] constexpr int64_t group_size() const { return num_query_heads / num_kv_heads; }

  // ---- readers: rows. A row is named by its sequence and its index there.

  /// Rows of the sequence that the memory has: packed rows, or S.
  [[nodiscard]] int64_t allotted_query_length(int64_t sequence) const {
    if (query_form == AttentionQueryForm::kPadded) return padded_query_length;
    return query_offsets[sequence + 1] - query_offsets[sequence];
  }

  /// Rows of the sequence that attend.
  [[nodiscard]] int64_t query_length(int64_t sequence) const {
    return query_lengths != nullptr ? query_lengths[sequence] : allotted_query_length(sequence);
  }

  /// Place of a row among all T or B * S.
  [[nodiscard]] int64_t row_number(int64_t sequence, int64_t row) const {
    return row + (query_form == AttentionQueryForm::kPadded ? sequence * padded_query_length : query_offsets[sequence]);
  }

  /// Packed rows that belong to a sequence; rows from here to T give output 0 and log-sum-exp -inf.
  [[nodiscard]] int64_t num_owned_rows() const {
    if (query_form == AttentionQueryForm::kPadded) return num_query_rows;
    return num_sequences == 0 ? 0 : query_offsets[num_sequences];
  }

  /// Address in q, out or lse of one head of one row.
  [[nodiscard]] std::byte* row_address(const HeadRows& rows, int64_t sequence, int64_t row, int64_t head) const {
    if (query_form == AttentionQueryForm::kPadded) return rows.at(sequence, row, head);
    return rows.at(0, query_offsets[sequence] + row, head);
  }

  // ---- readers: keys

  [[nodiscard]] int64_t kv_length(int64_t sequence) const {
    if (kv_form == AttentionKvForm::kPacked) return kv_offsets[sequence + 1] - kv_offsets[sequence];
    return kv_lengths != nullptr ? kv_lengths[sequence] : kv_capacity;
  }

  /// Address in k or v of one head of one key. The page id is trusted: hosts check it where the table is host-visible.
  [[nodiscard]] std::byte* key_address(const HeadRows& rows, int64_t sequence, int64_t key, int64_t kv_head) const {
    switch (kv_form) {
      case AttentionKvForm::kPaged:
        return rows.at(page_table[sequence * page_table_stride + key / page_size], key % page_size, kv_head);
      case AttentionKvForm::kPacked:
        return rows.at(0, kv_offsets[sequence] + key, kv_head);
      case AttentionKvForm::kPadded:
        break;
    }
    return rows.at(sequence, key, kv_head);
  }

  // ---- readers: visibility

  /// N: query rows whose keys stand at the end of the cache under a tree mask.
  [[nodiscard]] int64_t tree_width(int64_t sequence) const { return allotted_query_length(sequence); }

  /// Keys that length, causal kind and window leave to a row: one range. Masks and tree bits can only hide more.
  [[nodiscard]] IndexRange visible_keys(int64_t sequence, int64_t row) const {
    const int64_t length = kv_length(sequence);
    const int64_t rows = tree_mask.words != nullptr ? tree_width(sequence) : query_length(sequence);
    const int64_t position = causal == AttentionCausal::kUpperLeft ? row : row + length - rows;
    IndexRange range{0, length};
    if (causal != AttentionCausal::kNone) range.end = std::min(length, position + 1);
    if (window >= 0) {
      const int64_t last = window_end == AttentionWindowEnd::kLastKey ? length - 1 : position;
      range.begin = std::max<int64_t>(0, last - window + 1);
    }
    return range;
  }

  /// Whether the tree bits leave `key` to the row; true without a tree.
  [[nodiscard]] bool tree_allows(int64_t sequence, int64_t row, int64_t key) const {
    if (tree_mask.words == nullptr) return true;
    const int64_t column = key - (kv_length(sequence) - tree_width(sequence));
    if (column < 0) return true;
    const int32_t word = tree_mask.words[row_number(sequence, row) * tree_mask.row_stride + column / 32];
    return (static_cast<uint32_t>(word) >> (column % 32) & 1u) != 0;
  }
};

}  // namespace polyop
