// int4_groupwise_gemm_amx: weights of 4 bits times activations of 16 or 32 bits, as integers on AMX tiles.
// Math      The x of a row and group become integers X = round(x 2^(b - e)), 2^e > max |x|, b = 26 for f32, 20 for 16
//           bits, and those digits of 7 bits: X = U 2^14 + L with |L| <= 2^13 in two balanced digits, U in one or two.
//           Tiles sum digit times weight over the group; the sums of L and of U are exact, as integers and as f32
//           numbers alike: 256 depths x 8 x 2^13 = 2^24. One rounding adds them (two if Kg <= 32: then one tile adds U
//           and the digits of L one after the other), one FMA with the group's scale adds that to the total.
// Shapes    x [M, K] · qweight [ceil(N/128) * ceil(K/64) * 8, 512] u8 · s [ceil(K/Kg), N] · out [M, N]
// Layout    one word of a fragment row is one column (two, 32 apart) x depths {2p, 2p+1, 2p+8, 2p+9}, p = word % 4. A
//           4 x 4 transposition of words gives each p its vector of 16 columns; then either VPMULTISHIFTQB picks bytes
//           and VPTERNLOG makes them 16 (q - 8), or a shift and VPERMW look up q - 8 in bf16. Both are what a right
//           tile wants; x is packed once a call in the same order of depths.
// Work      Up to two rows: digits and weights are bytes; all digits of all rows stand in one left tile, those of up to
// 4
//           groups below each other with zeros in the rows of the others, because storing a tile of sums costs as much
//           as multiplying one. Weights are widened to a ring in L1, two blocks ahead of their products: a tile whose
//           rows are stores in flight waits for all of them. More rows: digits and weights are bf16 numbers (digit
//           times its power of two), so that a tile adds up digits of different weight; 128 depths of 128 columns are
//           widened once for all rows, and each tile of out runs over them with its totals in registers. Task = 32 to
//           128 columns.
// Order     exact sums have no order. The rest, groups ascending, is the same for every M, cut and thread count.
// Memory    qweight once per call and 256 rows; digits of x M * K * 8 bytes (f32) or 6, 16 rows of bytes if few.
// Nothing
//           past K of x, past N of s and out is touched.
// Roofline  one row, 512 weights: 16 cycles to widen, 8 of product, 5 to join and scale; the SIMD kernel takes 60 in
//           all. Many rows, 16 x 16 x 32: 64 cycles of product (f32 x), 16 stores and as many FMAs for each group.
//           docs/performance_cpu.md has the rates.
// Numerics  error bound in README.md; deterministic. Rows with infinities, NaN or numbers of 2^100 are left to the SIMD
//           kernel.
// Limits    Kg a multiple of 16, at most 256; any N, K, M; AMX-INT8 and AMX-BF16 with AVX-512 · See ../README.md
#include <atomic>
#include <string>

#include "polyop/cpu/amx.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm_problem.h"

