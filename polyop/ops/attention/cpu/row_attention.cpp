// row_attention: attention by whole rows of scores, in f32 on all CPU threads: what needs the final weight of every key
// before any value is read, or looks at single keys.
// Math      s = scale q k^T (+ mask), w = softmax(s) or s, w' = quantized w, out = sum of w' v over the visible keys
// Shapes    q [T, Hq, D] or [B, S, Hq, D] · k, v paged, packed or padded · mask [B|1, Hq|1, S|1, L|1];
//           f32, f16, bf16, k, v also f8e4m3, i8 with scales, out also f8e4m3
// Layout    innermost axis dense, other strides free
// Work      task = some rows (query row x head of one kv head) x all their keys; as many rows as keep their scores in
//           kScoreBytes
// Memory    k and v are widened once per task and tile of 64 keys; scores (rows, Lmax) stay in the scratch of a thread
// Roofline  f32 multiply-add; the mask costs one load and select a score, quantization one division a weight
// Numerics  all sums f32; w is rounded to f32 before it is quantized, w' = dequantized value in f32; a row's bits
// depend
//           on its own q, keys, mask and the SIMD target only. A hidden key's k and v never reach the result, NaN
//           included
// Limits    see supports_row_attention
// Scalable vectors cannot be kept in arrays, and those machines have NEON too.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/ops/attention/cpu/row_attention.cpp"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
//
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cpu/flash_plan.h"
#include "polyop/ops/attention/cpu/flash_tiles-inl.h"
#include "polyop/ops/attention/cpu/row_plan.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// One task at work.
struct RowRun {
  const AttentionProblem& problem;
  const RowTask& task;
  const RowScratch& scratch;
  const RowPlan& plan;
  IndexRange keys;  // union of the rows' visible keys

  [[nodiscard]] int64_t num_rows() const { return task.row_end - task.row_begin; }
  [[nodiscard]] int64_t query_row(int64_t r) const { return (task.row_begin + r) / problem.group_size(); }
  [[nodiscard]] int64_t query_head(int64_t r) const {
    const int64_t group = problem.group_size();
    return task.kv_head * group + (task.row_begin + r) % group;
  }
  [[nodiscard]] IndexRange keys_of_row(int64_t r) const {
    const IndexRange range = problem.visible_keys(task.sequence, query_row(r));
    return range.size() > 0 ? range : IndexRange{};
  }
  /// Union of the ranges of rows [r, r + count).
  [[nodiscard]] IndexRange keys_of_rows(int64_t r, int64_t count) const {
    IndexRange joint = keys_of_row(r);
    for (int64_t i = r + 1; i < r + count; ++i) {
      const IndexRange range = keys_of_row(i);
      if (range.size() == 0) continue;
      joint =
          joint.size() == 0 ? range : IndexRange{std::min(joint.begin, range.begin), std::max(joint.end, range.end)};
    }
    return joint;
  }
  [[nodiscard]] float* scores_of(int64_t r) const { return scratch.scores + r * plan.padded_keys; }
};

bool has_softmax(const AttentionProblem& problem) { return problem.normalization == AttentionNormalization::kSoftmax; }

// Scores are kept in the base of the exponential that reads them: 2 for softmax.
float score_unit(const AttentionProblem& problem) {
  return has_softmax(problem) ? static_cast<float>(std::numbers::log2e) : 1.0f;
}

// to[i] = from[i] * factor rounded to T, as f32, for i < count; then zeros up to a whole vector.
template <class T>
void widen_rounded(const T* from, size_t count, float factor, float* to) {
  const F32 d;
  const F32Vec factors = hn::Set(d, factor);
  HWY_ALIGN T rounded[kLanes];
  for (size_t i = 0; i < count; i += kLanes) {
    const size_t lanes = std::min(kLanes, count - i);
    const F32Vec value = lanes == kLanes ? load_f32(d, from + i) : load_f32_n(d, from + i, lanes);
    store_f32(d, hn::Mul(value, factors), rounded);
    hn::StoreU(load_f32(d, rounded), d, to + i);
  }
}

