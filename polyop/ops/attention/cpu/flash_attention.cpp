// flash_attention: attention of prefill, chunked prefill and decode rows in one call, in f32 on all CPU threads.
// Math      per chunk of 512 keys: s = (scale log2(e) q) k^T, p = 2^(s - max s), o = p v; chunks are merged in order,
//           relative to their maxima; out = o / sum p
// Shapes    q [T, Hq, D] or [B, S, Hq, D] · k, v paged [P, R, Hkv, D|Dv], packed [Tkv, Hkv, D|Dv] or padded
//           [B, Lmax, Hkv, D|Dv] · lse [T, Hq] or [B, S, Hq]; q, out f32, f16 or bf16 each, out f8e4m3 too; k, v
//           also f8e4m3, i8 with scales
// Layout    innermost axis dense, other strides free; keys are addressed row by row: any page size costs the same
// Work      task = up to 192 rows (query row x head of one kv head) x all their keys; one much longer than a thread's
//           share is cut into its chunks, whose results are merged afterwards in the same order, with the same steps
// Memory    k and v are widened once per task and tile of 64 keys into L1; decode reads each key once for its G heads
// Roofline  prefill: f32 multiply-add (85 to 90 % on Sapphire Rapids) · decode: reading k and v (about 80 % in f32)
// Numerics  all sums f32; a row's bits depend on its own q, keys and the SIMD target only; bound in README.md
// Limits    softmax without mask, tree or quantized weights: see supports_flash_attention
//
// Scalable vectors cannot be kept in arrays; the machines that have them have NEON too.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/ops/attention/cpu/flash_attention.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>

#include <algorithm>
#include <numbers>

#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cpu/flash_plan.h"
#include "polyop/ops/attention/cpu/flash_task-inl.h"
#include "polyop/ops/attention/cpu/flash_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// Keys of one softmax; its scores for the rows of a task stay in L2.
constexpr int64_t kKeysPerChunk = 512;

// Scratch of one thread, f32; Dp = D and Dv padded to kLanePadding.
struct FlashScratch {
  float* q;         // (rows, Dp) scaled to base-2 logits
  float* k_rows;    // (kKeysPerTile, Dp) widened keys
  float* k_tile;    // (Dp, kKeysPerTile) their transpose
  float* v_rows;    // (kKeysPerTile, Dp)
  float* scores;    // (rows, kKeysPerChunk)
  float* zero_row;  // (Dp) zeros: stands in for keys that must not be read
  FlashState state;
};

inline FlashScratch take_scratch(ScratchCutter& memory, int64_t rows, int64_t padded_dim) {
  FlashScratch scratch{};
  scratch.q = memory.take<float>(rows * padded_dim);
  scratch.k_rows = memory.take<float>(kKeysPerTile * padded_dim);
  scratch.k_tile = memory.take<float>(kKeysPerTile * padded_dim);
  scratch.v_rows = memory.take<float>(kKeysPerTile * padded_dim);
  scratch.scores = memory.take<float>(rows * kKeysPerChunk);
  scratch.zero_row = memory.take<float>(padded_dim);
  scratch.state = take_flash_state(memory, rows, rows, padded_dim);
  return scratch;
}

// One or two register tiles of rows.
inline bool is_decode(const TaskRun& run) { return run.num_rows() <= 2 * kTileRows; }

