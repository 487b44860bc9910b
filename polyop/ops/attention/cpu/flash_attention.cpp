// flash_attention: attention of prefill, chunked prefill and decode rows in one call, in f32 on all CPU threads.
// Math      per chunk of 512 keys: s = (scale log2(e) q) k^T, p = 2^(s - max s), o = p v; chunks are merged in order,
//           relative to their maxima; out = o / sum p
// Shapes    q [T, Hq, D] or [B, S, Hq, D] · k, v paged [P, R, Hkv, D|Dv], packed [Tkv, Hkv, D|Dv] or padded
//           [B, Lmax, Hkv, D|Dv] · lse [T, Hq] or [B, S, Hq]; q, k, v, out f32, f16 or bf16 each
// Layout    innermost axis dense, other strides free; keys are addressed row by row: any page size costs the same
// Work      task = up to 192 rows (query row x head of one kv head) x all their keys; one much longer than a thread's
//           share is cut into its chunks, whose results are merged afterwards in the same order, with the same steps
// Memory    k and v are widened once per task and tile of 64 keys into L1; decode reads each key once for its G heads
// Roofline  prefill: f32 multiply-add (85 to 90 % on Sapphire Rapids) · decode: reading k and v (about 80 % in f32)
// Numerics  all sums f32; a row's bits depend on its own q, keys and the SIMD target only; bound in README.md
// Limits    softmax without mask, tree or quantization: see supports_flash_attention
//
// Scalable vectors cannot be kept in arrays; the machines that have them have NEON too.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/ops/attention/cpu/flash_attention.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cpu/flash_plan.h"
#include "polyop/ops/attention/cpu/flash_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// One task at work: everything that its steps share.
struct TaskRun {
  const AttentionProblem& problem;
  const FlashTask& task;
  const FlashScratch& scratch;
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

void load_queries(const TaskRun& run) {
  const float factor = static_cast<float>(static_cast<double>(run.problem.scale) * std::numbers::log2e);
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    const std::byte* q = run.problem.row_address(run.problem.q, run.task.sequence, run.query_row(r), run.query_head(r));
    widen_row(run.problem.q.dtype, q, run.problem.head_dim, factor, run.scratch.q + r * run.padded_dim);
  }
}

// Rows of the keys [begin, end) in rows[0 ..): the cache itself, or f32 copies in `copies`.
void gather_rows(const TaskRun& run, const HeadRows& from, int64_t width, bool in_place, int64_t begin, int64_t end,
                 float* copies, const std::byte** rows) {
  list_key_addresses(run.problem, from, run.task.sequence, run.task.kv_head, begin, end, rows);
  if (in_place) return;
  for (int64_t j = 0; j < end - begin; ++j) {
    float* to = copies + j * run.padded_dim;
    widen_row(from.dtype, rows[j], width, 1.0f, to);
    rows[j] = reinterpret_cast<const std::byte*>(to);
  }
}

// Asks for the rows of the tile that follows at `begin`. The processor's own prefetcher follows a stream inside a 4 KiB
// page; rows that lie far apart leave it behind, which costs a decode step an eighth of its bandwidth.
void prefetch_next_tile(const TaskRun& run, const HeadRows& from, int64_t width, int64_t begin) {
  constexpr int64_t kFarRowBytes = 2048;
  constexpr int64_t kCacheLineBytes = 64;
  const int64_t elem_bytes = dtype_bytes(from.dtype);
  const int64_t end = std::min(begin + kKeysPerTile, run.keys.end);
  if (begin >= end || run.num_rows() > 2 * kTileRows || from.row_stride * elem_bytes < kFarRowBytes) return;
  const std::byte* rows[kKeysPerTile];
  list_key_addresses(run.problem, from, run.task.sequence, run.task.kv_head, begin, end, rows);
  for (int64_t j = 0; j < end - begin; ++j) {
    for (int64_t i = 0; i < width * elem_bytes; i += kCacheLineBytes) hwy::Prefetch(rows[j] + i);
  }
}

