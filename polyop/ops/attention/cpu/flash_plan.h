// FlashPlan: how one attention call is cut into tasks for the CPU threads, and where its scratch memory lies. Nothing
// here touches a result: every row's arithmetic is fixed by the constants below, whatever the cut.
#pragma once

#include <cstdint>
#include <span>

#include "polyop/core/kernel_list.h"
#include "polyop/core/status.h"
#include "polyop/ops/attention/attention_problem.h"

namespace polyop::cpu {

// Keys are cut at multiples of these from position 0 of their sequence, so a row's result does not depend on pages,
// neighbours or threads. Changing kKeysPerChunk changes the bits of results (not their bound).
inline constexpr int64_t kKeysPerTile = 64;    // k and v of a tile, as f32, stay in L1 (D = 64: 16 KiB each)
inline constexpr int64_t kKeysPerChunk = 512;  // one softmax; chunks are merged in ascending order

// Rows (query row x head of one kv head) per task: many enough to pay for widening a tile, few enough that the scores
// of a chunk (kMaxRowsPerTask x kKeysPerChunk f32 = 384 KiB) stay in L2.
inline constexpr int64_t kMaxRowsPerTask = 192;
inline constexpr int64_t kMinRowsPerTask = 24;

// Scratch rows are padded to this many floats: the widest vector of the supported targets.
inline constexpr int64_t kLanePadding = 16;

/// Rows [row_begin, row_end) of one (sequence, kv head), where row r is query row r / G and head kv_head * G + r % G,
/// against key chunks [chunk_begin, chunk_end).
struct FlashTask {
  int64_t sequence;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_end;
  int64_t chunk_begin;
  int64_t chunk_end;
  int64_t partial;  // index of the first partial result that the task fills, or kWhole: it writes the output itself
  int64_t cost;     // multiply-adds per head dimension

  static constexpr int64_t kWhole = -1;
  [[nodiscard]] int64_t rows() const { return row_end - row_begin; }
};

/// Scratch of one thread, f32; rows = rows_per_task, Dp = D and Dv padded to kLanePadding.
struct FlashScratch {
  float* q;          // (rows, Dp) scaled to base-2 logits
  float* k_rows;     // (kKeysPerTile, Dp) widened keys
  float* k_tile;     // (Dp, kKeysPerTile) their transpose
  float* v_rows;     // (kKeysPerTile, Dp)
  float* scores;     // (rows, kKeysPerChunk)
  float* chunk_out;  // (rows, Dp)
  float* total_out;  // (rows, Dp)
  float* chunk_max;  // (rows), base-2 logits
  float* chunk_sum;  // (rows)
  float* total_max;  // (rows)
  float* total_sum;  // (rows)
  float* zero_row;   // (Dp) zeros: stands in for keys that must not be read
};

struct FlashPlan {
  int64_t rows_per_task = 0;
  int64_t padded_dim = 0;        // Dp
  int64_t scratch_floats = 0;    // per thread
  int64_t task_capacity = 0;     // tasks and split groups that fit
  int64_t partial_capacity = 0;  // partial results that fit
  int64_t partial_floats = 0;    // per partial result: max, sum, padding, then Dp values
  int num_threads = 1;

  // Set by build():
  std::span<FlashTask> tasks;   // longest first
  std::span<FlashTask> splits;  // row groups that several tasks share, each with all its chunks
  float* partials = nullptr;
  float* scratch = nullptr;

  /// Sizes from shapes and the number of threads alone.
  explicit FlashPlan(const AttentionProblem& problem);

  [[nodiscard]] int64_t workspace_bytes() const;

  /// Cuts the call into tasks inside `workspace`, which has workspace_bytes(). Reads the lengths.
  void build(const AttentionProblem& problem, Workspace workspace);

  [[nodiscard]] FlashScratch scratch_of(int thread) const;

  /// Memory of a partial result: {max, sum} at its start, the output from kLanePadding on.
  [[nodiscard]] float* partial(int64_t index) const { return partials + index * partial_floats; }
};

/// Writes 0 and -inf to the rows that attend to nothing by their place: padding rows and rows of no sequence.
void clear_rows_without_sequence(const AttentionProblem& problem);

/// Addresses of element 0 of one kv head of the keys [begin, end) of a sequence, walking pages without a division each.
void list_key_addresses(const AttentionProblem& problem, const HeadRows& rows, int64_t sequence, int64_t kv_head,
                        int64_t begin, int64_t end, const std::byte** addresses);

/// kUnsupported, naming the operand, unless q, k, v and out are f32, f16 or bf16: what every SIMD kernel here wants.
Status check_float_operands(const AttentionProblem& problem);

}  // namespace polyop::cpu