#if POLYOP_AMX
#include "polyop/cpu/avx512_target.h"
//
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_pass-inl.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_plan.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {
namespace {

// ---- few rows -------------------------------------------------------------------------------------------------------

// A fragment block of a unit and a span: the span's blocks run fastest, then the units, then the spans.
struct FewItem {
  const AmxPass& pass;
  int64_t first_unit, end_unit;
  AmxSpan span;
  int64_t span_index = 0;
  int64_t unit;
  int64_t block;
  const uint32_t* words;

  FewItem(const AmxPass& of_pass, int64_t first, int64_t end)
      : pass(of_pass),
        first_unit(first),
        end_unit(end),
        span(pass.plan, 0),
        unit(first),
        block(span.first_block),
        words(pass.words(unit, block)) {}

  void advance() {
    words += kBlockWords;
    if (++block < span.end_block) return;
    if (++unit == end_unit) {
      unit = first_unit;
      span = AmxSpan(pass.plan, ++span_index);
    }
    block = span.first_block;
    words = pass.words(unit, block);
  }
};

// Adds the part of a span that lies in one block, weights at `right`, to tiles 0 and 1.
HWY_INLINE void multiply_few(const AmxPlan& plan, const FewItem& item, const int8_t* left, const int8_t* right) {
  const auto add = [&](const int8_t* digits, ptrdiff_t row_bytes, const int8_t* weights) HWY_ATTR {
    tile_load<4>(digits, row_bytes);
    tile_load<6>(weights, kAmxRowBytes);
    tile_multiply_s8<0, 4, 6>();
    tile_load<7>(weights + kAmxBlockBytes, kAmxRowBytes);
    tile_multiply_s8<1, 4, 7>();
  };
  const int64_t depth = plan.segment_depth;
  if (depth == kFragmentDepth) {  // nearly always: Kg 16, 32, 64, 128, 256
    add(left + item.block * kAmxRows * kFragmentDepth, kAmxRowBytes, right);
    return;
  }
  const int64_t block_segments = kFragmentDepth / depth;
  const int64_t first = std::max(item.span.first_segment, item.block * block_segments);
  const int64_t end = std::min(item.span.end_segment, (item.block + 1) * block_segments);
  for (int64_t segment = first; segment < end; ++segment) {
    add(left + segment * plan.left_tile_bytes(), depth, right + (segment - item.block * block_segments) * depth * 16);
  }
}

// The sums [2, 16, 16] of a unit and a span into the unit's totals [2, kRows, 16].
template <int kDigits, int kRows, bool kChained, class S>
HWY_INLINE void scale_few(const AmxPass& pass, const AmxSpan& span, int64_t unit, const int32_t* HWY_RESTRICT sums,
                          float* HWY_RESTRICT totals) {
  const DF16 df;
  const int64_t stride = pass.problem.scales_row_stride;
  const S* scales = static_cast<const S*>(pass.problem.scales) + span.first_group * stride;
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t column = AmxPass::tile_column(unit, half);
    VF16 total[kRows];
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) total[row] = hn::Load(df, totals + row * kAmxVectorFloats);
    const int32_t* of_group = sums;
    const S* scales_of_group = scales;
    const float* factors = pass.workspace.factors + span.first_group * kAmxRows;
    for (int64_t group = span.first_group; group < span.end_group; ++group) {
      const VF16 scale = load_tile_scales(scales_of_group, column, pass.problem.n);
#pragma GCC unroll 2
      for (int row = 0; row < kRows; ++row) {
        total[row] = hn::MulAdd(join_digits<kDigits, kChained>(of_group, factors[row]), scale, total[row]);
        of_group += kDigits * kAmxVectorFloats;
      }
      scales_of_group += stride;
      factors += kAmxRows;
    }
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) hn::Store(total[row], df, totals + row * kAmxVectorFloats);
    totals += kRows * kAmxVectorFloats;
    sums += kAmxSumBytes / 4;
  }
}