// scores(r, tile_begin - chunk_begin + j) = q_r . k_j for the keys j that some row of r's register tile sees.
void score_tile(const TaskRun& run, int64_t chunk_begin, int64_t tile_begin, int64_t tile_end) {
  const FlashScratch& scratch = run.scratch;
  const int64_t begin = std::max(run.keys.begin, tile_begin);
  const int64_t end = std::min(run.keys.end, tile_end);
  const std::byte* rows[kKeysPerTile];
  // Columns outside [begin, end) hold zeros: those keys may lie outside of every page.
  for (int64_t j = 0; j < kKeysPerTile; ++j) rows[j] = reinterpret_cast<const std::byte*>(scratch.zero_row);
  const DType dtype = run.problem.k.dtype;
  const bool in_place = (dtype == DType::kF32 && run.problem.head_dim % 4 == 0) ||
                        (dtype == DType::kBF16 && run.problem.head_dim % 8 == 0);
  prefetch_next_tile(run, run.problem.k, run.problem.head_dim, tile_end);
  gather_rows(run, run.problem.k, run.problem.head_dim, in_place, begin, end, scratch.k_rows,
              rows + (begin - tile_begin));
  const auto columns =
      static_cast<size_t>((end - tile_begin + int64_t{kLanes} - 1) / int64_t{kLanes} * int64_t{kLanes});
  transpose_keys(in_place ? dtype : DType::kF32, rows, columns, run.problem.head_dim, scratch.k_tile);

  const float* k_tile = scratch.k_tile;
  for (int64_t r = 0; r < run.num_rows(); r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, run.num_rows() - r);
    const IndexRange first = run.keys_of_row(r, tile_begin, tile_end);
    const IndexRange last = run.keys_of_row(r + count - 1, tile_begin, tile_end);
    const int64_t needed = std::max(first.end, last.end);
    if (needed == 0) continue;
    multiply<true>(
        count, scratch.q + r * run.padded_dim, run.padded_dim, 0, run.problem.head_dim,
        [k_tile](size_t i) HWY_ATTR { return k_tile + i * kKeysPerTile; },
        scratch.scores + r * kKeysPerChunk + (tile_begin - chunk_begin), kKeysPerChunk, needed);
  }
}

// Whether values are read from the cache itself: always for the one or two register tiles of a decode step. More of
// them read a tile of values again and again; it stays in L1 only when its rows spread over all sets, that is when the
// power of two in their stride is at most their width.
bool reads_values_in_place(const TaskRun& run) {
  const HeadRows& v = run.problem.v;
  const int64_t width = run.problem.value_head_dim;
  if (width % int64_t{kLanes} != 0) return false;
  return run.num_rows() <= 2 * kTileRows || (v.dtype == DType::kF32 && (v.row_stride & -v.row_stride) <= width);
}

// chunk_out(r) += sum over the visible keys j of the tile of p(r, j) v_j, j ascending; v_j = rows[j], of type T. Hidden
// keys are not multiplied by zero but left out: they may hold NaN.
template <class T>
void accumulate_rows(const TaskRun& run, int64_t chunk_begin, int64_t tile_begin, int64_t tile_end,
                     const std::byte* const* rows) {
  const FlashScratch& scratch = run.scratch;
  const auto accumulate = [&](int64_t r, int64_t count, int64_t key_begin, int64_t key_end) HWY_ATTR {
    if (key_begin >= key_end) return;
    multiply<false>(
        count, scratch.scores + r * kKeysPerChunk + (tile_begin - chunk_begin), kKeysPerChunk, key_begin, key_end,
        [rows](size_t j) HWY_ATTR { return reinterpret_cast<const T*>(rows[j]); },
        scratch.chunk_out + r * run.padded_dim, run.padded_dim, run.problem.value_head_dim);
  };
  for (int64_t r = 0; r < run.num_rows(); r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, run.num_rows() - r);
    IndexRange of_row[kTileRows];
    IndexRange common{0, kKeysPerTile};
    for (int64_t i = 0; i < count; ++i) {
      of_row[i] = run.keys_of_row(r + i, tile_begin, tile_end);
      common.begin = std::max(common.begin, of_row[i].begin);
      common.end = std::min(common.end, of_row[i].end);
    }
    if (common.size() == 0) common = {kKeysPerTile, kKeysPerTile};  // every row on its own, in one piece
    for (int64_t i = 0; i < count; ++i) {
      accumulate(r + i, 1, of_row[i].begin, std::min(of_row[i].end, common.begin));
    }
    accumulate(r, count, common.begin, common.end);
    for (int64_t i = 0; i < count; ++i) accumulate(r + i, 1, std::max(common.end, of_row[i].begin), of_row[i].end);
  }
}

