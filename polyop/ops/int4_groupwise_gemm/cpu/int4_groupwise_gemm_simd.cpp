// int4_groupwise_gemm_simd: weights of 4 bits times activations of 16 or 32, sums in f32, on vectors of any width.
// Math      out[m, n] = sum over groups g of s[g, n] * sum over k in g of x[m, k] * (q[n, k] - 8)
// Shapes    x [M, K] · qweight [ceil(N/128) * ceil(K/64) * 8, 512] u8 · s [ceil(K/Kg), N] · out [M, N]
// Layout    one word of a fragment row is one column (two, 32 apart) x depths {2p, 2p+1, 2p+8, 2p+9} of 16, p = word
// % 4.
//           So a vector of words is lanes of (column, p), and an f32 vector built from nibble j of each is (kLanes / 4
//           columns) x (4 depths). x is permuted once a call to [K/16][high depth][odd][row of a tile][p], whose fours
//           are multiplied with such a vector by one 128-bit broadcast load: no shuffle and no horizontal sum before
//           the end.
// Order     per output element and lane p: f32 FMAs in ascending step, high depth, odd over a group; one FMA with the
//           group's scale onto the running total; (t0 + t2) + (t1 + t3) over the lanes at the end. The same for every
//           M, cut, thread count and vector width: rows are independent of each other bit for bit.
// Work      M <= 8: task = 32, 64 or 128 columns (as many tasks as keep all threads busy), K innermost in groups,
// weights
//           widened in registers and used for all rows. Above: the same columns x at most 96 rows; 256 depths of
//           weights x 16 columns are widened once to a panel of 16 KiB in L1, then register tiles of 6 rows x 4 vectors
//           run over it.
// Memory    qweight once per call (M <= 8) or once per 96 rows; s likewise; x permuted once, M * K * 4 bytes of
// workspace
//           (at most 384 rows at a time). Nothing past K of x, past N of s and out is touched.
// Roofline  M <= 8 bound by reading 0.5 byte per weight plus scales: on AVX-512 a 64-byte vector of words costs 7
// shifts,
//           8 permutations and 8 * M FMAs on two ports = 11.5 cycles at M = 1, 5.6 bytes a cycle and core, above what
//           DRAM gives a core of a loaded server. Large M bound by 2 FMAs a cycle: a group of Kg depths costs Kg / 4
//           FMAs a vector and one more for its scale, so at most 89 / 94 / 97 % of peak at Kg 32 / 64 / 128.
// Numerics  weights exact in f32, scales widened exactly; error bound in README.md; deterministic
// Limits    Kg a multiple of 16, at most 256; any N, K, M; SSE4 or newer, NEON · See ../README.md
//
// The group sum is kept unscaled because scaling every weight instead costs M = 1 eight more multiplications a vector
// (15.5 cycles), and large M gains only the scale FMA.
// Tiles are arrays of vectors, which scalable ones cannot be; SSSE3 without SSE4 is worth no compile time.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_simd.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_plan.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

bool int4_groupwise_gemm_has_vectors() { return false; }
void run_int4_groupwise_gemm(const Int4GroupwiseGemmProblem&, float*, const WorkspaceLayout&) {}

#else

bool int4_groupwise_gemm_has_vectors() { return true; }

// One call, or one pass of kPassRows rows of it.
struct GemmPass {
  const Int4GroupwiseGemmProblem& problem;
  const GemmPlan& plan;
  const float* x;  // row panels of panel_rows rows, the last one of the rest
  int64_t panel_rows;
  int64_t first_row;  // in the problem
  int64_t rows;

  // The row panel that starts at `row` (a multiple of panel_rows), from `step` on.
  [[nodiscard]] const float* x_panel(int64_t row, int64_t step) const {
    return x + row * plan.x_stride + std::min(panel_rows, rows - row) * step * kStepDepth;
  }

  [[nodiscard]] const uint32_t* words(int64_t unit, int64_t step) const {
    return unit_words(problem.qweight, plan.depth_blocks, unit, step);
  }

