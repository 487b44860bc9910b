// How one call of the SIMD kernel of int4_groupwise_gemm is cut, and where its scratch memory lies. Depends on extents
// and the thread count only; no cut changes the order of operations of an output element.
#pragma once

#include <algorithm>
#include <cstdint>

#include "polyop/core/numeric_types.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm_problem.h"
#include "polyop/ops/int4_groupwise_gemm/packing.h"

namespace polyop::cpu {

inline constexpr int64_t kUnitColumns = 32;           // half a strip of 64 columns: the least piece of a fragment block
inline constexpr int64_t kUnitsPerBlock = 4;          // units of one fragment block of 128 columns
inline constexpr int64_t kFewRows = 8;                // up to here weights are widened in registers, above in memory
inline constexpr int64_t kBlockRows = 96;             // rows that share one widened tile; multiple of kTileRows
inline constexpr int64_t kTileRows = 6;               // rows of the widest register tile over widened weights
inline constexpr int64_t kPassRows = 4 * kBlockRows;  // rows of x that are permuted at a time: bounds the workspace
inline constexpr int64_t kChunkDepth = 256;           // depths of a widened panel: at most 16 KiB, inside L1
inline constexpr int64_t kMaxGroupSize = kChunkDepth;
inline constexpr int64_t kChunkGroups = 16;  // groups whose scales are widened at a time; kChunkDepth / 16

/// Calls fn.operator()<T>() with the C++ type of f32, f16 or bf16; the schema admits no other.
template <class Fn>
void with_float_type(DType dtype, Fn&& fn) {
  if (dtype == DType::kF16) return fn.template operator()<F16>();
  if (dtype == DType::kBF16) return fn.template operator()<BF16>();
  return fn.template operator()<float>();
}

/// First column of a unit in its fragment block; it has 16 from there and 16 from 32 columns on.
constexpr int64_t column_in_block(int64_t unit) { return unit % kUnitsPerBlock / 2 * 64 + unit % 2 * 16; }

/// The 64 words of `unit` at `step` of 16 depths; those of the next step of the same fragment block lie 1 KiB on.
inline const uint32_t* unit_words(const uint8_t* qweight, int64_t depth_blocks, int64_t unit, int64_t step) {
  const int64_t block = unit / kUnitsPerBlock;
  const int64_t strip = unit % kUnitsPerBlock / 2;
  const int64_t row = block * depth_blocks * kFragmentRowsPerBlock + 2 * step + strip;
  return reinterpret_cast<const uint32_t*>(qweight + row * kFragmentRowBytes) + unit % 2 * (2 * kUnitColumns);
}

/// Units that one task takes: a whole fragment block, which reads weights in one stream and x least often; less only
/// where there would be fewer than two tasks a thread. Each unit range is worked on by `row_tasks` tasks.
inline int64_t units_per_task(int64_t units, int64_t row_tasks, int num_threads) {
  const int64_t enough_tasks = num_threads == 1 ? 1 : 2 * num_threads;
  int64_t task_units = kUnitsPerBlock;
  while (task_units > 1 && units * row_tasks < enough_tasks * task_units) task_units /= 2;
  return task_units;
}

/// Extents that every part of a kernel needs.
struct GemmPlan {
  int64_t steps;         // of 16 depths, ceil(K / 16)
  int64_t group_steps;   // Kg / 16
  int64_t groups;        // ceil(K / Kg)
  int64_t depth_blocks;  // ceil(K / 64)
  int64_t units;         // of 32 columns, those that hold a column below N
  int64_t x_stride;      // floats of one permuted row of x
  int64_t chunk_groups;  // groups of one widened tile

  explicit GemmPlan(const Int4GroupwiseGemmProblem& problem) {
    steps = (problem.k + 15) / 16;
    group_steps = problem.group_size / 16;
    groups = (problem.k + problem.group_size - 1) / problem.group_size;
    depth_blocks = (problem.k + kFragmentDepth - 1) / kFragmentDepth;
    // Units 0 and 1 of a strip hold its columns 0-15, 32-47 and 16-31, 48-63: any column of the strip above 16 needs
    // both.
    const int64_t full_strips = problem.n / 64;
    const int64_t rest = problem.n % 64;
    units = 2 * full_strips + (rest > 16 ? 2 : rest > 0 ? 1 : 0);
    x_stride = steps * 16;
    chunk_groups = std::max<int64_t>(1, kChunkDepth / std::max<int64_t>(1, problem.group_size));
  }
};

/// Scratch of one thread, in floats; parts start at multiples of 64 bytes.
inline constexpr int64_t kScalesFloats =
    kChunkGroups * kFragmentColumns + 16;  // a vector may read past the last column
inline constexpr int64_t kTotalsFloats = kUnitsPerBlock * kBlockRows * 4 * kUnitColumns;
inline constexpr int64_t kPanelScalesFloats = kChunkGroups * 64;
inline constexpr int64_t kPanelFloats = kChunkDepth * 16;  // a panel has at most 16 columns

struct ThreadScratch {
  float* scales;        // [kChunkGroups, 128]
  float* panel_scales;  // of one panel, each in the four lanes of its column
  float* totals;        // partial sums, [units, rows, 128]
  float* panel;         // widened weights
};

/// The workspace: permuted x of a pass, then the scratch of each thread.
struct WorkspaceLayout {
  static constexpr int64_t kThreadFloats = kScalesFloats + kPanelScalesFloats + kTotalsFloats + kPanelFloats;

  int64_t x_floats;
  int64_t bytes;

  WorkspaceLayout(const Int4GroupwiseGemmProblem& problem, const GemmPlan& plan, int num_threads) {
    x_floats = std::min(problem.m, kPassRows) * plan.x_stride;
    bytes = (x_floats + num_threads * kThreadFloats) * static_cast<int64_t>(sizeof(float));
  }

  [[nodiscard]] ThreadScratch scratch(float* workspace, int thread) const {
    ThreadScratch scratch;
    scratch.scales = workspace + x_floats + thread * kThreadFloats;
    scratch.panel_scales = scratch.scales + kScalesFloats;
    scratch.totals = scratch.panel_scales + kPanelScalesFloats;
    scratch.panel = scratch.totals + kTotalsFloats;
    return scratch;
  }
};

}  // namespace polyop::cpu