void accumulate_tile(const TaskRun& run, int64_t chunk_begin, int64_t tile_begin, int64_t tile_end) {
  const HeadRows& v = run.problem.v;
  const int64_t begin = std::max(run.keys.begin, tile_begin);
  const int64_t end = std::min(run.keys.end, tile_end);
  const bool in_place = reads_values_in_place(run);
  const std::byte* rows[kKeysPerTile];
  prefetch_next_tile(run, v, run.problem.value_head_dim, tile_end);
  gather_rows(run, v, run.problem.value_head_dim, in_place, begin, end, run.scratch.v_rows,
              rows + (begin - tile_begin));
  if (in_place && v.dtype == DType::kF16) return accumulate_rows<F16>(run, chunk_begin, tile_begin, tile_end, rows);
  if (in_place && v.dtype == DType::kBF16) return accumulate_rows<BF16>(run, chunk_begin, tile_begin, tile_end, rows);
  accumulate_rows<float>(run, chunk_begin, tile_begin, tile_end, rows);
}

// Softmax and output of one chunk in scratch.chunk_*, for all rows.
void attend_chunk(const TaskRun& run, int64_t chunk) {
  const FlashScratch& scratch = run.scratch;
  const int64_t begin = chunk * kKeysPerChunk;
  const int64_t first_tile = std::max(begin, run.keys.begin / kKeysPerTile * kKeysPerTile);
  const int64_t end = std::min(begin + kKeysPerChunk, run.keys.end);
  for (int64_t tile = first_tile; tile < end; tile += kKeysPerTile) {
    score_tile(run, begin, tile, tile + kKeysPerTile);
  }
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    const IndexRange keys = run.keys_of_row(r, begin, begin + kKeysPerChunk);
    softmax_chunk(scratch.scores + r * kKeysPerChunk, keys.begin, keys.end, scratch.chunk_max + r,
                  scratch.chunk_sum + r);
  }
  std::fill_n(scratch.chunk_out, run.num_rows() * run.padded_dim, 0.0f);
  for (int64_t tile = first_tile; tile < end; tile += kKeysPerTile) {
    accumulate_tile(run, begin, tile, tile + kKeysPerTile);
  }
}

// Output and log-sum-exp of row r from its merged state; a state with sum 0 is an empty row.
void write_row(const TaskRun& run, int64_t r, float max, float sum, float* out) {
  const AttentionProblem& problem = run.problem;
  const int64_t head = run.query_head(r);
  const int64_t row = run.query_row(r);
  float factor = 1.0f;
  float lse = -std::numeric_limits<float>::infinity();
  if (sum == 0.0f) {
    sum = 1.0f;
    std::fill_n(out, run.padded_dim, 0.0f);
  } else {
    if (problem.sinks != nullptr) {
      const float sink = problem.sinks[head] * static_cast<float>(std::numbers::log2e);
      const float joint_max = std::max(max, sink);
      factor = exp2_of(max - joint_max);
      sum = sum * factor + exp2_of(sink - joint_max);
      max = joint_max;
    }
    lse = static_cast<float>((static_cast<double>(max) + std::log2(static_cast<double>(sum))) * std::numbers::ln2);
  }
  narrow_row(problem.out.dtype, out, problem.value_head_dim, factor, sum,
             problem.row_address(problem.out, run.task.sequence, row, head));
  if (problem.lse.data != nullptr) {
    *reinterpret_cast<float*>(problem.row_address(problem.lse, run.task.sequence, row, head)) = lse;
  }
}