void load_queries(const FlashScratch& scratch, const TaskRun& run) {
  const double scale = score_factor(run.problem, run.task.kv_head);
  const auto factor = static_cast<float>(scale * std::numbers::log2e);
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    const std::byte* q = run.problem.row_address(run.problem.q, run.task.sequence, run.query_row(r), run.query_head(r));
    widen_row(run.problem.q.dtype, q, run.problem.head_dim, factor, scratch.q + r * run.padded_dim);
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

// scores(r, tile_begin - chunk_begin + j) = q_r . k_j for the keys j that some row of r's register tile sees.
void score_tile(const FlashScratch& scratch, const TaskRun& run, int64_t chunk_begin, int64_t tile_begin,
                int64_t tile_end) {
  const int64_t begin = std::max(run.keys.begin, tile_begin);
  const int64_t end = std::min(run.keys.end, tile_end);
  const std::byte* rows[kKeysPerTile];
  // Columns outside [begin, end) hold zeros: those keys may lie outside of every page.
  for (int64_t j = 0; j < kKeysPerTile; ++j) rows[j] = reinterpret_cast<const std::byte*>(scratch.zero_row);
  const DType dtype = run.problem.k.dtype;
  const bool in_place = (dtype == DType::kF32 && run.problem.head_dim % 4 == 0) ||
                        (dtype == DType::kBF16 && run.problem.head_dim % 8 == 0);
  if (is_decode(run)) prefetch_after_tile(run, run.problem.k, run.problem.head_dim, tile_begin);
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
  if (width % int64_t{kLanes} != 0 || dtype_bytes(v.dtype) == 1) return false;
  return is_decode(run) || (v.dtype == DType::kF32 && (v.row_stride & -v.row_stride) <= width);
}

// chunk_out(r) += sum over the visible keys j of the tile of p(r, j) v_j, j ascending; v_j = rows[j], of type T. Hidden
// keys are not multiplied by zero but left out: they may hold NaN.
template <class T>
void accumulate_rows(const FlashScratch& scratch, const TaskRun& run, int64_t chunk_begin, int64_t tile_begin,
                     int64_t tile_end, const std::byte* const* rows) {
  const auto accumulate = [&](int64_t r, int64_t count, int64_t key_begin, int64_t key_end) HWY_ATTR {
    if (key_begin >= key_end) return;
    multiply<false>(
        count, scratch.scores + r * kKeysPerChunk + (tile_begin - chunk_begin), kKeysPerChunk, key_begin, key_end,
        [rows](size_t j) HWY_ATTR { return reinterpret_cast<const T*>(rows[j]); },
        run.state.chunk_out + r * run.padded_dim, run.padded_dim, run.problem.value_head_dim);
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

void accumulate_tile(const FlashScratch& scratch, const TaskRun& run, int64_t chunk_begin, int64_t tile_begin,
                     int64_t tile_end) {
  const HeadRows& v = run.problem.v;
  const int64_t begin = std::max(run.keys.begin, tile_begin);
  const int64_t end = std::min(run.keys.end, tile_end);
  const bool in_place = reads_values_in_place(run);
  const std::byte* rows[kKeysPerTile];
  if (is_decode(run)) prefetch_after_tile(run, v, run.problem.value_head_dim, tile_begin);
  gather_rows(run, v, run.problem.value_head_dim, in_place, begin, end, scratch.v_rows, rows + (begin - tile_begin));
  if (in_place && v.dtype == DType::kF16)
    return accumulate_rows<F16>(scratch, run, chunk_begin, tile_begin, tile_end, rows);
  if (in_place && v.dtype == DType::kBF16)
    return accumulate_rows<BF16>(scratch, run, chunk_begin, tile_begin, tile_end, rows);
  accumulate_rows<float>(scratch, run, chunk_begin, tile_begin, tile_end, rows);
}

// Softmax and output of one chunk in run.state.chunk_*, for all rows.
void attend_chunk(const FlashScratch& scratch, const TaskRun& run, int64_t chunk) {
  const int64_t begin = chunk * kKeysPerChunk;
  const int64_t first_tile = std::max(begin, run.keys.begin / kKeysPerTile * kKeysPerTile);
  const int64_t end = std::min(begin + kKeysPerChunk, run.keys.end);
  for (int64_t tile = first_tile; tile < end; tile += kKeysPerTile) {
    score_tile(scratch, run, begin, tile, tile + kKeysPerTile);
  }
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    const IndexRange keys = run.keys_of_row(r, begin, begin + kKeysPerChunk);
    softmax_chunk(scratch.scores + r * kKeysPerChunk, keys.begin, keys.end, run.state.chunk_max + r,
                  run.state.chunk_sum + r);
  }
  std::fill_n(run.state.chunk_out, run.num_rows() * run.padded_dim, 0.0f);
  for (int64_t tile = first_tile; tile < end; tile += kKeysPerTile) {
    accumulate_tile(scratch, run, begin, tile, tile + kKeysPerTile);
  }
}

struct F32Engine {
  const FlashScratch& scratch;
  void load_queries(const TaskRun& run) const { HWY_NAMESPACE::load_queries(scratch, run); }
  template <class Finish>
  void attend_chunk(const TaskRun& run, int64_t chunk, const Finish& finish) const {
    HWY_NAMESPACE::attend_chunk(scratch, run, chunk);
    finish(0, run.num_rows());
  }
};

void run_task(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& task, int thread) {
  ScratchCutter memory(plan.scratch_of(thread));
  const FlashScratch scratch = take_scratch(memory, plan.rows_per_task, plan.padded_dim);
  std::fill_n(scratch.zero_row, plan.padded_dim, 0.0f);
  F32Engine engine{scratch};
  run_flash_task(problem, plan, task, scratch.state, engine);
}

void merge_split(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& group, int thread) {
  ScratchCutter memory(plan.scratch_of(thread));
  merge_flash_split(problem, plan, group, take_scratch(memory, plan.rows_per_task, plan.padded_dim).state);
}

int64_t scratch_bytes(const AttentionProblem&, int64_t rows, int64_t padded_dim) {
  ScratchCutter counter;
  take_scratch(counter, rows, padded_dim);
  return counter.bytes();
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyop::cpu {
namespace {

HWY_EXPORT(run_task);
HWY_EXPORT(merge_split);

// Rows per task: many enough to pay for widening a tile, few enough that the scores of a chunk (192 x kKeysPerChunk f32
// = 384 KiB) stay in L2.
constexpr FlashPlanShape kPlanShape{.min_rows_per_task = 24,
                                    .max_rows_per_task = 192,
                                    .keys_per_chunk = HWY_NAMESPACE::kKeysPerChunk,
                                    .dim_padding = kLanePadding,
                                    .scratch_bytes = HWY_STATIC_DISPATCH(scratch_bytes)};

}  // namespace

Status supports_flash_attention(const AttentionProblem& problem) {
  POLYOP_RETURN_IF_ERROR(check_plain_softmax(problem));
  if (problem.tree_mask.words != nullptr) return unsupported("it takes no tree_mask");
  return check_query_dtype(problem);
}

int64_t flash_attention_workspace_bytes(const AttentionProblem& problem) {
  return FlashPlan(problem, kPlanShape).workspace_bytes();
}

Status flash_attention(const AttentionProblem& problem, Workspace workspace, Stream) {
  return run_flash_plan(problem, kPlanShape, workspace, HWY_DYNAMIC_DISPATCH(run_task),
                        HWY_DYNAMIC_DISPATCH(merge_split));
}

}  // namespace polyop::cpu
#endif  // HWY_ONCE