template <int kDigits, int kRows, bool kChained, class S>
void run_few_units(const AmxPass& pass, int64_t first_unit, int64_t end_unit, const AmxWorkspace::Thread& scratch) {
  const AmxPlan& plan = pass.plan;
  constexpr int64_t unit_totals = 2 * kRows * kAmxVectorFloats;
  std::fill_n(scratch.totals, (end_unit - first_unit) * unit_totals, 0.0f);
  const int64_t spans = plan.spans();
  // A tile must not be loaded while its rows are on their way to memory: weights are widened kItemsAhead items before
  // they are multiplied, and sums are scaled when those of the next unit are ready to be stored.
  constexpr int64_t kItemsAhead = 2;
  constexpr int64_t kRing = 4;
  const auto ring = [&](int64_t item) { return scratch.blocks + item % kRing * 2 * kAmxBlockBytes; };
  FewItem widened(pass, first_unit, end_unit);
  int64_t num_widened = 0;
  const auto widen_next = [&] {
    if (widened.span_index == spans) return;
    int8_t* low = ring(num_widened++);
    widen_block(widened.words, low, low + kAmxBlockBytes);
    widened.advance();
  };
  for (int64_t i = 0; i < kItemsAhead; ++i) widen_next();
  FewItem item(pass, first_unit, end_unit);
  AmxSpan stored_span = item.span;
  int64_t stored_unit = -1;
  const auto scale_stored = [&] {
    if (stored_unit < 0) return;
    float* totals = scratch.totals + (stored_unit - first_unit) * unit_totals;
    scale_few<kDigits, kRows, kChained, S>(pass, stored_span, stored_unit, scratch.sums, totals);
  };
  for (int64_t index = 0; item.span_index < spans; ++index) {
    if (item.block == item.span.first_block) {
      tile_zero<0>();
      tile_zero<1>();
    }
    multiply_few(plan, item, pass.workspace.left, ring(index));
    if (item.block + 1 == item.span.end_block) {
      scale_stored();
      tile_store<0>(scratch.sums, kAmxRowBytes);
      tile_store<1>(scratch.sums + kAmxSumBytes / 4, kAmxRowBytes);
      stored_span = item.span;
      stored_unit = item.unit;
    }
    widen_next();
    item.advance();
  }
  scale_stored();
  pass.store(first_unit, end_unit, scratch.totals, plan.rows);
}

// ---- many rows ------------------------------------------------------------------------------------------------------

template <int kDigits, bool kChained>
void run_many_units(const AmxPass& pass, int64_t first_unit, int64_t end_unit, const AmxWorkspace::Thread& scratch) {
  constexpr int64_t kTileBytes = kAmxSpanBlocks * kAmxBf16BlockBytes;
  const AmxPlan& plan = pass.plan;
  const int64_t num_tiles = 2 * (end_unit - first_unit);
  const int64_t segment_bytes = plan.digits * plan.left_tile_bytes();
  // Many rows read x once for all units of the task; with few, weights had better be in L1 when they are multiplied.
  const int64_t widen_units = plan.tile_rows > 2 * kAmxRows ? end_unit - first_unit : 1;
  std::fill_n(scratch.totals, num_tiles * plan.tile_rows * kAmxVectorFloats, 0.0f);
  const auto widen = [&](const AmxSpan& span, int64_t unit, int8_t* low) {
    for (int64_t block = span.first_block; block < span.end_block; ++block, low += kAmxBf16BlockBytes) {
      widen_block_bf16(pass.words(unit, block), low, low + kTileBytes);
    }
  };
  // For the columns of tile `tile` of the task, whose weights lie at `right`, and up to 16 rows from `row` on.
  const auto add_tile = [&](const AmxSpan& span, int64_t tile, const int8_t* right, int64_t row) {
    const TileGroups groups{
        .left = pass.left_of_rows(row) + span.first_segment * segment_bytes,
        .right = right + (span.first_segment * plan.segment_depth - span.first_block * kFragmentDepth) * 32,
        .segment_depth = plan.segment_depth,
        .segment_bytes = segment_bytes,
        .groups = span.end_group - span.first_group,
        .group_segments = plan.span_segments / plan.span_groups,
        .segments = span.end_segment - span.first_segment,
        .scales = scratch.scales + tile * kAmxVectorFloats,
        .scales_stride = num_tiles * kAmxVectorFloats};
    float* totals = scratch.totals + (tile * plan.tile_rows + row) * kAmxVectorFloats;
    with_tile_rows(plan.rows - row, [&]<int kRows> {
      add_tile_groups<kDigits, kRows, kChained>(groups, reinterpret_cast<float*>(scratch.sums), totals);
    });
  };
  for (int64_t index = 0; index < plan.spans(); ++index) {
    const AmxSpan span(plan, index);
    pass.load_scales(first_unit, end_unit, span.first_group, span.end_group, scratch.scales);
    for (int64_t unit = first_unit; unit < end_unit; unit += widen_units) {
      for (int64_t i = 0; i < widen_units; ++i) widen(span, unit + i, scratch.blocks + 2 * i * kTileBytes);
      for (int64_t row = 0; row < plan.rows; row += kAmxRows) {
        for (int64_t i = 0; i < 2 * widen_units; ++i) {
          add_tile(span, 2 * (unit - first_unit) + i, scratch.blocks + i * kTileBytes, row);
        }
      }
    }
  }
  pass.store(first_unit, end_unit, scratch.totals, plan.tile_rows);
}

