#include "polyop/ops/attention/cpu/flash_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "polyop/core/numeric_types.h"
#include "polyop/cpu/thread_pool.h"

namespace polyop::cpu {
namespace {

// Tasks that each thread should find: enough that the last one to finish is a small part of the whole.
constexpr int64_t kTasksPerThread = 6;
// Upper limit of the partial results of split tasks; a call that needs more splits less.
constexpr int64_t kMaxPartialBytes = int64_t{16} << 20;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }

int64_t aligned(int64_t bytes) { return round_up(bytes, kWorkspaceAlignment); }

// Keys that some row of the task sees. Rows of one sequence are ordered by position, and so are both ends of their
// ranges.
IndexRange task_keys(const AttentionProblem& problem, const FlashTask& task) {
  const int64_t group = problem.group_size();
  const IndexRange first = problem.visible_keys(task.sequence, task.row_begin / group);
  const IndexRange last = problem.visible_keys(task.sequence, (task.row_end - 1) / group);
  return {std::max<int64_t>(0, std::min(first.begin, last.begin)), std::max(first.end, last.end)};
}

void clear_row(const AttentionProblem& problem, int64_t outer, int64_t row, int64_t head) {
  std::memset(problem.out.at(outer, row, head), 0,
              static_cast<size_t>(problem.value_head_dim * dtype_bytes(problem.out.dtype)));
  if (problem.lse.data == nullptr) return;
  *reinterpret_cast<float*>(problem.lse.at(outer, row, head)) = -std::numeric_limits<float>::infinity();
}

}  // namespace

FlashState take_flash_state(ScratchCutter& scratch, int64_t block_rows, int64_t rows, int64_t padded_dim) {
  FlashState state{};
  state.chunk_out = scratch.take<float>(block_rows * padded_dim);
  state.chunk_max = scratch.take<float>(block_rows);
  state.chunk_sum = scratch.take<float>(block_rows);
  state.total_out = scratch.take<float>(rows * padded_dim);
  state.total_max = scratch.take<float>(rows);
  state.total_sum = scratch.take<float>(rows);
  return state;
}

FlashPlan::FlashPlan(const AttentionProblem& problem, const FlashPlanShape& shape) {
  num_threads = ThreadPool::shared().num_threads();
  keys_per_chunk = shape.keys_per_chunk;
  const int64_t rows_per_kv_head = problem.num_query_rows * problem.group_size();
  const int64_t rows = rows_per_kv_head * problem.num_kv_heads;
  const int64_t even_share = ceil_div(rows, num_threads * kTasksPerThread);
  rows_per_task =
      std::clamp(round_up(even_share, shape.min_rows_per_task), shape.min_rows_per_task, shape.max_rows_per_task);

  padded_dim = round_up(std::max(problem.head_dim, problem.value_head_dim), shape.dim_padding);
  scratch_bytes = shape.scratch_bytes(problem, rows_per_task, padded_dim);
  partial_floats = kLanePadding + padded_dim;

  const int64_t groups = problem.num_kv_heads * (ceil_div(rows_per_kv_head, rows_per_task) + problem.num_sequences);
  if (num_threads > 1) {
    const int64_t fitting = kMaxPartialBytes / (partial_floats * static_cast<int64_t>(sizeof(float)));
    partial_capacity = std::min(rows * ceil_div(problem.kv_capacity, keys_per_chunk), fitting);
  }
  // A split group turns into one task a chunk, each of which owns at least one partial result.
  task_capacity = groups + partial_capacity;
}

int64_t FlashPlan::workspace_bytes() const {
  return 2 * aligned(task_capacity * static_cast<int64_t>(sizeof(FlashTask))) +
         aligned(partial_capacity * partial_floats * static_cast<int64_t>(sizeof(float))) + num_threads * scratch_bytes;
}

void FlashPlan::build(const AttentionProblem& problem, Workspace workspace) {
  auto* memory = static_cast<std::byte*>(workspace.data);
  auto* task_memory = reinterpret_cast<FlashTask*>(memory);
  memory += aligned(task_capacity * static_cast<int64_t>(sizeof(FlashTask)));
  auto* split_memory = reinterpret_cast<FlashTask*>(memory);
  memory += aligned(task_capacity * static_cast<int64_t>(sizeof(FlashTask)));
  partials = reinterpret_cast<float*>(memory);
  memory += aligned(partial_capacity * partial_floats * static_cast<int64_t>(sizeof(float)));
  scratch = memory;

  // ---- one task for each group of rows
  int64_t num_groups = 0;
  int64_t total_cost = 0;
  for (int64_t sequence = 0; sequence < problem.num_sequences; ++sequence) {
    const int64_t rows = problem.query_length(sequence) * problem.group_size();
    for (int64_t begin = 0; begin < rows; begin += rows_per_task) {
      FlashTask task{.sequence = sequence,
                     .kv_head = 0,
                     .row_begin = begin,
                     .row_end = std::min(begin + rows_per_task, rows),
                     .chunk_begin = 0,
                     .chunk_end = 0,
                     .partial = FlashTask::kWhole,
                     .cost = 0};
      const IndexRange keys = task_keys(problem, task);
      if (keys.size() > 0) {
        task.chunk_begin = keys.begin / keys_per_chunk;
        task.chunk_end = ceil_div(keys.end, keys_per_chunk);
      }
      // Widening a tile costs about as much as four rows of it.
      task.cost = keys.size() * (task.rows() + 4) + task.rows();
      for (task.kv_head = 0; task.kv_head < problem.num_kv_heads; ++task.kv_head) {
        task_memory[num_groups++] = task;
        total_cost += task.cost;
      }
    }
  }
  const auto longest_first = [](const FlashTask& a, const FlashTask& b) { return a.cost > b.cost; };
  std::sort(task_memory, task_memory + num_groups, longest_first);

  // ---- groups too long for an even share are split into their chunks, as far as there is memory for partial results
  const int64_t share = std::max<int64_t>(1, total_cost / (num_threads * kTasksPerThread));
  int64_t num_splits = 0;
  int64_t num_partials = 0;
  if (num_threads > 1) {
    while (num_splits < num_groups) {
      FlashTask& group = task_memory[num_splits];
      const int64_t chunks = group.chunk_end - group.chunk_begin;
      if (group.cost <= share || chunks <= 1 || num_partials + chunks * group.rows() > partial_capacity) break;
      group.partial = num_partials;
      num_partials += chunks * group.rows();
      split_memory[num_splits++] = group;
    }
  }
  // Split groups leave the front of the list; their chunks join its end.
  std::move(task_memory + num_splits, task_memory + num_groups, task_memory);
  int64_t num_tasks = num_groups - num_splits;
  for (int64_t split = 0; split < num_splits; ++split) {
    const FlashTask& group = split_memory[split];
    for (int64_t chunk = group.chunk_begin; chunk < group.chunk_end; ++chunk) {
      FlashTask& task = task_memory[num_tasks++];
      task = group;
      task.chunk_begin = chunk;
      task.chunk_end = chunk + 1;
      task.partial = group.partial + (chunk - group.chunk_begin) * group.rows();
      task.cost = group.cost / (group.chunk_end - group.chunk_begin);
    }
  }
  if (num_splits > 0) std::sort(task_memory, task_memory + num_tasks, longest_first);
  tasks = {task_memory, static_cast<size_t>(num_tasks)};
  splits = {split_memory, static_cast<size_t>(num_splits)};
}

