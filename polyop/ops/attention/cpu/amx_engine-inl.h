// AmxEngine: one task of amx_attention. Here its scratch, its steps, and the operands of its products;
// amx_attention.cpp has the products and the softmax.
//
// Included once, by amx_attention.cpp.
#pragma once

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "polyop/ops/attention/cpu/amx_tiles-inl.h"
#include "polyop/ops/attention/cpu/flash_plan.h"
#include "polyop/ops/attention/cpu/flash_task-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// Keys of one softmax: the scores and weights of a block of rows stay in L1.
constexpr int64_t kKeysPerChunk = 256;
constexpr int64_t kRowBlock = 2 * kAmxRows;
// Up to this many rows keys are the left operand: one tile holds all queries.
constexpr int64_t kFewRows = kAmxRows;
// Rows of scores lie a line more than a power of two apart, which would put them into few sets of the cache.
constexpr int64_t kScoreStride = kKeysPerChunk + kAmxRows;
constexpr int64_t kWeightStride = kKeysPerChunk + kAmxDepth;
// Words from a tile of 16 columns of paired values to the next: the pairs of a chunk, and a line against aliasing.
constexpr int64_t kPairTileStride = (kKeysPerChunk / 2 + 1) * kAmxRows;
constexpr int64_t kMaxRows = 384;
static_assert(kKeysPerTile % kAmxDepth == 0 && kKeysPerTile == 4 * kAmxRows);

// Pieces of the left operands. Keys and values are single pieces.
struct AmxPrecision {
  int query;
  int weight;

  explicit AmxPrecision(const AttentionProblem& problem)
      : query(exact_pieces(problem.q.dtype)), weight(problem.out.dtype == DType::kF32 ? 3 : 2) {}
};

// Columns [begin, end) of key `index` of a chunk (values), or all of row `index` of a task (queries), that hold an
// infinity or NaN.
struct Special {
  int64_t index;
  int64_t begin;
  int64_t end;
};

// Columns of values that few rows multiply at a time: as many as four tiles of sums take.
constexpr int64_t kValueColumns = 4 * kAmxRows;

struct SpecialList {
  Special* entries;
  int64_t count;

  void add(const Special& special) { entries[count++] = special; }
};

// Scratch of one thread; Dp = padded_dim, a multiple of 32.
struct AmxScratch {
  uint16_t* q;               // (pieces, rows, Dp)
  uint32_t* q_words;         // (pieces, Dp / 2, 16): the right operand of few rows
  uint16_t* kv_rows;         // (kKeysPerTile, Dp) copies of keys or values that the tiles cannot read in place
  uint32_t* k_words;         // (kKeysPerChunk / 16, Dp / 2, 16): a tile is 1 KiB in a row
  uint32_t* v_pairs;         // (Dp / 16, kPairTileStride): a tile likewise; many rows
  uint32_t* v_block;         // (2, kAmxDepth / 2, kValueColumns), few rows
  float* key_scores;         // (kKeysPerTile, 16): scores of few rows, keys first
  float* scores;             // (kRowBlock, kScoreStride)
  uint16_t* weights;         // (pieces, kRowBlock, kWeightStride)
  float* wide_rows;          // (2, Dp) for rows that are multiplied apart
  uint16_t* zero_row;        // (Dp) zeros: stands in for keys that must not be read
  Special* special_queries;  // (rows)
  Special* special_values;   // (kKeysPerChunk, column blocks)
  FlashState state;
};

