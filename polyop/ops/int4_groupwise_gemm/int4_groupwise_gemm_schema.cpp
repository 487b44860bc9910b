#include <span>

#include "polyop/core/op_registry.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm_problem.h"
#include "polyop/ops/int4_groupwise_gemm/packing.h"

namespace polyop {

std::span<const Kernel<Int4GroupwiseGemmProblem>> int4_groupwise_gemm_kernels();

namespace {

enum Operand : int { kX, kQweight, kScales, kOut };
enum Attribute : int { kGroupSize };

OpSchema make_schema() {
  const DimExpr n = symbol("N");
  const DimExpr k = symbol("K");
  const DimExpr fragment_rows = ceil_div(n, kFragmentColumns) * ceil_div(k, kFragmentDepth) * kFragmentRowsPerBlock;
  const std::vector<DType> float_types = {DType::kF32, DType::kF16, DType::kBF16};
  return SchemaBuilder(
             "int4_groupwise_gemm",
             "Multiplies activations with 4-bit weights that share a scale along groups of the depth: out[m, n] = sum "
             "over k of x[m, k] * (q[n, k] - 8) * scales[k / group_size, n], accumulated in f32.")
      .operand(input("x").doc("activations; the leading axes are the rows m").dims({axes("M"), k}).dtypes(float_types))
      .operand(input("qweight")
                   .doc("weights q in 0..15 of [N, K] as 512-byte fragment rows (pack_int4_fragments)")
                   .dims({fragment_rows, DimExpr(kFragmentRowBytes)})
                   .dtypes({DType::kI8, DType::kU8})
                   .strides(StrideRule::kContiguous))
      .operand(input("scales")
                   .doc("one scale a group of depths and column")
                   .dims({ceil_div(k, attribute("group_size")), n})
                   .dtypes({DType::kF16, DType::kF32, DType::kBF16}))
      .operand(output("out").doc("products").dims({map_axes("M", pack_extent("M")), n}).dtype_of("x"))
      .int_attribute("group_size", std::nullopt, "Kg: consecutive depths that share a scale", 1)
      .build();
}

Status make_problem(const BoundCall& call, Int4GroupwiseGemmProblem* problem) {
  const TensorView& x = call.tensor(kX);
  const TensorView& scales = call.tensor(kScales);
  const TensorView& out = call.tensor(kOut);
  *problem = {.m = 1,
              .n = scales.shape[1],
              .k = x.shape[x.rank - 1],
              .group_size = call.attributes[kGroupSize].integer,
              .x = x.data,
              .x_dtype = x.dtype,
              .x_rows = RowAxes::of_leading_axes(x),
              .qweight = static_cast<const uint8_t*>(call.tensor(kQweight).data),
              .scales = scales.data,
              .scales_dtype = scales.dtype,
              .scales_row_stride = scales.strides[0],
              .out = out.data,
              .out_rows = RowAxes::of_leading_axes(out)};
  for (int32_t axis = 0; axis + 1 < x.rank; ++axis) problem->m *= x.shape[axis];
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_int4_groupwise_gemm_operator() {
  return std::make_unique<OperatorOver<Int4GroupwiseGemmProblem>>(make_schema(), make_problem,
                                                                  int4_groupwise_gemm_kernels());
}

}  // namespace polyop