void widen_operand(const AttentionProblem& problem, DType dtype, const std::byte* from, float* to) {
  const auto count = static_cast<size_t>(problem.head_dim);
  const float factor = problem.operand_scale;
  if (factor == 1.0f) return widen_row(dtype, from, count, 1.0f, to);
  switch (dtype) {
    case DType::kF16:
      return widen_rounded(reinterpret_cast<const F16*>(from), count, factor, to);
    case DType::kBF16:
      return widen_rounded(reinterpret_cast<const BF16*>(from), count, factor, to);
    default:
      return widen_rounded(reinterpret_cast<const float*>(from), count, factor, to);
  }
}

void load_queries(const RowRun& run) {
  const AttentionProblem& problem = run.problem;
  const F32 d;
  const F32Vec unit = hn::Set(
      d, static_cast<float>(static_cast<double>(score_factor(problem, run.task.kv_head)) * score_unit(problem)));
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    float* to = run.scratch.q + r * run.plan.padded_dim;
    widen_operand(problem, problem.q.dtype,
                  problem.row_address(problem.q, run.task.sequence, run.query_row(r), run.query_head(r)), to);
    for (int64_t i = 0; i < problem.head_dim; i += kLanes) hn::StoreU(hn::Mul(hn::LoadU(d, to + i), unit), d, to + i);
  }
}

// ---- scores

void score_tile(const RowRun& run, int64_t tile) {
  const AttentionProblem& problem = run.problem;
  const RowScratch& scratch = run.scratch;
  const int64_t begin = std::max(run.keys.begin, tile);
  const int64_t end = std::min(run.keys.end, tile + kKeysPerTile);
  const std::byte* addresses[kKeysPerTile];
  list_key_addresses(problem, problem.k, run.task.sequence, run.task.kv_head, begin, end, addresses);
  const std::byte* rows[kKeysPerTile];
  // Columns outside [begin, end) hold zeros: those keys may lie outside of every page.
  for (int64_t j = 0; j < kKeysPerTile; ++j) rows[j] = reinterpret_cast<const std::byte*>(scratch.zero_row);
  for (int64_t j = begin; j < end; ++j) {
    float* to = scratch.kv_rows + (j - tile) * run.plan.padded_dim;
    widen_operand(problem, problem.k.dtype, addresses[j - begin], to);
    rows[j - tile] = reinterpret_cast<const std::byte*>(to);
  }
  const auto columns = static_cast<size_t>((end - tile + int64_t{kLanes} - 1) / int64_t{kLanes} * int64_t{kLanes});
  transpose_keys(DType::kF32, rows, columns, problem.head_dim, scratch.k_tile);
  const float* k_tile = scratch.k_tile;
  for (int64_t r = 0; r < run.num_rows(); r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, run.num_rows() - r);
    const IndexRange joint = run.keys_of_rows(r, count);
    const int64_t needed = std::min(joint.end, tile + kKeysPerTile) - tile;
    if (needed <= 0 || joint.begin >= tile + kKeysPerTile) continue;
    multiply<true>(
        count, scratch.q + r * run.plan.padded_dim, run.plan.padded_dim, 0, problem.head_dim,
        [k_tile](size_t i) HWY_ATTR { return k_tile + i * kKeysPerTile; }, run.scores_of(r) + tile,
        run.plan.padded_keys, needed);
  }
}

bool sees(const RowRun& run, int64_t r, int64_t key) {
  const AttentionProblem& problem = run.problem;
  const IndexRange range = run.keys_of_row(r);
  if (key < range.begin || key >= range.end) return false;
  if (!problem.tree_allows(run.task.sequence, run.query_row(r), key)) return false;
  if (problem.mask.data == nullptr) return true;
  const int64_t at = problem.mask.offset(run.task.sequence, run.query_head(r), run.query_row(r), key);
  switch (problem.mask.dtype) {
    case DType::kBool:
      return static_cast<const uint8_t*>(problem.mask.data)[at] != 0;
    case DType::kF16:
      return static_cast<const F16*>(problem.mask.data)[at].bits != 0xfc00u;
    case DType::kBF16:
      return static_cast<const BF16*>(problem.mask.data)[at].bits != 0xff80u;
    default:
      return static_cast<const float*>(problem.mask.data)[at] != -std::numeric_limits<float>::infinity();
  }
}