  // Widens the scales of groups [first_group, end_group) for the strips of units [first_unit, end_unit) of one block.
  void load_scales(int64_t first_unit, int64_t end_unit, int64_t first_group, int64_t end_group, float* scales) const {
    const int64_t block_column = first_unit / kUnitsPerBlock * kFragmentColumns;
    const int64_t first_column = column_in_block(first_unit) / 64 * 64;
    const int64_t end_column = column_in_block(end_unit - 1) / 64 * 64 + 64;
    with_float_type(problem.scales_dtype, [&]<class T> {
      const T* row = static_cast<const T*>(problem.scales) + first_group * problem.scales_row_stride;
      for (int64_t group = first_group; group < end_group; ++group) {
        for (int64_t column = first_column; column < end_column; column += kLanes) {
          widen_scales(row, block_column + column, problem.n, scales + column);
        }
        scales += kFragmentColumns;
        row += problem.scales_row_stride;
      }
    });
  }

  // Reduces and stores the totals [num_rows, 128] of `unit` for rows from `row` of the pass.
  void store_unit(int64_t unit, const float* totals, int64_t row, int64_t num_rows) const {
    with_float_type(problem.x_dtype, [&]<class T> {
      const int64_t column = unit / kUnitsPerBlock * kFragmentColumns + column_in_block(unit);
      for (int64_t r = 0; r < num_rows; ++r) {
        T* out = static_cast<T*>(problem.out) + problem.out_rows.offset(first_row + row + r);
        for (int half = 0; half < 2; ++half) {
          const int64_t first = column + half * 32;
          const int64_t valid = std::min<int64_t>(16, problem.n - first);
          if (valid > 0) store_columns(totals + r * kUnitFloats + half * kLanes, out + first, valid);
        }
      }
    });
  }
};

// ---- few rows: weights go from memory to registers once
// ----------------------------------------------------------------

// Word vectors per register tile: enough chains to hide the latency of an FMA, few enough to stay in registers.
constexpr int packed_tile_vectors(int rows) {
  if (kManyRegisters) return rows <= 2 ? 4 : rows <= 6 ? 2 : 1;
  return rows <= 2 ? 2 : 1;
}
constexpr int kPackedTileRows = kManyRegisters ? 8 : 4;

template <int kRows>
HWY_INLINE void add_packed_rows(const uint32_t* words, int64_t steps, const float* x, const float* scales,
                                float* totals) {
  constexpr int kVecs = packed_tile_vectors(kRows);
  for (int v = 0; v < kUnitVectors; v += kVecs) {
    add_packed_group<kRows, kVecs>(words + v * kLanes, steps, x, scales + v * (kLanes / 4), totals + v * 2 * kLanes,
                                   kUnitFloats);
  }
}

// All rows of the pass for units [first_unit, end_unit) of one fragment block.
template <int kRows>
void run_packed_units(const GemmPass& pass, int64_t first_unit, int64_t end_unit, const ThreadScratch& scratch) {
  constexpr int kMainRows = kRows < kPackedTileRows ? kRows : kPackedTileRows;
  constexpr int kRestRows = kRows - kMainRows;
  const GemmPlan& plan = pass.plan;
  std::fill_n(scratch.totals, (end_unit - first_unit) * kRows * kUnitFloats, 0.0f);
  for (int64_t first_group = 0; first_group < plan.groups; first_group += kChunkGroups) {
    const int64_t end_group = std::min(plan.groups, first_group + kChunkGroups);
    pass.load_scales(first_unit, end_unit, first_group, end_group, scratch.scales);
    for (int64_t group = first_group; group < end_group; ++group) {
      const int64_t step = group * plan.group_steps;
      const int64_t steps = std::min(plan.group_steps, plan.steps - step);
      const float* group_scales = scratch.scales + (group - first_group) * kFragmentColumns;
      for (int64_t unit = first_unit; unit < end_unit; ++unit) {
        const uint32_t* words = pass.words(unit, step);
        const float* scales = group_scales + column_in_block(unit);
        float* totals = scratch.totals + (unit - first_unit) * kRows * kUnitFloats;
        add_packed_rows<kMainRows>(words, steps, pass.x_panel(0, step), scales, totals);
        if constexpr (kRestRows > 0) {
          add_packed_rows<kRestRows>(words, steps, pass.x_panel(kMainRows, step), scales,
                                     totals + kMainRows * kUnitFloats);
        }
      }
    }
  }
  for (int64_t unit = first_unit; unit < end_unit; ++unit) {
    pass.store_unit(unit, scratch.totals + (unit - first_unit) * kRows * kUnitFloats, 0, kRows);
  }
}