inline AmxScratch take_scratch(ScratchCutter& memory, const AmxPrecision& precision, int64_t rows, int64_t padded_dim) {
  AmxScratch scratch{};
  scratch.q = memory.take<uint16_t>(precision.query * rows * padded_dim);
  scratch.q_words = memory.take<uint32_t>(precision.query * padded_dim / 2 * kFewRows);
  scratch.kv_rows = memory.take<uint16_t>(kKeysPerTile * padded_dim);
  scratch.k_words = memory.take<uint32_t>(padded_dim / 2 * kKeysPerChunk);
  scratch.v_pairs = memory.take<uint32_t>(padded_dim / kAmxRows * kPairTileStride);
  scratch.v_block = memory.take<uint32_t>(kAmxDepth * kValueColumns);
  scratch.key_scores = memory.take<float>(kKeysPerTile * kFewRows);
  scratch.scores = memory.take<float>(kRowBlock * kScoreStride);
  scratch.weights = memory.take<uint16_t>(precision.weight * kRowBlock * kWeightStride);
  scratch.wide_rows = memory.take<float>(2 * padded_dim);
  scratch.zero_row = memory.take<uint16_t>(padded_dim);
  scratch.special_queries = memory.take<Special>(rows);
  scratch.special_values = memory.take<Special>(kKeysPerChunk * (padded_dim + kValueColumns - 1) / kValueColumns);
  scratch.state = take_flash_state(memory, kRowBlock, rows, padded_dim);
  return scratch;
}

// Rows [begin, begin + count) of a task, and the keys of a chunk that some of them see, relative to the chunk.
struct RowBlock {
  int64_t begin;
  int64_t count;
  IndexRange keys;

  // The keys in whole blocks of depths.
  [[nodiscard]] IndexRange padded_keys() const {
    return {keys.begin / kAmxDepth * kAmxDepth, round_up_to_depth(keys.end)};
  }
};

class AmxEngine {
 public:
  AmxEngine(const AttentionProblem& problem, const AmxScratch& scratch, const AmxPrecision& precision,
            const FlashPlan& plan)
      : scratch_(scratch),
        precision_(precision),
        bytes_(problem.k.dtype),
        q_piece_stride_(plan.rows_per_task * plan.padded_dim),
        special_queries_{scratch.special_queries, 0},
        special_values_{scratch.special_values, 0} {
    std::fill_n(scratch_.zero_row, plan.padded_dim, uint16_t{0});
  }

  void load_queries(const TaskRun& run);

  template <class Finish>
  void attend_chunk(const TaskRun& run, int64_t chunk, const Finish& finish) {
    const int64_t begin = chunk * kKeysPerChunk;
    special_values_.count = 0;
    if (!has_few_rows(run)) {
      pack_keys(run, begin);
      pack_values(run, begin);
    }
    for (int64_t r = 0; r < run.num_rows(); r += kRowBlock) {
      const int64_t count = std::min(kRowBlock, run.num_rows() - r);
      const RowBlock rows{r, count, keys_of_rows(run, r, count, begin, begin + kKeysPerChunk)};
      if (has_few_rows(run)) {
        score_few_rows(run, rows, begin);
      } else {
        score_many_rows(run, rows);
      }
      score_specials(run, rows, begin);
      weigh_rows(run, rows, begin);
      if (has_few_rows(run)) {
        accumulate_few_rows(run, rows, begin);
      } else {
        accumulate_many_rows(run, rows);
      }
      accumulate_specials(run, rows, begin);
      finish(r, count);
    }
  }

 private:
  // The rows of a tile of keys or values as bf16.
  struct TileRows {
    const std::byte* rows[kKeysPerTile];
    bool in_cache;  // they are the cache's own
  };

  static bool has_few_rows(const TaskRun& run) { return run.num_rows() <= kFewRows; }
  static const std::byte* query_address(const TaskRun& run, int64_t r) {
    return run.problem.row_address(run.problem.q, run.task.sequence, run.query_row(r), run.query_head(r));
  }
  // Keys of rows [r, r + count) in [begin, end), relative to begin, from the first one to the last one.
  static IndexRange keys_of_rows(const TaskRun& run, int64_t r, int64_t count, int64_t begin, int64_t end);
  // Keys of the chunk that some row of the task sees, relative to it.
  static IndexRange keys_of_chunk(const TaskRun& run, int64_t chunk_begin) {
    return {std::max(run.keys.begin - chunk_begin, int64_t{0}), std::min(run.keys.end - chunk_begin, kKeysPerChunk)};
  }