// scores[key] += unit * bias(key) for the keys of the row; a hidden key gets `hidden`.
template <class T>
void add_bias(const RowRun& run, int64_t r, IndexRange keys, float hidden) {
  const AttentionMask& mask = run.problem.mask;
  const T* bias =
      static_cast<const T*>(mask.data) + mask.offset(run.task.sequence, run.query_head(r), run.query_row(r), 0);
  const float unit = score_unit(run.problem);
  float* scores = run.scores_of(r);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const float value = to_float(bias[key * mask.key_stride]);
    scores[key] = value == -std::numeric_limits<float>::infinity() ? hidden : scores[key] + unit * value;
  }
}

// Mask and tree bits of one row. A hidden key gets the score whose weight is 0.
void hide_keys(const RowRun& run, int64_t r, IndexRange keys) {
  const AttentionProblem& problem = run.problem;
  const float hidden = has_softmax(problem) ? -std::numeric_limits<float>::infinity() : 0.0f;
  float* scores = run.scores_of(r);
  if (problem.mask.data != nullptr) {
    switch (problem.mask.dtype) {
      case DType::kBool: {
        const auto* mask = static_cast<const uint8_t*>(problem.mask.data) +
                           problem.mask.offset(run.task.sequence, run.query_head(r), run.query_row(r), 0);
        for (int64_t key = keys.begin; key < keys.end; ++key) {
          scores[key] = mask[key * problem.mask.key_stride] != 0 ? scores[key] : hidden;
        }
        break;
      }
      case DType::kF16:
        add_bias<F16>(run, r, keys, hidden);
        break;
      case DType::kBF16:
        add_bias<BF16>(run, r, keys, hidden);
        break;
      default:
        add_bias<float>(run, r, keys, hidden);
        break;
    }
  }
  if (problem.tree_mask.words == nullptr) return;
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    if (!problem.tree_allows(run.task.sequence, run.query_row(r), key)) scores[key] = hidden;
  }
}

// ---- weights

// The steps of a quantized weight as f32: nearest even, saturated; NaN stays NaN.
HWY_INLINE F32Vec to_steps(AttentionWeightQuantization quantization, F32Vec x) {
  const F32 d;
  if (quantization == AttentionWeightQuantization::kInt8) {
    const F32Vec clamped = hn::Min(hn::Max(x, hn::Set(d, -128.0f)), hn::Set(d, 127.0f));
    return hn::IfThenElse(hn::IsNaN(x), x, hn::Round(clamped));
  }
  const hn::RebindToUnsigned<F32> du;
  const F32Vec magnitude = hn::Min(hn::Abs(x), hn::Set(d, F8E4M3::kMax));
  // Below 2^-6 the steps are 2^-9, the distance of f32 numbers from 2^14 on.
  const F32Vec shifter = hn::Set(d, 0x1p14f);
  const F32Vec subnormal = hn::Sub(hn::Add(magnitude, shifter), shifter);
  // Otherwise 20 of the 23 mantissa bits are rounded away.
  const auto bits = hn::BitCast(du, magnitude);
  const auto odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1u));
  const auto rounded = hn::And(hn::Add(hn::Add(bits, hn::Set(du, 0x7ffffu)), odd), hn::Set(du, 0xfff00000u));
  const F32Vec normal = hn::BitCast(d, rounded);
  const F32Vec steps = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0x1p-6f)), subnormal, normal);
  return hn::IfThenElse(hn::IsNaN(x), x, hn::CopySign(steps, x));
}

