#include "polyop/ops/attention/cpu/row_plan.h"

#include <algorithm>

#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/attention/cpu/flash_plan.h"

namespace polyop::cpu {
namespace {

// Scores of a task: they are walked in order, so a core's L2 may be smaller.
constexpr int64_t kScoreBytes = 4 << 20;
// Rows are counted in whole register tiles of six; widening a tile of keys pays from about kPayingRows on, however many
// keys there are.
constexpr int64_t kLeastRows = 6;
constexpr int64_t kPayingRows = 24;
constexpr int64_t kMostRows = 96;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }
int64_t aligned(int64_t bytes) { return round_up(bytes, kWorkspaceAlignment); }

}  // namespace

RowPlan::RowPlan(const AttentionProblem& problem) {
  num_threads = ThreadPool::shared().num_threads();
  padded_dim = round_up(std::max(problem.head_dim, problem.value_head_dim), kLanePadding);
  padded_keys = round_up(std::max<int64_t>(problem.kv_capacity, 1), kKeysPerTile);
  const int64_t rows_per_kv_head = problem.num_query_rows * problem.group_size();
  const int64_t even_share = ceil_div(rows_per_kv_head * problem.num_kv_heads, num_threads * kLeastRows);
  const int64_t fitting = std::max(kPayingRows, kScoreBytes / (padded_keys * static_cast<int64_t>(sizeof(float))));
  const int64_t wanted = std::min(fitting, even_share) / kLeastRows * kLeastRows;
  rows_per_task = std::clamp(wanted, kLeastRows, kMostRows);
  ScratchCutter counter;
  take_scratch(counter);
  scratch_bytes = counter.bytes();
  task_capacity =
      problem.num_kv_heads * (ceil_div(std::max<int64_t>(rows_per_kv_head, 0), rows_per_task) + problem.num_sequences);
}

int64_t RowPlan::workspace_bytes() const {
  return aligned(task_capacity * static_cast<int64_t>(sizeof(RowTask))) + num_threads * scratch_bytes;
}

void RowPlan::build(const AttentionProblem& problem, Workspace workspace) {
  auto* memory = static_cast<std::byte*>(workspace.data);
  auto* list = reinterpret_cast<RowTask*>(memory);
  scratch = memory + aligned(task_capacity * static_cast<int64_t>(sizeof(RowTask)));
  int64_t count = 0;
  for (int64_t sequence = 0; sequence < problem.num_sequences; ++sequence) {
    const int64_t rows = problem.query_length(sequence) * problem.group_size();
    for (int64_t begin = 0; begin < rows; begin += rows_per_task) {
      for (int64_t kv_head = 0; kv_head < problem.num_kv_heads; ++kv_head) {
        list[count++] = {.sequence = sequence,
                         .kv_head = kv_head,
                         .row_begin = begin,
                         .row_end = std::min(begin + rows_per_task, rows)};
      }
    }
  }
  tasks = {list, static_cast<size_t>(count)};
}

RowScratch RowPlan::take_scratch(ScratchCutter& memory) const {
  RowScratch parts{};
  parts.q = memory.take<float>(rows_per_task * padded_dim);
  parts.kv_rows = memory.take<float>(kKeysPerTile * padded_dim);
  parts.k_tile = memory.take<float>(kKeysPerTile * padded_dim);
  parts.scores = memory.take<float>(rows_per_task * padded_keys);
  parts.out = memory.take<float>(rows_per_task * padded_dim);
  parts.zero_row = memory.take<float>(padded_dim);
  return parts;
}

RowScratch RowPlan::scratch_of(int thread) const {
  ScratchCutter memory(scratch + thread * scratch_bytes);
  return take_scratch(memory);
}

}  // namespace polyop::cpu