// ---- the call -------------------------------------------------------------------------------------------------------

using RunUnits = void (*)(const AmxPass&, int64_t, int64_t, const AmxWorkspace::Thread&);

template <int kDigits>
RunUnits run_units_for(const AmxPass& pass) {
  const AmxPlan& plan = pass.plan;
  if (!plan.few) return plan.chained ? run_many_units<kDigits, true> : run_many_units<kDigits, false>;
  RunUnits run_units = nullptr;
  with_float_type(pass.problem.scales_dtype, [&]<class S> {
    if (plan.rows == 1) {
      run_units = plan.chained ? run_few_units<kDigits, 1, true, S> : run_few_units<kDigits, 1, false, S>;
    } else {
      run_units = plan.chained ? run_few_units<kDigits, 2, true, S> : run_few_units<kDigits, 2, false, S>;
    }
  });
  return run_units;
}

void pack_many(const AmxPass& pass) {
  const AmxPlan& plan = pass.plan;
  ThreadPool::shared().parallel_for(plan.tile_rows / kAmxRows, [&](int64_t tile, int) {
    const int64_t tile_bytes = plan.segments * plan.digits * plan.left_tile_bytes();
    const int64_t end = std::min(plan.rows, (tile + 1) * kAmxRows);
    if (end % kAmxRows != 0) std::memset(pass.workspace.left + tile * tile_bytes, 0, static_cast<size_t>(tile_bytes));
    for (int64_t row = tile * kAmxRows; row < end; ++row) pass.pack(row);
  });
}

void pack_few(const AmxPass& pass) {
  std::memset(pass.workspace.left, 0, static_cast<size_t>(pass.plan.left_bytes()));
  for (int64_t row = 0; row < pass.plan.rows; ++row) pass.pack(row);
}

