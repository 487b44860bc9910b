// amx_attention: flash attention on AMX tiles over keys and values that are exact in bf16, as accurate as f32.
// Math      as flash_attention, per chunk of 256 keys. A query of f16 or f32 is two or three bf16 pieces, exactly; a
//           weight is rounded to two (16 significant bits) when out has 16 bits or less, else it is three (exact)
// Shapes    q [T, Hq, D] or [B, S, Hq, D] · k, v paged [P, R, Hkv, D|Dv], packed [Tkv, Hkv, D|Dv] or padded
//           [B, Lmax, Hkv, D|Dv] · lse [T, Hq] or [B, S, Hq]; k, v bf16, or f8e4m3, i8 with scales; q, out f32,
//           f16 or bf16, out f8e4m3 too
// Layout    innermost axis dense, other strides free
// Work      as flash_attention, by the same plan; products of 32 rows x 32 keys and 32 rows x 32 values
// Memory    a chunk's values are interleaved in pairs once per task. More than 16 rows: its keys are transposed to
//           words; scores and weights of 32 rows stay in L1. Up to 16: keys are the left operand, from the cache itself
// Roofline  prefill: D + 2 Dv products a score at 1024 a cycle against about 20 vector instructions for its weight:
//           bound by the vector units up to D = 64, by both at 128 · decode: reading k and v
// Numerics  products exact, sums f32; a row's bits depend on its own q and keys only, and are the same in prefill and
//           decode: which operand stands on the left changes nothing. Queries and values with infinities or NaN are
//           multiplied in f32 apart. Subnormal bf16 numbers count as 0
// Limits    softmax without dense mask or quantized weights; machines with AMX-BF16. f16 and f32 keys would need two
//           and three pieces, which cost more than the tiles save: flash_attention takes them
#include "polyop/cpu/amx.h"
#if POLYOP_AMX
#include "polyop/cpu/avx512_target.h"
//
#include <hwy/highway.h>
#endif

#include <algorithm>
#include <limits>
#include <numbers>
#include <string>

#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cpu/flash_plan.h"

#if POLYOP_AMX

#include "polyop/ops/attention/cpu/amx_engine-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// ---- scores

void AmxEngine::score_many_rows(const TaskRun& run, const RowBlock& rows) const {
  const int64_t blocks = round_up_to_depth(run.problem.head_dim) / kAmxDepth;
  const int64_t row_bytes = run.padded_dim * static_cast<int64_t>(sizeof(uint16_t));
  AmxOperand q{.tiles = {},
               .row_bytes = row_bytes,
               .piece_bytes = q_piece_stride_ * static_cast<int64_t>(sizeof(uint16_t)),
               .depth_bytes = kAmxDepth * sizeof(uint16_t)};
  q.set_tiles(scratch_.q + rows.begin * run.padded_dim, kAmxRows * row_bytes);
  AmxOperand k{.tiles = {},
               .row_bytes = kAmxRows * sizeof(uint32_t),
               .piece_bytes = 0,
               .depth_bytes = kAmxDepth / 2 * kAmxRows * sizeof(uint32_t)};
  const int64_t tile_words = kAmxRows * run.padded_dim / 2;
  const IndexRange keys = rows.padded_keys();
  for (int64_t j = keys.begin; j < keys.end; j += kAmxDepth) {
    k.set_tiles(scratch_.k_words + j / kAmxRows * tile_words, tile_words * static_cast<int64_t>(sizeof(uint32_t)));
    if (rows.count > kAmxRows) {
      multiply_by_two<2>(q, k, precision_.query, blocks, scratch_.scores + j, kScoreStride);
    } else {
      multiply_by_two<1>(q, k, precision_.query, blocks, scratch_.scores + j, kScoreStride);
    }
  }
}