  // Weights of keys from `begin` of the chunk on.
  [[nodiscard]] AmxOperand weight_operand(int64_t begin) const {
    AmxOperand weights{.tiles = {},
                       .row_bytes = kWeightStride * sizeof(uint16_t),
                       .piece_bytes = kRowBlock * kWeightStride * sizeof(uint16_t),
                       .depth_bytes = kAmxDepth * sizeof(uint16_t)};
    weights.set_tiles(scratch_.weights + begin, kAmxRows * weights.row_bytes);
    return weights;
  }

  void gather(const TaskRun& run, const HeadRows& from, int64_t dim, int64_t chunk_begin, int64_t tile,
              TileRows* to) const;
  void pack_keys(const TaskRun& run, int64_t chunk_begin) const;
  void pack_values(const TaskRun& run, int64_t chunk_begin);
  void pack_pair(const std::byte* even, const std::byte* odd, int64_t key, int64_t column, int64_t width,
                 uint32_t* words, int64_t tile_stride);
  void score_many_rows(const TaskRun& run, const RowBlock& rows) const;
  void score_few_rows(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const;
  void score_specials(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const;
  static void hide_by_tree(const TaskRun& run, int64_t r, IndexRange keys, int64_t chunk_begin, float factor,
                           float* scores);
  void weigh_rows(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const;
  void accumulate_many_rows(const TaskRun& run, const RowBlock& rows) const;
  void accumulate_few_rows(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin);
  void accumulate_specials(const TaskRun& run, const RowBlock& rows, int64_t chunk_begin) const;

  const AmxScratch& scratch_;
  const AmxPrecision& precision_;
  ByteTable bytes_;  // for keys and values of one byte
  int64_t q_piece_stride_;
  SpecialList special_queries_;  // rows of the task
  SpecialList special_values_;   // keys of the chunk
};

inline IndexRange AmxEngine::keys_of_rows(const TaskRun& run, int64_t r, int64_t count, int64_t begin, int64_t end) {
  const IndexRange first = run.problem.visible_keys(run.task.sequence, run.query_row(r));
  const IndexRange last = run.problem.visible_keys(run.task.sequence, run.query_row(r + count - 1));
  const IndexRange joint{std::max(std::min(first.begin, last.begin), begin) - begin,
                         std::min(std::max(first.end, last.end), end) - begin};
  return joint.size() > 0 ? joint : IndexRange{};
}

// ---- operands

inline void AmxEngine::load_queries(const TaskRun& run) {
  const AttentionProblem& problem = run.problem;
  const int64_t dim = round_up_to_depth(problem.head_dim);
  special_queries_.count = 0;
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    const std::byte* from = query_address(run, r);
    uint16_t* to = scratch_.q + r * run.padded_dim;
    bool is_finite = true;  // one piece is the number itself
    switch (problem.q.dtype) {
      case DType::kF32:
        is_finite = split_row<3>(reinterpret_cast<const float*>(from), problem.head_dim, to, q_piece_stride_);
        break;
      case DType::kF16:
        is_finite = split_row<2>(reinterpret_cast<const F16*>(from), problem.head_dim, to, q_piece_stride_);
        break;
      default:
        copy_row(from, problem.head_dim, to);
        break;
    }
    if (is_finite) continue;
    for (int p = 0; p < precision_.query; ++p) std::fill_n(to + p * q_piece_stride_, dim, uint16_t{0});
    special_queries_.add({r, 0, problem.head_dim});
  }
  if (!has_few_rows(run)) return;
  for (int p = 0; p < precision_.query; ++p) {
    const std::byte* rows[kFewRows];
    for (int64_t r = 0; r < kFewRows; ++r) {
      const uint16_t* row = scratch_.q + p * q_piece_stride_ + r * run.padded_dim;
      rows[r] = reinterpret_cast<const std::byte*>(r < run.num_rows() ? row : scratch_.zero_row);
    }
    transpose_row_words(rows, dim, scratch_.q_words + p * run.padded_dim / 2 * kFewRows, kFewRows);
  }
}

// The rows of a tile; those that no query of the task sees are zero.
inline void AmxEngine::gather(const TaskRun& run, const HeadRows& from, int64_t dim, int64_t chunk_begin, int64_t tile,
                              TileRows* to) const {
  const IndexRange keys = keys_of_chunk(run, chunk_begin);
  const int64_t begin = std::max(keys.begin, tile) - tile;
  const int64_t end = std::min(keys.end, tile + kKeysPerTile) - tile;
  std::fill_n(to->rows, kKeysPerTile, reinterpret_cast<const std::byte*>(scratch_.zero_row));
  list_key_addresses(run.problem, from, run.task.sequence, run.task.kv_head, chunk_begin + tile + begin,
                     chunk_begin + tile + end, to->rows + begin);
  const bool has_bytes = dtype_bytes(from.dtype) == 1;
  to->in_cache = !has_bytes && dim % kAmxDepth == 0;
  if (to->in_cache) return;
  for (int64_t j = begin; j < end; ++j) {
    uint16_t* row = scratch_.kv_rows + j * run.padded_dim;
    if (has_bytes) {
      bytes_.widen_row(to->rows[j], dim, row);
    } else {
      copy_row(to->rows[j], dim, row);
    }
    to->rows[j] = reinterpret_cast<const std::byte*>(row);
  }
}

inline void AmxEngine::pack_keys(const TaskRun& run, int64_t chunk_begin) const {
  const int64_t dim = round_up_to_depth(run.problem.head_dim);
  const IndexRange keys = keys_of_chunk(run, chunk_begin);
  for (int64_t tile = keys.begin / kKeysPerTile * kKeysPerTile; tile < keys.end; tile += kKeysPerTile) {
    TileRows gathered;
    gather(run, run.problem.k, run.problem.head_dim, chunk_begin, tile, &gathered);
    for (int64_t j = 0; j < kKeysPerTile; j += kAmxRows) {
      transpose_row_words(gathered.rows + j, dim, scratch_.k_words + (tile + j) * run.padded_dim / 2, kAmxRows);
    }
  }
}

// Interleaves columns [column, column + width) of two values, keys `key` and `key` + 1 of the chunk. A weight of zero
// does not hide infinities and NaN: such rows are replaced by zeros and listed.
inline void AmxEngine::pack_pair(const std::byte* even, const std::byte* odd, int64_t key, int64_t column,
                                 int64_t width, uint32_t* words, int64_t tile_stride) {
  const uint16_t* rows[2] = {reinterpret_cast<const uint16_t*>(even), reinterpret_cast<const uint16_t*>(odd)};
  if (pair_rows(rows[0], rows[1], width, words, tile_stride)) return;
  for (int64_t i = 0; i < 2; ++i) {
    if (pair_rows(rows[i], scratch_.zero_row, width, words, tile_stride)) continue;
    special_values_.add({key + i, column, column + width});
    rows[i] = scratch_.zero_row;
  }
  pair_rows(rows[0], rows[1], width, words, tile_stride);
}

inline void AmxEngine::pack_values(const TaskRun& run, int64_t chunk_begin) {
  const int64_t dim = round_up_to_depth(run.problem.value_head_dim);
  const IndexRange keys = keys_of_chunk(run, chunk_begin);
  for (int64_t tile = keys.begin / kKeysPerTile * kKeysPerTile; tile < keys.end; tile += kKeysPerTile) {
    TileRows gathered;
    gather(run, run.problem.v, run.problem.value_head_dim, chunk_begin, tile, &gathered);
    for (int64_t j = 0; j < kKeysPerTile; j += 2) {
      pack_pair(gathered.rows[j], gathered.rows[j + 1], tile + j, 0, dim, scratch_.v_pairs + (tile + j) / 2 * kAmxRows,
                kPairTileStride);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();
