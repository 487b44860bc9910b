// Ragged batch: the flat arrays that describe sequences of different length packed one after another without padding.
#pragma once

#include <cstdint>
#include <span>

#include "polyop/core/status.h"

namespace polyop::runtime {

/// Query and past lengths of the B sequences of one step.
struct RaggedBatchLengths {
  std::span<const int64_t> query_tokens;  // new tokens of each sequence; 0 is allowed
  std::span<const int64_t> past_tokens;   // tokens already cached
};

/// Caller-given arrays; a span may be larger than needed, the rest is left alone.
struct RaggedBatchArrays {
  std::span<int32_t> query_offsets;    // [B + 1] first packed row of each sequence, then T
  std::span<int32_t> write_positions;  // [B] cache position of the first new token
  std::span<int32_t> kv_lengths;       // [B] cached length including the new tokens
  std::span<int32_t> logits_rows;      // [B] packed row of the last new token, -1 for a sequence without one
  std::span<int32_t> position_ids;     // [T] position of each token in its sequence
};

/// Sums over a checked batch.
struct RaggedBatchTotals {
  int64_t num_tokens = 0;     // T
  int64_t max_kv_length = 0;  // 0 for an empty batch
};

/// Checks signs, i32 range and the sizes of all arrays; kInvalidArgument names the first array or sequence that fails.
Status check_ragged_batch(const RaggedBatchLengths& lengths, const RaggedBatchArrays& arrays,
                          RaggedBatchTotals* totals);

/// check_ragged_batch, then writes the arrays. A refused batch leaves them untouched.
Status fill_ragged_batch(const RaggedBatchLengths& lengths, const RaggedBatchArrays& arrays, RaggedBatchTotals* totals);

}  // namespace polyop::runtime