void run_few_rows(const GemmPass& pass, float* workspace, const WorkspaceLayout& layout) {
  using RunUnits = void (*)(const GemmPass&, int64_t, int64_t, const ThreadScratch&);
  static constexpr RunUnits kRunUnits[kFewRows] = {
      run_packed_units<1>, run_packed_units<2>, run_packed_units<3>, run_packed_units<4>,
      run_packed_units<5>, run_packed_units<6>, run_packed_units<7>, run_packed_units<8>,
  };
  const RunUnits run_units = kRunUnits[pass.rows - 1];
  ThreadPool& pool = ThreadPool::shared();
  const int64_t task_units = units_per_task(pass.plan.units, 1, pool.num_threads());
  const int64_t tasks = (pass.plan.units + task_units - 1) / task_units;
  pool.parallel_for(tasks, [&](int64_t task, int thread) {
    const int64_t first = task * task_units;
    run_units(pass, first, std::min(pass.plan.units, first + task_units), layout.scratch(workspace, thread));
  });
}

// ---- many rows: weights are widened once for up to 96 rows
// -------------------------------------------------------------

constexpr int kPanelVectors =
    kManyRegisters ? 2 : 1;  // word vectors; twice as many of weights. 6 x 4 of 32, 6 x 2 of 16

constexpr int64_t kPanelScales = 2 * kPanelVectors * kLanes;  // spread scales of a group

// Adds the groups of one chunk for kRows rows and one panel.
template <int kRows>
void add_panel(const float* panel, int64_t steps, int64_t group_steps, const float* x, const float* scales,
               float* totals) {
  constexpr int64_t kPanelFloatsPerStep = 4 * 2 * kPanelVectors * kLanes;
  for (int64_t step = 0; step < steps; step += group_steps) {
    add_widened_group<kRows, kPanelVectors>(panel + step * kPanelFloatsPerStep, std::min(group_steps, steps - step),
                                            x + step * kRows * kStepDepth, scales, totals, kUnitFloats);
    scales += kPanelScales;
  }
}

// Rows [first, first + rows) of the pass, rows <= kBlockRows, for units [first_unit, end_unit) of one fragment block.
void run_widened_units(const GemmPass& pass, int64_t first_unit, int64_t end_unit, int64_t first, int64_t rows,
                       const ThreadScratch& scratch) {
  using AddPanel = void (*)(const float*, int64_t, int64_t, const float*, const float*, float*);
  static constexpr AddPanel kAddPanel[kTileRows] = {
      add_panel<1>, add_panel<2>, add_panel<3>, add_panel<4>, add_panel<5>, add_panel<6>,
  };
  const GemmPlan& plan = pass.plan;
  std::fill_n(scratch.totals, (end_unit - first_unit) * rows * kUnitFloats, 0.0f);
  for (int64_t first_group = 0; first_group < plan.groups; first_group += plan.chunk_groups) {
    const int64_t end_group = std::min(plan.groups, first_group + plan.chunk_groups);
    const int64_t step = first_group * plan.group_steps;
    const int64_t steps = std::min(end_group * plan.group_steps, plan.steps) - step;
    pass.load_scales(first_unit, end_unit, first_group, end_group, scratch.scales);
    for (int64_t unit = first_unit; unit < end_unit; ++unit) {
      float* totals = scratch.totals + (unit - first_unit) * rows * kUnitFloats;
      for (int v = 0; v < kUnitVectors; v += kPanelVectors) {
        widen_panel<kPanelVectors>(pass.words(unit, step) + v * kLanes, steps, scratch.panel);
        for (int64_t group = 0; group < end_group - first_group; ++group) {
          const float* scales = scratch.scales + group * kFragmentColumns + column_in_block(unit) + v * (kLanes / 4);
          for (int vec = 0; vec < 2 * kPanelVectors; ++vec) {
            hn::Store(spread_scales(scales + scale_offset(vec)), DF(),
                      scratch.panel_scales + group * kPanelScales + vec * kLanes);
          }
        }
        for (int64_t row = 0; row < rows; row += kTileRows) {
          const int64_t tile_rows = std::min(kTileRows, rows - row);
          kAddPanel[tile_rows - 1](scratch.panel, steps, plan.group_steps, pass.x_panel(first + row, step),
                                   scratch.panel_scales, totals + row * kUnitFloats + v * 2 * kLanes);
        }
      }
    }
  }
  for (int64_t unit = first_unit; unit < end_unit; ++unit) {
    pass.store_unit(unit, scratch.totals + (unit - first_unit) * rows * kUnitFloats, first, rows);
  }
}

