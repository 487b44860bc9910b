// One pass of the AMX kernel of int4_groupwise_gemm: where its operands lie, how they are read and written.
//
// Included once per SIMD target.
#if defined(POLYOP_INT4_GROUPWISE_GEMM_AMX_PASS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef POLYOP_INT4_GROUPWISE_GEMM_AMX_PASS_INL_H_
#undef POLYOP_INT4_GROUPWISE_GEMM_AMX_PASS_INL_H_
#else
#define POLYOP_INT4_GROUPWISE_GEMM_AMX_PASS_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <type_traits>

#include "polyop/cpu/amx.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_digits-inl.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_plan.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_amx_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

// At most kAmxPassRows rows of a call.
struct AmxPass {
  const Int4GroupwiseGemmProblem& problem;
  const AmxPlan& plan;
  const AmxWorkspace& workspace;
  int64_t first_row;  // in the problem

  // Words of `unit` at fragment block `block`.
  [[nodiscard]] const uint32_t* words(int64_t unit, int64_t block) const {
    return unit_words(problem.qweight, plan.depth_blocks, unit, block * (kFragmentDepth / 16));
  }

  // First column of a unit's lower or upper tile.
  static int64_t tile_column(int64_t unit, int64_t half) {
    return unit / kUnitsPerBlock * kFragmentColumns + column_in_block(unit) + half * 32;
  }

  // Scales of groups [first_group, end_group) for the tiles of units [first_unit, end_unit): [groups, tiles, 16].
  void load_scales(int64_t first_unit, int64_t end_unit, int64_t first_group, int64_t end_group, float* scales) const {
    with_float_type(problem.scales_dtype, [&]<class S> {
      const S* row = static_cast<const S*>(problem.scales) + first_group * problem.scales_row_stride;
      for (int64_t group = first_group; group < end_group; ++group) {
        for (int64_t unit = first_unit; unit < end_unit; ++unit) {
          for (int64_t half = 0; half < 2; ++half) {
            hn::Store(load_tile_scales(row, tile_column(unit, half), problem.n), DF16(), scales);
            scales += kAmxVectorFloats;
          }
        }
        row += problem.scales_row_stride;
      }
    });
  }

  // Stores totals [tiles, totals_rows, 16] of the units for all rows of the pass.
  void store(int64_t first_unit, int64_t end_unit, const float* totals, int64_t totals_rows) const {
    with_float_type(problem.x_dtype, [&]<class T> {
      for (int64_t row = 0; row < plan.rows; ++row) {
        T* out = static_cast<T*>(problem.out) + problem.out_rows.offset(first_row + row);
        for (int64_t tile = 0; tile < 2 * (end_unit - first_unit); ++tile) {
          const int64_t column = tile_column(first_unit + tile / 2, tile % 2);
          const int64_t valid = problem.n - column;
          if (valid > 0) store_tile_row(totals + (tile * totals_rows + row) * kAmxVectorFloats, out + column, valid);
        }
      }
    });
  }

  // Digits and factors of row `row` of the pass.
  void pack(int64_t row) const {
    DigitRow to;
    if (plan.few) {
      to = {.row = workspace.left + row * plan.digits * plan.segment_depth,
            .segment_stride = plan.left_tile_bytes(),
            .slot_stride = plan.rows * plan.digits * plan.segment_depth,
            .digit_stride = plan.segment_depth,
            .half_stride = 2 * plan.segment_depth};
    } else {
      const int64_t in_tile = row % kAmxRows;
      to = with_tile_rows(plan.rows - (row - in_tile),
                          [&]<int kRows> { return digits_of_row<kRows>(left_of_rows(row - in_tile), in_tile, plan); });
    }
    with_float_type(problem.x_dtype, [&]<class T> {
      const T* x = static_cast<const T*>(problem.x) + problem.x_rows.offset(first_row + row);
      constexpr int kDigits = std::is_same_v<T, float> ? 4 : 3;
      const auto pack_as = plan.few ? pack_row<kDigits, true, T> : pack_row<kDigits, false, T>;
      workspace.row_is_taken[row] = pack_as(x, problem.k, problem.group_size, plan, to, workspace.factors + row);
    });
  }

  // Many rows: the digits of the 16 rows from `row` on.
  [[nodiscard]] int8_t* left_of_rows(int64_t row) const {
    return workspace.left + row / kAmxRows * plan.segments * plan.digits * plan.left_tile_bytes();
  }

  // Tiles 0 and 1 are sums, 4 and 5 left, 6 right, 7 right (few rows) or left.
  [[nodiscard]] AmxShapes tile_shapes() const {
    const int64_t left_bytes = plan.left_tile_bytes() / kAmxRows;
    AmxShapes shapes;
    for (const int left : {4, 5, 7}) shapes.row_bytes[left] = static_cast<uint16_t>(left_bytes);
    shapes.rows[6] = static_cast<uint8_t>(left_bytes / 4);
    if (plan.few) {
      shapes.row_bytes[7] = kAmxRowBytes;
      shapes.rows[7] = shapes.rows[6];
    }
    return shapes;
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

#endif  // POLYOP_INT4_GROUPWISE_GEMM_AMX_PASS_INL_H_