// weights[i] = dequantized weights[i] * factor / divisor for i in [begin, end), whole vectors.
void finish_weights(const AttentionProblem& problem, float* weights, int64_t begin, int64_t end, float factor,
                    float divisor) {
  const F32 d;
  const F32Vec factors = hn::Set(d, factor);
  const F32Vec divisors = hn::Set(d, divisor);
  const int64_t first = begin / int64_t{kLanes} * int64_t{kLanes};
  if (problem.weight_quantization == AttentionWeightQuantization::kNone) {
    for (int64_t i = first; i < end; i += kLanes) {
      hn::StoreU(hn::Div(hn::Mul(hn::LoadU(d, weights + i), factors), divisors), d, weights + i);
    }
    return;
  }
  const F32Vec scales =
      hn::Set(d, problem.weight_scale != nullptr ? *problem.weight_scale : problem.weight_scale_value);
  for (int64_t i = first; i < end; i += kLanes) {
    const F32Vec weight = hn::Div(hn::Mul(hn::LoadU(d, weights + i), factors), divisors);
    const F32Vec steps = to_steps(problem.weight_quantization, hn::Div(weight, scales));
    hn::StoreU(hn::Mul(steps, scales), d, weights + i);
  }
}

void write_lse(const RowRun& run, int64_t r, float value) {
  const AttentionProblem& problem = run.problem;
  if (problem.lse.data == nullptr) return;
  *reinterpret_cast<float*>(problem.row_address(problem.lse, run.task.sequence, run.query_row(r), run.query_head(r))) =
      value;
}

// Turns the scores of row r into weights; those of other keys in `joint` become 0.
void weigh_row(const RowRun& run, int64_t r, IndexRange joint) {
  const AttentionProblem& problem = run.problem;
  const IndexRange keys = run.keys_of_row(r);
  float* scores = run.scores_of(r);
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  if (keys.size() == 0) {
    std::fill(scores + joint.begin, scores + joint.end, 0.0f);
    return write_lse(run, r, minus_infinity);
  }
  hide_keys(run, r, keys);
  float lse = minus_infinity;
  if (has_softmax(problem)) {
    float max = 0.0f;
    float sum = 0.0f;
    softmax_chunk(scores, keys.begin, keys.end, &max, &sum);
    if (sum == 0.0f) {
      std::fill(scores + joint.begin, scores + joint.end, 0.0f);
      return write_lse(run, r, minus_infinity);
    }
    float factor = 1.0f;
    if (problem.sinks != nullptr) {
      const float sink = problem.sinks[run.query_head(r)] * static_cast<float>(std::numbers::log2e);
      const float joint_max = std::max(max, sink);
      factor = exp2_of(max - joint_max);
      sum = sum * factor + exp2_of(sink - joint_max);
      max = joint_max;
    }
    lse = static_cast<float>((static_cast<double>(max) + std::log2(static_cast<double>(sum))) * std::numbers::ln2);
    finish_weights(problem, scores, keys.begin, keys.end, factor, sum);
  } else if (problem.weight_quantization != AttentionWeightQuantization::kNone) {
    finish_weights(problem, scores, keys.begin, keys.end, 1.0f, 1.0f);
  }
  write_lse(run, r, lse);
  std::fill(scores + std::min(joint.begin, keys.begin), scores + keys.begin, 0.0f);
  std::fill(scores + keys.end, scores + std::max(joint.end, keys.end), 0.0f);
}

// ---- output

bool is_finite(const float* row, size_t width) {
  const F32 d;
  const F32Vec zero = hn::Zero(d);
  F32Vec sum = zero;  // zero times infinity or NaN is NaN
  for (size_t i = 0; i < width; i += kLanes) sum = hn::MulAdd(hn::LoadU(d, row + i), zero, sum);
  return hn::AllTrue(d, hn::Eq(sum, zero));
}