void run_pass(const AmxPass& pass) {
  const AmxPlan& plan = pass.plan;
  ThreadPool& pool = ThreadPool::shared();
  if (!plan.few) pack_many(pass);
  const RunUnits run_units = plan.digits == 4 ? run_units_for<4>(pass) : run_units_for<3>(pass);
  // Each thread takes units until none is left, and sets up its tiles once: that costs as much as some ten products.
  std::atomic<int64_t> next_unit = 0;
  const int64_t task_units = units_per_task(plan.units, 1, pool.num_threads());
  const int64_t tasks = std::clamp<int64_t>(ceil_div(plan.units, task_units), 1, pool.num_threads());
  pool.parallel_for(tasks, [&](int64_t task, int thread) {
    // By task, not by thread: task 0 always runs, and its flags are those that the caller reads.
    const AmxWorkspace workspace = plan.few ? pass.workspace.with_packed(task) : pass.workspace;
    const AmxPass own{.problem = pass.problem, .plan = plan, .workspace = workspace, .first_row = pass.first_row};
    if (plan.few) pack_few(own);
    const AmxTiles tiles(own.tile_shapes());
    while (true) {
      const int64_t first = next_unit.fetch_add(task_units, std::memory_order_relaxed);
      if (first >= plan.units) break;
      run_units(own, first, std::min(plan.units, first + task_units), workspace.thread(thread));
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

namespace polyop::cpu {
namespace {

int64_t pass_rows(int64_t m) {
  const int64_t passes = std::max<int64_t>(1, ceil_div(m, kAmxPassRows));
  return passes == 1 ? m : ceil_div(ceil_div(m, passes), kAmxRows) * kAmxRows;
}

// Row `row` of the problem alone.
Int4GroupwiseGemmProblem one_row(const Int4GroupwiseGemmProblem& problem, int64_t row) {
  const auto element_bytes = static_cast<int64_t>(dtype_bytes(problem.x_dtype));
  Int4GroupwiseGemmProblem alone = problem;
  alone.m = 1;
  alone.x = static_cast<const uint8_t*>(problem.x) + problem.x_rows.offset(row) * element_bytes;
  alone.x_rows = RowAxes();
  alone.out = static_cast<uint8_t*>(problem.out) + problem.out_rows.offset(row) * element_bytes;
  alone.out_rows = RowAxes();
  return alone;
}

}  // namespace

Status supports_int4_groupwise_gemm_amx(const Int4GroupwiseGemmProblem& problem) {
  POLYOP_RETURN_IF_ERROR(supports_int4_groupwise_gemm_simd(problem));
  if (!has_amx_int8() || !has_amx_bf16())
    return unsupported("the processor lacks AMX-INT8 or AMX-BF16, or POLYOP_AMX is 0");
  return Status::ok();
}

int64_t int4_groupwise_gemm_amx_workspace_bytes(const Int4GroupwiseGemmProblem& problem) {
  const int num_threads = ThreadPool::shared().num_threads();
  const int64_t rows = pass_rows(problem.m);
  const auto bytes_for = [&](int64_t some_rows) { return AmxLayout(AmxPlan(problem, some_rows)).bytes(num_threads); };
  // Rows that the SIMD kernel takes over are computed one by one after the pass, beside its flags.
  Int4GroupwiseGemmProblem alone = problem;
  alone.m = 1;
  const int64_t bytes_alone = kAmxPassRows + int4_groupwise_gemm_simd_workspace_bytes(alone);
  int64_t bytes = std::max(bytes_for(rows), bytes_alone);
  if (rows > 0 && problem.m % rows != 0) bytes = std::max(bytes, bytes_for(problem.m % rows));
  return bytes;
}

Status int4_groupwise_gemm_amx(const Int4GroupwiseGemmProblem& problem, Workspace workspace, Stream stream) {
  POLYOP_RETURN_IF_ERROR(supports_int4_groupwise_gemm_amx(problem));
  const int64_t wanted = int4_groupwise_gemm_amx_workspace_bytes(problem);
  if (workspace.bytes < wanted) {
    return internal_error("int4_groupwise_gemm: workspace has " + std::to_string(workspace.bytes) + " bytes, wanted " +
                          std::to_string(wanted));
  }
  const int64_t rows = pass_rows(problem.m);
  const int num_threads = ThreadPool::shared().num_threads();
  const Workspace rest{static_cast<uint8_t*>(workspace.data) + kAmxPassRows, workspace.bytes - kAmxPassRows};
  for (int64_t first = 0; first < problem.m; first += rows) {
    const AmxPlan plan(problem, std::min(rows, problem.m - first));
    const AmxWorkspace parts(plan, AmxLayout(plan), workspace.data, num_threads);
    HWY_NAMESPACE::run_pass({.problem = problem, .plan = plan, .workspace = parts, .first_row = first});
    for (int64_t row = 0; row < plan.rows; ++row) {
      if (parts.row_is_taken[row] != 0) continue;
      POLYOP_RETURN_IF_ERROR(int4_groupwise_gemm_simd(one_row(problem, first + row), rest, stream));
    }
  }
  return Status::ok();
}

}  // namespace polyop::cpu

#else

namespace polyop::cpu {

Status supports_int4_groupwise_gemm_amx(const Int4GroupwiseGemmProblem&) {
  return unsupported("this build has no AMX");
}
int64_t int4_groupwise_gemm_amx_workspace_bytes(const Int4GroupwiseGemmProblem&) { return 0; }
Status int4_groupwise_gemm_amx(const Int4GroupwiseGemmProblem& problem, Workspace, Stream) {
  return supports_int4_groupwise_gemm_amx(problem);
}

}  // namespace polyop::cpu

#endif  // POLYOP_AMX