void run_task(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& task, int thread) {
  const FlashScratch scratch = plan.scratch_of(thread);
  TaskRun run{problem, task, scratch, plan.padded_dim, {}};
  const int64_t chunk_keys_begin = task.chunk_begin * kKeysPerChunk;
  const int64_t chunk_keys_end = task.chunk_end * kKeysPerChunk;
  const IndexRange first = problem.visible_keys(task.sequence, run.query_row(0));
  const IndexRange last = problem.visible_keys(task.sequence, run.query_row(run.num_rows() - 1));
  run.keys = {std::max(first.begin, chunk_keys_begin), std::min(last.end, chunk_keys_end)};
  const auto width =
      static_cast<size_t>((problem.value_head_dim + int64_t{kLanes} - 1) / int64_t{kLanes} * int64_t{kLanes});

  std::fill_n(scratch.zero_row, plan.padded_dim, 0.0f);
  std::fill_n(scratch.total_sum, run.num_rows(), 0.0f);
  load_queries(run);
  const bool is_split = task.partial != FlashTask::kWhole;
  const bool has_one_chunk = !is_split && task.chunk_end - task.chunk_begin == 1;
  for (int64_t chunk = task.chunk_begin; chunk < task.chunk_end; ++chunk) {
    attend_chunk(run, chunk);
    for (int64_t r = 0; r < run.num_rows() && !has_one_chunk; ++r) {
      const float* chunk_out = scratch.chunk_out + r * plan.padded_dim;
      if (is_split) {
        float* partial = plan.partial(task.partial + r);
        partial[0] = scratch.chunk_max[r];
        partial[1] = scratch.chunk_sum[r];
        std::copy_n(chunk_out, width, partial + kLanePadding);
      } else {
        merge_chunk(scratch.chunk_max[r], scratch.chunk_sum[r], chunk_out, scratch.total_max + r, scratch.total_sum + r,
                    scratch.total_out + r * plan.padded_dim, width);
      }
    }
  }
  if (is_split) return;
  const float* max = has_one_chunk ? scratch.chunk_max : scratch.total_max;
  const float* sum = has_one_chunk ? scratch.chunk_sum : scratch.total_sum;
  float* out = has_one_chunk ? scratch.chunk_out : scratch.total_out;
  for (int64_t r = 0; r < run.num_rows(); ++r) write_row(run, r, max[r], sum[r], out + r * plan.padded_dim);
}

// Merges the chunks of one group of rows that several tasks shared.
void merge_split(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& group, int thread) {
  const FlashScratch scratch = plan.scratch_of(thread);
  const TaskRun run{problem, group, scratch, plan.padded_dim, {}};
  const auto width =
      static_cast<size_t>((problem.value_head_dim + int64_t{kLanes} - 1) / int64_t{kLanes} * int64_t{kLanes});
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    float max = 0.0f;
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < group.chunk_end - group.chunk_begin; ++chunk) {
      const float* partial = plan.partial(group.partial + chunk * group.rows() + r);
      merge_chunk(partial[0], partial[1], partial + kLanePadding, &max, &sum, scratch.total_out, width);
    }
    write_row(run, r, max, sum, scratch.total_out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyop::cpu {
namespace {

HWY_EXPORT(run_task);
HWY_EXPORT(merge_split);

}  // namespace

Status supports_flash_attention(const AttentionProblem& problem) {
  if (problem.normalization != AttentionNormalization::kSoftmax)
    return unsupported("normalization is none, wanted softmax");
  if (problem.weight_quantization != AttentionWeightQuantization::kNone) return unsupported("weights are quantized");
  if (problem.operand_scale != 1.0f) return unsupported("q and k are scaled in their own dtype");
  if (problem.mask.data != nullptr) return unsupported("it takes no dense mask");
  if (problem.tree_mask.words != nullptr) return unsupported("it takes no tree_mask");
  POLYOP_RETURN_IF_ERROR(check_float_operands(problem));
  if (problem.k_scale.data != nullptr || problem.v_scale.data != nullptr) {
    return unsupported("it takes no k_scale or v_scale");
  }
  return Status::ok();
}

int64_t flash_attention_workspace_bytes(const AttentionProblem& problem) {
  return FlashPlan(problem).workspace_bytes();
}

Status flash_attention(const AttentionProblem& problem, Workspace workspace, Stream) {
  FlashPlan plan(problem);
  // The pool may have grown since the workspace was sized.
  if (workspace.bytes < plan.workspace_bytes()) {
    return internal_error("attention: workspace has " + std::to_string(workspace.bytes) + " bytes, wanted " +
                          std::to_string(plan.workspace_bytes()));
  }
  plan.build(problem, workspace);
  clear_rows_without_sequence(problem);
  ThreadPool& pool = ThreadPool::shared();
  pool.parallel_for(static_cast<int64_t>(plan.tasks.size()), [&](int64_t task, int thread) {
    HWY_DYNAMIC_DISPATCH(run_task)(problem, plan, plan.tasks[task], thread);
  });
  pool.parallel_for(static_cast<int64_t>(plan.splits.size()), [&](int64_t split, int thread) {
    HWY_DYNAMIC_DISPATCH(merge_split)(problem, plan, plan.splits[split], thread);
  });
  return Status::ok();
}

}  // namespace polyop::cpu
#endif  // HWY_ONCE
