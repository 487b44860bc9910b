// SequenceGeometry: the rows and keys of one sequence as the device reads them, kept inside what the memory has.
#pragma once

#include <cstdint>

#include "polyop/cuda/error_flags.h"
#include "polyop/ops/attention/attention_problem.h"

namespace polyop::cuda {

/// One flag for each operand whose values only the device knows.
struct AttentionFlags {
  ErrorFlag query_offsets = nullptr;
  ErrorFlag kv_lengths = nullptr;
  ErrorFlag kv_offsets = nullptr;
  ErrorFlag page_table = nullptr;
};

inline AttentionFlags attention_flags() {
  return {.query_offsets = error_flag("attention: query_offsets"),
          .kv_lengths = error_flag("attention: kv_lengths"),
          .kv_offsets = error_flag("attention: kv_offsets"),
          .page_table = error_flag("attention: page_table")};
}

struct KeyRange {
  int32_t begin = 0;
  int32_t end = 0;
};

struct SequenceGeometry {
  int32_t sequence = 0;
  int32_t row_begin = 0;   // number of its first row in [0, T or B * S)
  int32_t allotted = 0;    // rows that the memory has
  int32_t query_rows = 0;  // rows that attend, the first ones
  int32_t kv_begin = 0;    // packed keys only
  int32_t kv_length = 0;
  bool fits = true;  // packed rows are a piece of the memory

  /// As AttentionProblem::visible_keys.
  __device__ KeyRange visible(const AttentionProblem& p, int32_t row) const {
    const int32_t rows = p.tree_mask.words != nullptr ? allotted : query_rows;
    const int32_t position = p.causal == AttentionCausal::kUpperLeft ? row : row - rows + kv_length;
    KeyRange range{0, kv_length};
    if (p.causal != AttentionCausal::kNone) range.end = min(kv_length, position + 1);
    if (p.window >= 0) {
      const int64_t last = p.window_end == AttentionWindowEnd::kLastKey ? kv_length - 1 : position;
      range.begin = static_cast<int32_t>(max(int64_t{0}, last - p.window + 1));
    }
    return range;
  }

