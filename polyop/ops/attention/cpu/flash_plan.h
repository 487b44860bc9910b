// FlashPlan: how one attention call is cut into tasks for the CPU threads, and where its scratch memory lies. Nothing
// here touches a result: every row's arithmetic is fixed by the constants below, whatever the cut.
#pragma once

#include <cstdint>
#include <span>

#include "polyop/core/kernel_list.h"
#include "polyop/core/status.h"
#include "polyop/cpu/scratch.h"
#include "polyop/ops/attention/attention_problem.h"

namespace polyop::cpu {

// Keys are cut into tiles and chunks at multiples of their sizes from position 0 of their sequence, so a row's result
// does not depend on pages, neighbours or threads.
inline constexpr int64_t kKeysPerTile = 64;

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

/// Softmax state and output: of a block of rows for the chunk at work, and of all rows of a task for all chunks so far.
struct FlashState {
  float* chunk_out;  // (block_rows, padded_dim), relative to chunk_max
  float* chunk_max;  // (block_rows), base-2 logits
  float* chunk_sum;  // (block_rows)
  float* total_out;  // (rows, padded_dim)
  float* total_max;  // (rows)
  float* total_sum;  // (rows)
};

FlashState take_flash_state(ScratchCutter& scratch, int64_t block_rows, int64_t rows, int64_t padded_dim);

/// What a kernel asks of its plan.
struct FlashPlanShape {
  int64_t min_rows_per_task;  // rows_per_task is a multiple of it
  int64_t max_rows_per_task;
  int64_t keys_per_chunk;  // keys of one softmax, a multiple of kKeysPerTile; decides the bits of results
  int64_t dim_padding;     // D and Dv are padded to a multiple of it
  /// Scratch of one thread.
  int64_t (*scratch_bytes)(const AttentionProblem& problem, int64_t rows_per_task, int64_t padded_dim);
};

struct FlashPlan {
  int64_t rows_per_task = 0;
  int64_t keys_per_chunk = 0;
  int64_t padded_dim = 0;        // Dp: the larger of D and Dv, padded
  int64_t scratch_bytes = 0;     // per thread, a multiple of kWorkspaceAlignment
  int64_t task_capacity = 0;     // tasks and split groups that fit
  int64_t partial_capacity = 0;  // partial results that fit
  int64_t partial_floats = 0;    // per partial result: max, sum, padding, then Dp values
  int num_threads = 1;

  // Set by build():
  std::span<FlashTask> tasks;   // longest first
  std::span<FlashTask> splits;  // row groups that several tasks share, each with all its chunks
  float* partials = nullptr;
  std::byte* scratch = nullptr;

  /// Sizes from shapes and the number of threads alone.
  FlashPlan(const AttentionProblem& problem, const FlashPlanShape& shape);

  [[nodiscard]] int64_t workspace_bytes() const;

  /// Cuts the call into tasks inside `workspace`, which has workspace_bytes(). Reads the lengths.
  void build(const AttentionProblem& problem, Workspace workspace);

  [[nodiscard]] std::byte* scratch_of(int thread) const { return scratch + thread * scratch_bytes; }

  /// Memory of a partial result: {max, sum} at its start, the output from kLanePadding on.
  [[nodiscard]] float* partial(int64_t index) const { return partials + index * partial_floats; }
};

/// kInternal unless the workspace holds the plan: the pool may have grown since the workspace was sized.
Status check_workspace(int64_t wanted_bytes, Workspace workspace);

using FlashTaskFn = void (*)(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& task, int thread);

/// A whole call: plans it inside the workspace, runs every task, then merges every split group.
Status run_flash_plan(const AttentionProblem& problem, const FlashPlanShape& shape, Workspace workspace,
                      FlashTaskFn run_task, FlashTaskFn merge_split);

/// Writes 0 and -inf to the rows that attend to nothing by their place: padding rows and rows of no sequence.
void clear_rows_without_sequence(const AttentionProblem& problem);

/// Addresses of element 0 of one kv head of the keys [begin, end) of a sequence, walking pages without a division each.
void list_key_addresses(const AttentionProblem& problem, const HeadRows& rows, int64_t sequence, int64_t kv_head,
                        int64_t begin, int64_t end, const std::byte** addresses);

/// Why a kernel that computes softmax over plain keys refuses: dense masks, quantized or unnormalized weights.
Status check_plain_softmax(const AttentionProblem& problem);

/// kUnsupported, naming the operand, unless q is f32, f16 or bf16: what every SIMD kernel here wants.
Status check_query_dtype(const AttentionProblem& problem);

/// The 256 values of a dtype of one byte, f8e4m3 or i8, as f32.
const float* byte_values(DType dtype);

/// What a product of q and k is multiplied by, and a product of weight and v.
inline float score_factor(const AttentionProblem& problem, int64_t kv_head) {
  return problem.scale * problem.k_scale.of_head(kv_head);
}
inline float value_factor(const AttentionProblem& problem, int64_t kv_head) {
  const float output_scale = problem.output_scale == nullptr ? 1.0f : *problem.output_scale;
  return problem.v_scale.of_head(kv_head) / output_scale;
}

}  // namespace polyop::cpu