void AmxEngine::score_few_rows(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const {
  const AttentionProblem& problem = run.problem;
  const int64_t dim = round_up_to_depth(problem.head_dim);
  const int64_t cache_row_bytes = problem.k.row_stride * dtype_bytes(problem.k.dtype);
  // Sixteen keys of a page, or of a cache without pages, lie one row stride apart.
  const bool is_regular = problem.kv_form != AttentionKvForm::kPaged || problem.page_size % kAmxRows == 0;
  AmxOperand q{.tiles = {},
               .row_bytes = kFewRows * sizeof(uint32_t),
               .piece_bytes = run.padded_dim / 2 * kFewRows * static_cast<int64_t>(sizeof(uint32_t)),
               .depth_bytes = kAmxDepth / 2 * kFewRows * sizeof(uint32_t)};
  q.set_tiles(scratch_.q_words, 0);
  for (int64_t tile = rows.keys.begin / kKeysPerTile * kKeysPerTile; tile < rows.keys.end; tile += kKeysPerTile) {
    prefetch_after_tile(run, problem.k, problem.head_dim, chunk_begin + tile);
    TileRows gathered;
    gather(run, problem.k, problem.head_dim, chunk_begin, tile, &gathered);
    AmxOperand k{.tiles = {},
                 .row_bytes = run.padded_dim * static_cast<int64_t>(sizeof(uint16_t)),
                 .piece_bytes = 0,
                 .depth_bytes = kAmxDepth * sizeof(uint16_t)};
    const bool is_whole = rows.keys.begin <= tile && tile + kKeysPerTile <= rows.keys.end;
    if (gathered.in_cache && is_regular && is_whole) {
      k.row_bytes = cache_row_bytes;
      for (int64_t i = 0; i < 4; ++i) k.tiles[i] = gathered.rows[i * kAmxRows];
    } else {
      for (int64_t j = 0; j < kKeysPerTile; ++j) {
        uint16_t* row = scratch_.kv_rows + j * run.padded_dim;
        const auto* from = reinterpret_cast<const uint16_t*>(gathered.rows[j]);
        if (from != row) copy_row(from, dim, row);
      }
      k.set_tiles(scratch_.kv_rows, kAmxRows * k.row_bytes);
    }
    multiply_four(k, q, precision_.query, dim / kAmxDepth, scratch_.key_scores, kFewRows);
    for (int64_t j = 0; j < kKeysPerTile; j += kAmxRows) {
      const F32 d;
      const std::byte* from[kAmxRows];
      for (int64_t i = 0; i < kAmxRows; ++i) {
        from[i] = reinterpret_cast<const std::byte*>(scratch_.key_scores + (j + i) * kFewRows);
      }
      for (int64_t r = 0; r < rows.count; r += 4) {
        transpose_words(d, from, r * sizeof(float), [&](size_t c, auto scores) HWY_ATTR {
          hn::StoreU(scores, d, scratch_.scores + (r + c) * kScoreStride + tile + j);
        });
      }
    }
  }
}

// Scores of queries that have no pieces, in f32, depths ascending.
void AmxEngine::score_specials(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const {
  const AttentionProblem& problem = run.problem;
  const int64_t dim = problem.head_dim;
  float* q = scratch_.wide_rows;
  float* k = scratch_.wide_rows + run.padded_dim;
  for (int64_t s = 0; s < special_queries_.count; ++s) {
    const int64_t r = special_queries_.entries[s].index;
    if (r < rows.begin || r >= rows.begin + rows.count) continue;
    widen_row(problem.q.dtype, query_address(run, r), dim, 1.0f, q);
    for (int64_t key = rows.keys.begin; key < rows.keys.end; ++key) {
      widen_row(problem.k.dtype, problem.key_address(problem.k, run.task.sequence, chunk_begin + key, run.task.kv_head),
                dim, 1.0f, k);
      float sum = 0.0f;
      for (int64_t i = 0; i < dim; ++i) sum += q[i] * k[i];
      scratch_.scores[(r - rows.begin) * kScoreStride + key] = sum;
    }
  }
}

// ---- weights

// Turns the scores of a row into logits, those of keys that its tree bits hide into -inf.
void AmxEngine::hide_by_tree(const TaskRun& run, int64_t r, IndexRange keys, int64_t chunk_begin, float factor,
                             float* scores) {
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const bool is_visible = run.problem.tree_allows(run.task.sequence, run.query_row(r), chunk_begin + key);
    scores[key] = is_visible ? scores[key] * factor : -std::numeric_limits<float>::infinity();
  }
}

void AmxEngine::weigh_rows(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const {
  const double scale = score_factor(run.problem, run.task.kv_head);
  const bool has_tree = run.problem.tree_mask.words != nullptr;
  const auto to_logits = static_cast<float>(scale * std::numbers::log2e);
  const float factor = has_tree ? 1.0f : to_logits;
  constexpr auto kPieceStride = static_cast<size_t>(kRowBlock * kWeightStride);
  for (int64_t i = 0; i < rows.count; ++i) {
    const IndexRange keys = run.keys_of_row(rows.begin + i, chunk_begin, chunk_begin + kKeysPerChunk);
    float* scores = scratch_.scores + i * kScoreStride;
    if (has_tree) hide_by_tree(run, rows.begin + i, keys, chunk_begin, to_logits, scores);
    uint16_t* weights = scratch_.weights + i * kWeightStride;
    float* max = run.state.chunk_max + i;
    float* sum = run.state.chunk_sum + i;
    if (precision_.weight == 3) {
      weigh_chunk<3>(scores, factor, keys, rows.padded_keys(), weights, kPieceStride, max, sum);
    } else {
      weigh_chunk<2>(scores, factor, keys, rows.padded_keys(), weights, kPieceStride, max, sum);
    }
  }
}

// ---- output

// chunk_out = weights * values; a hidden key has weight zero.
void AmxEngine::accumulate_many_rows(const TaskRun& run, const RowBlock& rows) const {
  const int64_t dim = round_up_to_depth(run.problem.value_head_dim);
  const IndexRange keys = rows.padded_keys();
  AmxOperand weights = weight_operand(keys.begin);
  AmxOperand v{.tiles = {},
               .row_bytes = kAmxRows * sizeof(uint32_t),
               .piece_bytes = 0,
               .depth_bytes = kAmxDepth / 2 * kAmxRows * sizeof(uint32_t)};
  for (int64_t column = 0; column < dim; column += 2 * kAmxRows) {
    v.set_tiles(scratch_.v_pairs + column / kAmxRows * kPairTileStride + keys.begin / 2 * kAmxRows,
                kPairTileStride * sizeof(uint32_t));
    float* sums = run.state.chunk_out + column;
    if (rows.count > kAmxRows) {
      multiply_by_two<2>(weights, v, precision_.weight, keys.size() / kAmxDepth, sums, run.padded_dim);
    } else {
      multiply_by_two<1>(weights, v, precision_.weight, keys.size() / kAmxDepth, sums, run.padded_dim);
    }
  }
  for (int64_t i = 0; i < rows.count; ++i) restore_columns(run.state.chunk_out + i * run.padded_dim, dim);
}

// The same for one tile of rows: the sums of kValueColumns columns stay in tiles while their values pass through a
// small block, which is still in L1 when the tiles read it.
void AmxEngine::accumulate_few_rows(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) {
  const AttentionProblem& problem = run.problem;
  const int64_t dim = round_up_to_depth(problem.value_head_dim);
  const IndexRange keys = rows.padded_keys();
  const AmxOperand weights = weight_operand(keys.begin);
  for (int64_t column = 0; column < dim; column += kValueColumns) {
    const int64_t width = std::min(kValueColumns, dim - column);
    zero_sums<4>();
    for (int64_t tile = keys.begin / kKeysPerTile * kKeysPerTile; tile < keys.end; tile += kKeysPerTile) {
      if (column == 0) prefetch_after_tile(run, problem.v, problem.value_head_dim, chunk_begin + tile);
      TileRows gathered;
      gather(run, problem.v, problem.value_head_dim, chunk_begin, tile, &gathered);
      for (int64_t j = std::max(tile, keys.begin); j < std::min(tile + kKeysPerTile, keys.end); j += kAmxDepth) {
        const int64_t block = (j - keys.begin) / kAmxDepth;
        // Two blocks in turn: the next one is written while the tiles still read the last one.
        uint32_t* words = scratch_.v_block + block % 2 * (kAmxDepth / 2 * kValueColumns);
        for (int64_t i = 0; i < kAmxDepth; i += 2) {
          const std::byte* const* pair = gathered.rows + (j - tile) + i;
          const int64_t offset = column * static_cast<int64_t>(sizeof(uint16_t));
          pack_pair(pair[0] + offset, pair[1] + offset, j + i, column, width, words + i / 2 * kValueColumns, kAmxRows);
        }
        if (width == kValueColumns) {
          multiply_block<4>(weights, block, precision_.weight, words, kValueColumns);
        } else {
          multiply_block<2>(weights, block, precision_.weight, words, kValueColumns);
        }
      }
    }
    float* sums = run.state.chunk_out + column;
    if (width == kValueColumns) {
      store_sums<1, 4>(sums, run.padded_dim);
    } else {
      store_sums<1, 2>(sums, run.padded_dim);
    }
  }
  for (int64_t i = 0; i < rows.count; ++i) restore_columns(run.state.chunk_out + i * run.padded_dim, dim);
}

// Adds the values that have no place in a tile to the rows that see them.
void AmxEngine::accumulate_specials(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const {
  const AttentionProblem& problem = run.problem;
  for (int64_t s = 0; s < special_values_.count; ++s) {
    const auto [key, column_begin, column_end] = special_values_.entries[s];
    float* v = scratch_.wide_rows;
    widen_row(problem.v.dtype, problem.key_address(problem.v, run.task.sequence, chunk_begin + key, run.task.kv_head),
              problem.value_head_dim, 1.0f, v);
    for (int64_t i = 0; i < rows.count; ++i) {
      const IndexRange keys = run.keys_of_row(rows.begin + i, chunk_begin, chunk_begin + kKeysPerChunk);
      if (key < keys.begin || key >= keys.end) continue;
      if (!run.problem.tree_allows(run.task.sequence, run.query_row(rows.begin + i), chunk_begin + key)) continue;
      float weight = 0.0f;
      for (int p = precision_.weight - 1; p >= 0; --p) {
        weight += BF16{scratch_.weights[(p * kRowBlock + i) * kWeightStride + key]}.to_float();
      }
      float* out = run.state.chunk_out + i * run.padded_dim;
      for (int64_t d = column_begin; d < std::min(column_end, problem.value_head_dim); ++d) out[d] += weight * v[d];
    }
  }
}

void run_amx_task(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& task, int thread) {
  const AmxPrecision precision(problem);
  ScratchCutter memory(plan.scratch_of(thread));
  const AmxScratch scratch = take_scratch(memory, precision, plan.rows_per_task, plan.padded_dim);
  const AmxTiles tiles;
  AmxEngine engine(problem, scratch, precision, plan);
  run_flash_task(problem, plan, task, scratch.state, engine);
}

void merge_amx_split(const AttentionProblem& problem, const FlashPlan& plan, const FlashTask& group, int thread) {
  ScratchCutter memory(plan.scratch_of(thread));
  merge_flash_split(problem, plan, group,
                    take_scratch(memory, AmxPrecision(problem), plan.rows_per_task, plan.padded_dim).state);
}

int64_t amx_scratch_bytes(const AttentionProblem& problem, int64_t rows, int64_t padded_dim) {
  ScratchCutter counter;
  take_scratch(counter, AmxPrecision(problem), rows, padded_dim);
  return counter.bytes();
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

// From here on code for any processor: it runs before has_amx_bf16() has said yes.
namespace polyop::cpu {
namespace {

// Packing a chunk costs about as much as eight rows of it.
constexpr FlashPlanShape kPlanShape{.min_rows_per_task = HWY_NAMESPACE::kRowBlock,
                                    .max_rows_per_task = HWY_NAMESPACE::kMaxRows,
                                    .keys_per_chunk = HWY_NAMESPACE::kKeysPerChunk,
                                    .dim_padding = kAmxDepth,
                                    .scratch_bytes = HWY_NAMESPACE::amx_scratch_bytes};

}  // namespace

Status supports_amx_attention(const AttentionProblem& problem) {
  if (!has_amx_bf16()) return unsupported("this machine has no AMX-BF16");
  const DType dtype = problem.k.dtype;
  if (dtype != DType::kBF16 && dtype != DType::kF8E4M3 && dtype != DType::kI8) {
    return unsupported("k is " + std::string(dtype_name(dtype)) + ", wanted bf16, f8e4m3 or i8");
  }
  POLYOP_RETURN_IF_ERROR(check_plain_softmax(problem));
  return check_query_dtype(problem);
}

int64_t amx_attention_workspace_bytes(const AttentionProblem& problem) {
  return FlashPlan(problem, kPlanShape).workspace_bytes();
}

Status amx_attention(const AttentionProblem& problem, Workspace workspace, Stream) {
  return run_flash_plan(problem, kPlanShape, workspace, HWY_NAMESPACE::run_amx_task, HWY_NAMESPACE::merge_amx_split);
}

}  // namespace polyop::cpu

#else  // !POLYOP_AMX

namespace polyop::cpu {

Status supports_amx_attention(const AttentionProblem&) { return unsupported("this machine has no AMX-BF16"); }
int64_t amx_attention_workspace_bytes(const AttentionProblem&) { return 0; }
Status amx_attention(const AttentionProblem&, Workspace, Stream) { return internal_error("attention: AMX is missing"); }

}  // namespace polyop::cpu

#endif  // POLYOP_AMX