  /// As AttentionProblem::tree_allows, for a tree that is there.
  __device__ bool tree_allows(const AttentionProblem& p, int32_t row, int32_t key) const {
    const int32_t column = key - (kv_length - allotted);
    if (column < 0) return true;
    const int32_t word = __ldg(p.tree_mask.words + (int64_t{row_begin} + row) * p.tree_mask.row_stride + column / 32);
    return (static_cast<uint32_t>(word) >> (column % 32) & 1u) != 0;
  }
};

/// Whether a sequence's pair of query_offsets is in order and inside the memory. When one pair of a batch is not, no
/// sequence of the batch has rows: sequences that overlap would share counters and places in scratch memory.
__device__ inline bool rows_fit(const AttentionProblem& p, int32_t sequence, int32_t begin, int32_t end) {
  return begin >= 0 && begin <= end && end <= p.num_query_rows && (sequence > 0 || begin == 0);
}

/// Sequences that have rows: B, or none when the rows of any do not fit, which is flagged. All lanes of a warp call it
/// together.
__device__ inline int32_t sequences_with_rows(const AttentionProblem& p, const AttentionFlags& flags) {
  const auto num_sequences = static_cast<int32_t>(p.num_sequences);
  if (p.query_form != AttentionQueryForm::kPacked) return num_sequences;
  bool fit = true;
  for (auto sequence = static_cast<int32_t>(threadIdx.x % 32); sequence < num_sequences; sequence += 32) {
    fit &= rows_fit(p, sequence, __ldg(p.query_offsets + sequence), __ldg(p.query_offsets + sequence + 1));
  }
  if (__all_sync(0xffffffffu, fit)) return num_sequences;
  raise_flag(flags.query_offsets);
  return 0;
}

/// Rows that belong to a sequence, the first ones: all that are not packed; `num_sequences` as sequences_with_rows
/// gives it.
__device__ inline int64_t num_owned_rows(const AttentionProblem& p, int32_t num_sequences) {
  if (p.query_form != AttentionQueryForm::kPacked) return p.num_query_rows;
  return num_sequences == 0 ? 0 : int64_t{__ldg(p.query_offsets + num_sequences)};
}

__device__ inline SequenceGeometry read_geometry(const AttentionProblem& p, int32_t sequence,
                                                 const AttentionFlags& flags) {
  SequenceGeometry g;
  g.sequence = sequence;
  if (p.query_form == AttentionQueryForm::kPacked) {
    const int32_t begin = __ldg(p.query_offsets + sequence);
    const int32_t end = __ldg(p.query_offsets + sequence + 1);
    g.fits = rows_fit(p, sequence, begin, end);
    if (g.fits) {
      g.row_begin = begin;
      g.allotted = g.query_rows = end - begin;
    }
    if (!g.fits || g.allotted > p.most_rows) {
      raise_flag(flags.query_offsets);
      g.query_rows = 0;
    }
  } else {
    g.allotted = g.query_rows = static_cast<int32_t>(p.padded_query_length);
    g.row_begin = sequence * g.allotted;
    if (p.query_lengths != nullptr) g.query_rows = min(max(__ldg(p.query_lengths + sequence), 0), g.allotted);
  }
  if (p.kv_form == AttentionKvForm::kPacked) {
    const int32_t begin = __ldg(p.kv_offsets + sequence);
    const int32_t end = __ldg(p.kv_offsets + sequence + 1);
    if (begin < 0 || end < begin || end > p.kv_capacity || end - begin > p.most_keys) {
      raise_flag(flags.kv_offsets);
    } else {
      g.kv_begin = begin;
      g.kv_length = end - begin;
    }
  } else {
    const auto capacity = static_cast<int32_t>(p.kv_capacity);
    g.kv_length = p.kv_lengths != nullptr ? __ldg(p.kv_lengths + sequence) : capacity;
    if (g.kv_length < 0 || g.kv_length > capacity) {
      raise_flag(flags.kv_lengths);
      g.kv_length = g.kv_length < 0 ? 0 : capacity;
    }
  }
  return g;
}

/// Entry of the page table for one key; 0 when there is no table.
__device__ inline int32_t read_page(const AttentionProblem& p, const SequenceGeometry& g, int32_t key) {
  if (p.kv_form != AttentionKvForm::kPaged) return 0;
  const auto page_size = static_cast<uint32_t>(p.page_size);
  const bool shifts = (page_size & (page_size - 1)) == 0;  // the same for all threads
  const uint32_t column = shifts ? static_cast<uint32_t>(key) >> (31 - __clz(static_cast<int>(page_size)))
                                 : static_cast<uint32_t>(key) / page_size;
  return __ldg(p.page_table + g.sequence * p.page_table_stride + column);
}

/// Element offset of head 0 of one key in k or v, or -1 when its page id, which read_page gave, is outside the pool
/// (flagged).
__device__ inline int64_t key_offset_in_page(const AttentionProblem& p, const HeadRows& rows, const SequenceGeometry& g,
                                             int32_t key, int32_t page, ErrorFlag page_flag) {
  if (p.kv_form == AttentionKvForm::kPadded) return g.sequence * rows.outer_stride + key * rows.row_stride;
  if (p.kv_form == AttentionKvForm::kPacked) return (int64_t{g.kv_begin} + key) * rows.row_stride;
  if (page < 0 || page >= p.num_pages) {
    raise_flag(page_flag);
    return -1;
  }
  const auto page_size = static_cast<uint32_t>(p.page_size);
  const bool masks = (page_size & (page_size - 1)) == 0;  // the same for all threads
  const uint32_t row = masks ? static_cast<uint32_t>(key) & (page_size - 1) : static_cast<uint32_t>(key) % page_size;
  return page * rows.outer_stride + int64_t{row} * rows.row_stride;
}

/// The same with the entry of the page table read here.
__device__ inline int64_t key_offset(const AttentionProblem& p, const HeadRows& rows, const SequenceGeometry& g,
                                     int32_t key, ErrorFlag page_flag) {
  return key_offset_in_page(p, rows, g, key, read_page(p, g, key), page_flag);
}

/// Element offset of one head of one row in q, out or lse.
__device__ inline int64_t row_offset(const AttentionProblem& p, const HeadRows& rows, const SequenceGeometry& g,
                                     int32_t row, int64_t head) {
  if (p.query_form == AttentionQueryForm::kPadded) {
    return g.sequence * rows.outer_stride + row * rows.row_stride + head * rows.head_stride;
  }
  return (int64_t{g.row_begin} + row) * rows.row_stride + head * rows.head_stride;
}

}  // namespace polyop::cuda