Status check_workspace(int64_t wanted_bytes, Workspace workspace) {
  if (workspace.bytes >= wanted_bytes) return Status::ok();
  return internal_error("attention: workspace has " + std::to_string(workspace.bytes) + " bytes, wanted " +
                        std::to_string(wanted_bytes));
}

Status run_flash_plan(const AttentionProblem& problem, const FlashPlanShape& shape, Workspace workspace,
                      FlashTaskFn run_task, FlashTaskFn merge_split) {
  FlashPlan plan(problem, shape);
  POLYOP_RETURN_IF_ERROR(check_workspace(plan.workspace_bytes(), workspace));
  plan.build(problem, workspace);
  clear_rows_without_sequence(problem);
  ThreadPool& pool = ThreadPool::shared();
  pool.parallel_for(static_cast<int64_t>(plan.tasks.size()),
                    [&](int64_t task, int thread) { run_task(problem, plan, plan.tasks[task], thread); });
  pool.parallel_for(static_cast<int64_t>(plan.splits.size()),
                    [&](int64_t split, int thread) { merge_split(problem, plan, plan.splits[split], thread); });
  return Status::ok();
}

void clear_rows_without_sequence(const AttentionProblem& problem) {
  for (int64_t head = 0; head < problem.num_query_heads; ++head) {
    for (int64_t row = problem.num_owned_rows(); row < problem.num_query_rows; ++row) {
      clear_row(problem, 0, row, head);
    }
    if (problem.query_lengths == nullptr) continue;
    for (int64_t sequence = 0; sequence < problem.num_sequences; ++sequence) {
      for (int64_t row = problem.query_length(sequence); row < problem.allotted_query_length(sequence); ++row) {
        clear_row(problem, sequence, row, head);
      }
    }
  }
}

void list_key_addresses(const AttentionProblem& problem, const HeadRows& rows, int64_t sequence, int64_t kv_head,
                        int64_t begin, int64_t end, const std::byte** addresses) {
  const int64_t row_bytes = rows.row_stride * dtype_bytes(rows.dtype);
  int64_t key = begin;
  while (key < end) {
    // Up to `run_end` the keys lie `row_bytes` apart.
    int64_t run_end = end;
    if (problem.kv_form == AttentionKvForm::kPaged) {
      run_end = std::min(end, (key / problem.page_size + 1) * problem.page_size);
    }
    const std::byte* address = problem.key_address(rows, sequence, key, kv_head);
    for (; key < run_end; ++key, address += row_bytes) *addresses++ = address;
  }
}

Status check_plain_softmax(const AttentionProblem& problem) {
  if (problem.normalization != AttentionNormalization::kSoftmax)
    return unsupported("normalization is none, wanted softmax");
  if (problem.weight_quantization != AttentionWeightQuantization::kNone) return unsupported("weights are quantized");
  if (problem.operand_scale != 1.0f) return unsupported("q and k are scaled in their own dtype");
  if (problem.mask.data != nullptr) return unsupported("it takes no dense mask");
  return Status::ok();
}

Status check_query_dtype(const AttentionProblem& problem) {
  const DType dtype = problem.q.dtype;
  if (dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16) return Status::ok();
  return unsupported("q is " + std::string(dtype_name(dtype)) + ", wanted f32, f16 or bf16");
}

const float* byte_values(DType dtype) {
  struct Tables {
    float f8e4m3[256];
    float i8[256];
    Tables() {
      for (int i = 0; i < 256; ++i) {
        f8e4m3[i] = F8E4M3{static_cast<uint8_t>(i)}.to_float();
        i8[i] = static_cast<float>(static_cast<int8_t>(i));
      }
    }
  };
  static const Tables tables;
  return dtype == DType::kF8E4M3 ? tables.f8e4m3 : tables.i8;
}

}  // namespace polyop::cpu
