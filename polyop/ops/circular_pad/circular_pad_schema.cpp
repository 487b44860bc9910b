#include <string>

#include "polyop/core/op_registry.h"
#include "polyop/ops/circular_pad/circular_pad.h"
#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop {

std::span<const Kernel<CircularPadProblem>> circular_pad_kernels();

namespace {

enum Operand : int { kX, kOut };
enum Attribute : int { kPadding };

OpSchema make_schema() {
  // Entry of `padding` for the current axis; the list starts at the last axis.
  const DimExpr from_last = pack_rank("X") - 1 - pack_axis();
  const DimExpr before = list_entry("padding", from_last * 2);
  const DimExpr after = list_entry("padding", from_last * 2 + 1);
  const std::vector<DType> dtypes = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kI64,
                                     DType::kI32, DType::kI8,  DType::kU8,   DType::kBool};
  return SchemaBuilder(
             "circular_pad",
             "Pads a tensor by repeating it: out[i] = x[(i - before) mod extent] on every axis. The padding may "
             "exceed the extent; a negative one crops.")
      .operand(input("x").doc("tensor of any rank").dims({axes("X")}).dtypes(dtypes).strides(StrideRule::kAny))
      .operand(output("out")
                   .doc("padded tensor")
                   .dims({map_axes("X", pack_extent("X") + before + after)})
                   .dtype_of("x")
                   .strides(StrideRule::kAny))
      .int_list_attribute("padding",
                          "pairs (before, after) in elements from the last axis backwards, as torch orders them")
      .build();
}

Status make_problem(const BoundCall& call, CircularPadProblem* problem) {
  const TensorView& x = call.tensor(kX);
  const TensorView& out = call.tensor(kOut);
  const std::span<const int64_t> padding = call.attributes[kPadding].integers;
  if (padding.size() % 2 != 0 || padding.size() > static_cast<size_t>(2 * x.rank)) {
    return invalid_argument("circular_pad: attribute padding has " + std::to_string(padding.size()) +
                            " entries, wanted an even number of at most " + std::to_string(2 * x.rank) +
                            " for x of rank " + std::to_string(x.rank));
  }
  // Sums of an index and a padding stay in 64 bits, and an extent is not one that has wrapped around.
  constexpr int64_t kMostPadding = int64_t{1} << 61;
  for (size_t entry = 0; entry < padding.size(); ++entry) {
    if (padding[entry] >= -kMostPadding && padding[entry] <= kMostPadding) continue;
    return invalid_argument("circular_pad: attribute padding[" + std::to_string(entry) + "] is " +
                            std::to_string(padding[entry]) + ", wanted -2^61 to 2^61");
  }
  *problem = {.x = x.data,
              .out = out.data,
              .element_bytes = dtype_bytes(x.dtype),
              .rank = x.rank,
              .x_extents = x.shape,
              .x_strides = x.strides,
              .out_extents = out.shape,
              .out_strides = out.strides};
  for (size_t pair = 0; pair < padding.size() / 2; ++pair) {
    problem->pads_before[x.rank - 1 - static_cast<int>(pair)] = padding[2 * pair];
  }
  if (out.num_elements() > 0) {
    for (int32_t axis = 0; axis < x.rank; ++axis) {
      if (x.shape[axis] == 0) {
        return invalid_argument("circular_pad: x axis " + std::to_string(axis) + " is 0, wanted at least 1: out has " +
                                std::to_string(out.shape[axis]) + " there and nothing to repeat");
      }
    }
  }
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_circular_pad_operator() {
  return std::make_unique<OperatorOver<CircularPadProblem>>(make_schema(), make_problem, circular_pad_kernels());
}

}  // namespace polyop