// out(r) += sum over the keys j of the tile of w(r, j) v_j, j ascending.
void accumulate_tile(const RowRun& run, int64_t tile) {
  const AttentionProblem& problem = run.problem;
  const RowScratch& scratch = run.scratch;
  const int64_t begin = std::max(run.keys.begin, tile);
  const int64_t end = std::min(run.keys.end, tile + kKeysPerTile);
  const std::byte* addresses[kKeysPerTile];
  list_key_addresses(problem, problem.v, run.task.sequence, run.task.kv_head, begin, end, addresses);
  bool all_finite = true;
  for (int64_t j = begin; j < end; ++j) {
    float* to = scratch.kv_rows + (j - begin) * run.plan.padded_dim;
    widen_row(problem.v.dtype, addresses[j - begin], problem.value_head_dim, 1.0f, to);
    all_finite = all_finite && is_finite(to, problem.value_head_dim);
  }
  const float* v = scratch.kv_rows;
  const int64_t v_stride = run.plan.padded_dim;
  const auto accumulate = [&](int64_t r, int64_t count, int64_t key_begin, int64_t key_end) HWY_ATTR {
    multiply<false>(
        count, run.scores_of(r), run.plan.padded_keys, key_begin, key_end,
        [=](size_t j) HWY_ATTR { return v + (static_cast<int64_t>(j) - begin) * v_stride; },
        scratch.out + r * run.plan.padded_dim, run.plan.padded_dim, problem.value_head_dim);
  };
  for (int64_t r = 0; r < run.num_rows(); r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, run.num_rows() - r);
    const IndexRange joint = run.keys_of_rows(r, count);
    const int64_t first = std::max(joint.begin, begin);
    const int64_t last = std::min(joint.end, end);
    if (first >= last) continue;
    if (all_finite) {
      accumulate(r, count, first, last);  // a hidden key has weight 0: it adds nothing
      continue;
    }
    for (int64_t row = r; row < r + count; ++row) {
      for (int64_t key = first; key < last; ++key) {
        if (sees(run, row, key)) accumulate(row, 1, key, key + 1);
      }
    }
  }
}

void run_task(const AttentionProblem& problem, const RowPlan& plan, const RowTask& task, int thread) {
  const RowScratch scratch = plan.scratch_of(thread);
  RowRun run{problem, task, scratch, plan, {}};
  run.keys = run.keys_of_rows(0, run.num_rows());
  std::fill_n(scratch.zero_row, plan.padded_dim, 0.0f);
  std::fill_n(scratch.out, run.num_rows() * plan.padded_dim, 0.0f);
  load_queries(run);
  const int64_t first_tile = run.keys.begin / kKeysPerTile * kKeysPerTile;
  for (int64_t tile = first_tile; tile < run.keys.end; tile += kKeysPerTile) score_tile(run, tile);
  for (int64_t r = 0; r < run.num_rows(); r += kTileRows) {
    const int64_t count = std::min<int64_t>(kTileRows, run.num_rows() - r);
    const IndexRange joint = run.keys_of_rows(r, count);
    for (int64_t i = r; i < r + count; ++i) weigh_row(run, i, joint);
  }
  for (int64_t tile = first_tile; tile < run.keys.end; tile += kKeysPerTile) accumulate_tile(run, tile);
  for (int64_t r = 0; r < run.num_rows(); ++r) {
    narrow_row(problem.out.dtype, scratch.out + r * plan.padded_dim, problem.value_head_dim,
               value_factor(problem, task.kv_head),
               problem.row_address(problem.out, task.sequence, run.query_row(r), run.query_head(r)));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace polyop::cpu {
namespace {

HWY_EXPORT(run_task);

}  // namespace

Status supports_row_attention(const AttentionProblem& problem) { return check_query_dtype(problem); }

int64_t row_attention_workspace_bytes(const AttentionProblem& problem) { return RowPlan(problem).workspace_bytes(); }

Status row_attention(const AttentionProblem& problem, Workspace workspace, Stream) {
  RowPlan plan(problem);
  POLYOP_RETURN_IF_ERROR(check_workspace(plan.workspace_bytes(), workspace));
  plan.build(problem, workspace);
  clear_rows_without_sequence(problem);
  ThreadPool::shared().parallel_for(static_cast<int64_t>(plan.tasks.size()), [&](int64_t task, int thread) {
    HWY_DYNAMIC_DISPATCH(run_task)(problem, plan, plan.tasks[task], thread);
  });
  return Status::ok();
}

}  // namespace polyop::cpu
#endif  // HWY_ONCE