void run_many_rows(const GemmPass& pass, float* workspace, const WorkspaceLayout& layout) {
  const int64_t blocks = (pass.rows + kBlockRows - 1) / kBlockRows;
  const int64_t even_rows = (pass.rows + blocks - 1) / blocks;
  const int64_t block_rows = (even_rows + kTileRows - 1) / kTileRows * kTileRows;
  ThreadPool& pool = ThreadPool::shared();
  const int64_t task_units = units_per_task(pass.plan.units, blocks, pool.num_threads());
  const int64_t column_tasks = (pass.plan.units + task_units - 1) / task_units;
  pool.parallel_for(column_tasks * blocks, [&](int64_t task, int thread) {
    const int64_t first = task % blocks * block_rows;
    const int64_t rows = std::min(block_rows, pass.rows - first);
    const int64_t first_unit = task / blocks * task_units;
    const int64_t end_unit = std::min(pass.plan.units, first_unit + task_units);
    if (rows > 0) run_widened_units(pass, first_unit, end_unit, first, rows, layout.scratch(workspace, thread));
  });
}

// ---- the call
// ----------------------------------------------------------------------------------------------------------

// Writes row panel `panel` of the pass.
void permute_panel(const GemmPass& pass, int64_t panel, float* workspace) {
  const int64_t row = panel * pass.panel_rows;
  const int64_t panel_rows = std::min(pass.panel_rows, pass.rows - row);
  with_float_type(pass.problem.x_dtype, [&]<class T> {
    for (int64_t r = 0; r < panel_rows; ++r) {
      const T* x = static_cast<const T*>(pass.problem.x) + pass.problem.x_rows.offset(pass.first_row + row + r);
      permute_row(x, pass.problem.k, 4 * panel_rows, workspace + row * pass.plan.x_stride + 4 * r);
    }
  });
}

void run_int4_groupwise_gemm(const Int4GroupwiseGemmProblem& problem, float* workspace, const WorkspaceLayout& layout) {
  const GemmPlan plan(problem);
  for (int64_t first = 0; first < problem.m; first += kPassRows) {
    const int64_t rows = std::min(kPassRows, problem.m - first);
    const bool few = rows <= kFewRows;
    const GemmPass pass{.problem = problem,
                        .plan = plan,
                        .x = workspace,
                        .panel_rows = few ? kPackedTileRows : kTileRows,
                        .first_row = first,
                        .rows = rows};
    const int64_t panels = (rows + pass.panel_rows - 1) / pass.panel_rows;
    if (few) {
      for (int64_t panel = 0; panel < panels; ++panel) permute_panel(pass, panel, workspace);
      run_few_rows(pass, workspace, layout);
    } else {
      ThreadPool::shared().parallel_for(panels, [&](int64_t panel, int) { permute_panel(pass, panel, workspace); });
      run_many_rows(pass, workspace, layout);
    }
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <string>

namespace polyop::cpu {

HWY_EXPORT(int4_groupwise_gemm_has_vectors);
HWY_EXPORT(run_int4_groupwise_gemm);

Status supports_int4_groupwise_gemm_simd(const Int4GroupwiseGemmProblem& problem) {
  if (problem.group_size % 16 != 0 || problem.group_size > kMaxGroupSize) {
    return unsupported("group_size is " + std::to_string(problem.group_size) + ", wanted a multiple of 16 up to " +
                       std::to_string(kMaxGroupSize));
  }
  if (!HWY_DYNAMIC_DISPATCH(int4_groupwise_gemm_has_vectors)()) return unsupported("the processor lacks SSE4 or NEON");
  return Status::ok();
}

int64_t int4_groupwise_gemm_simd_workspace_bytes(const Int4GroupwiseGemmProblem& problem) {
  return WorkspaceLayout(problem, GemmPlan(problem), ThreadPool::shared().num_threads()).bytes;
}

Status int4_groupwise_gemm_simd(const Int4GroupwiseGemmProblem& problem, Workspace workspace, Stream) {
  POLYOP_RETURN_IF_ERROR(supports_int4_groupwise_gemm_simd(problem));
  const WorkspaceLayout layout(problem, GemmPlan(problem), ThreadPool::shared().num_threads());
  if (workspace.bytes < layout.bytes) {
    return internal_error("int4_groupwise_gemm: workspace has " + std::to_string(workspace.bytes) + " bytes, wanted " +
                          std::to_string(layout.bytes));
  }
  HWY_DYNAMIC_DISPATCH(run_int4_groupwise_gemm)(problem, static_cast<float*>(workspace.data), layout);
  return Status::ok();
}

}  // namespace polyop::cpu
#endif  // HWY_ONCE
