// RowPlan: how row_attention cuts a call into tasks and where its scratch memory lies. No result depends on the cut.
#pragma once

#include <cstdint>
#include <span>

#include "polyop/core/kernel_list.h"
#include "polyop/cpu/scratch.h"
#include "polyop/ops/attention/attention_problem.h"

namespace polyop::cpu {

/// Rows [row_begin, row_end) of one (sequence, kv head): row r is query row r / G and head kv_head * G + r % G.
struct RowTask {
  int64_t sequence;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_end;
};

/// Scratch of one thread, f32; rows = rows_per_task, Dp = D and Dv padded, Lp = keys padded.
struct RowScratch {
  float* q;         // (rows, Dp) scaled
  float* kv_rows;   // (kKeysPerTile, Dp) widened keys, then values
  float* k_tile;    // (Dp, kKeysPerTile)
  float* scores;    // (rows, Lp) scores, then weights
  float* out;       // (rows, Dp)
  float* zero_row;  // (Dp) zeros: stands in for keys that must not be read
};

struct RowPlan {
  int64_t rows_per_task = 0;
  int64_t padded_dim = 0;     // Dp
  int64_t padded_keys = 0;    // Lp
  int64_t scratch_bytes = 0;  // per thread, a multiple of kWorkspaceAlignment
  int64_t task_capacity = 0;
  int num_threads = 1;

  std::span<RowTask> tasks;  // set by build()
  std::byte* scratch = nullptr;

  /// Sizes from shapes and the number of threads alone.
  explicit RowPlan(const AttentionProblem& problem);

  [[nodiscard]] int64_t workspace_bytes() const;

  /// Lists the tasks inside `workspace`, which has workspace_bytes(). Reads the lengths.
  void build(const AttentionProblem& problem, Workspace workspace);

  [[nodiscard]] RowScratch scratch_of(int thread) const;

 private:
  RowScratch take_scratch(ScratchCutter& memory) const;
};

}  // namespace polyop::cpu
