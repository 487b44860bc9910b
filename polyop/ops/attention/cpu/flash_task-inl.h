// What the flash kernels share: a task at work, the merge of its chunks and its output rows. The engine of a kernel
// computes one chunk.
//
// Included once per SIMD target.
#if defined(POLYOP_OPS_ATTENTION_CPU_FLASH_TASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_OPS_ATTENTION_CPU_FLASH_TASK_INL_H_
#undef POLYOP_OPS_ATTENTION_CPU_FLASH_TASK_INL_H_
#else
#define POLYOP_OPS_ATTENTION_CPU_FLASH_TASK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "polyop/ops/attention/cpu/flash_plan.h"
#include "polyop/ops/attention/cpu/flash_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// One task at work: everything that its steps share.
struct TaskRun {
  const AttentionProblem& problem;
  const FlashTask& task;
  const FlashState& state;
  int64_t padded_dim;
  IndexRange keys;  // union of the rows' visible keys

  [[nodiscard]] int64_t num_rows() const { return task.rows(); }
  [[nodiscard]] int64_t query_row(int64_t r) const { return (task.row_begin + r) / problem.group_size(); }
  [[nodiscard]] int64_t query_head(int64_t r) const {
    const int64_t group = problem.group_size();
    return task.kv_head * group + (task.row_begin + r) % group;
  }

  // Keys of row r in [begin, end), relative to begin; empty ranges are {0, 0}.
  [[nodiscard]] IndexRange keys_of_row(int64_t r, int64_t begin, int64_t end) const {
    const IndexRange visible = problem.visible_keys(task.sequence, query_row(r));
    const IndexRange part{std::max(visible.begin, begin) - begin, std::min(visible.end, end) - begin};
    return part.size() > 0 ? part : IndexRange{};
  }
};

// Asks for the rows of the tile that is read after the next one. The processor's own prefetcher follows a stream inside
// a 4 KiB page; rows that lie far apart leave it behind. Into L2: its misses have more buffers than those of L1, and
// two threads read a third faster that way (measured with rows of 256 bytes, 2 KiB apart). For few rows, which wait for
// memory.
inline void prefetch_after_tile(const TaskRun& run, const HeadRows& from, int64_t width, int64_t tile_begin) {
  constexpr int64_t kFarRowBytes = 2048;
  constexpr int64_t kCacheLineBytes = 64;
  const int64_t elem_bytes = dtype_bytes(from.dtype);
  const int64_t begin = tile_begin + 2 * kKeysPerTile;
  const int64_t end = std::min(begin + kKeysPerTile, run.keys.end);
  if (begin >= end || from.row_stride * elem_bytes < kFarRowBytes) return;
  const std::byte* rows[kKeysPerTile];
  list_key_addresses(run.problem, from, run.task.sequence, run.task.kv_head, begin, end, rows);
  for (int64_t j = 0; j < end - begin; ++j) {
    for (int64_t i = 0; i < width * elem_bytes; i += kCacheLineBytes) __builtin_prefetch(rows[j] + i, 0, 1);
  }
}

// Output and log-sum-exp of row r from its merged state; a state with sum 0 is an empty row.
inline void write_row(const TaskRun& run, int64_t r, float max, float sum, float* out) {
  const AttentionProblem& problem = run.problem;
  const int64_t head = run.query_head(r);
  const int64_t row = run.query_row(r);
  float factor = 1.0f;
  if (sum == 0.0f) {
    std::fill_n(out, run.padded_dim, 0.0f);
  } else {
    if (problem.sinks != nullptr) {
      const float sink = problem.sinks[head] * static_cast<float>(std::numbers::log2e);
      const float joint_max = std::max(max, sink);
      factor = exp2_of(max - joint_max);
      sum = sum * factor + exp2_of(sink - joint_max);
      max = joint_max;
    }
    factor /= sum;
  }
  factor *= value_factor(problem, run.task.kv_head);
  narrow_row(problem.out.dtype, out, problem.value_head_dim, factor,
             problem.row_address(problem.out, run.task.sequence, row, head));
  if (problem.lse.data == nullptr) return;
  double lse = -std::numeric_limits<double>::infinity();
  if (sum != 0.0f) lse = (static_cast<double>(max) + std::log2(static_cast<double>(sum))) * std::numbers::ln2;
  *reinterpret_cast<float*>(problem.row_address(problem.lse, run.task.sequence, row, head)) = static_cast<float>(lse);
}

// Whole vectors that hold the values of a row.
inline size_t value_width(const AttentionProblem& problem) {
  const auto dim = static_cast<size_t>(problem.value_head_dim);
  return (dim + kLanes - 1) / kLanes * kLanes;
}

// All chunks of one task. engine.load_queries(run) is called once, then engine.attend_chunk(run, chunk, finish) for
// each chunk: it leaves max, sum and output of rows [r, r + count) in run.state.chunk_*[0 .. count) and calls finish(r,
// count), for one block of rows after the other.
template <class Engine>
void run_flash_task(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& task,
                    const FlashState& state, Engine& engine) {
  TaskRun run{problem, task, state, plan.padded_dim, {}};
  const IndexRange first = problem.visible_keys(task.sequence, run.query_row(0));
  const IndexRange last = problem.visible_keys(task.sequence, run.query_row(run.num_rows() - 1));
  run.keys = {std::max(first.begin, task.chunk_begin * plan.keys_per_chunk),
              std::min(last.end, task.chunk_end * plan.keys_per_chunk)};
  const size_t width = value_width(problem);

  std::fill_n(state.total_sum, run.num_rows(), 0.0f);
  engine.load_queries(run);
  const bool is_split = task.partial != FlashTask::kWhole;
  const bool has_one_chunk = !is_split && task.chunk_end - task.chunk_begin == 1;
  const auto finish = [&](int64_t begin, int64_t count) HWY_ATTR {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = begin + i;
      float* chunk_out = state.chunk_out + i * plan.padded_dim;
      if (is_split) {
        float* partial = plan.partial(task.partial + r);
        partial[0] = state.chunk_max[i];
        partial[1] = state.chunk_sum[i];
        std::copy_n(chunk_out, width, partial + kLanePadding);
      } else if (has_one_chunk) {
        write_row(run, r, state.chunk_max[i], state.chunk_sum[i], chunk_out);
      } else {
        merge_chunk(state.chunk_max[i], state.chunk_sum[i], chunk_out, state.total_max + r, state.total_sum + r,
                    state.total_out + r * plan.padded_dim, width);
      }
    }
  };
  for (int64_t chunk = task.chunk_begin; chunk < task.chunk_end; ++chunk) engine.attend_chunk(run, chunk, finish);
  if (is_split || has_one_chunk) return;
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    write_row(run, r, state.total_max[r], state.total_sum[r], state.total_out + r * plan.padded_dim);
  }
}

// Merges the chunks of one group of rows that several tasks shared.
inline void merge_flash_split(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& group,
                              const FlashState& state) {
  const TaskRun run{problem, group, state, plan.padded_dim, {}};
  const size_t width = value_width(problem);
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    float max = 0.0f;
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < group.chunk_end - group.chunk_begin; ++chunk) {
      const float* partial = plan.partial(group.partial + chunk * group.rows() + r);
      merge_chunk(partial[0], partial[1], partial + kLanePadding, &max, &sum, state.total_out, width);
    }
    write_row(run, r, max, sum, state.total_out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_OPS_ATTENTION_CPU_FLASH_TASK_INL_H_
