#include "polyop/ops/int4_groupwise_gemm/packing_operators.h"

#include <span>

#include "polyop/ops/int4_groupwise_gemm/packing.h"

namespace polyop {
namespace {

struct PackProblem {
  const void* source = nullptr;
  void* target = nullptr;
  int64_t n = 0;
  int64_t k = 0;
};

Status takes_all(const PackProblem&) { return Status::ok(); }

constexpr Kernel<PackProblem> kPackKernels[] = {{.name = "reference",
                                                 .device = DeviceType::kCpu,
                                                 .supports = takes_all,
                                                 .workspace_bytes = nullptr,
                                                 .launch = [](const PackProblem& problem, Workspace, Stream) {
                                                   return pack_int4_fragments(
                                                       static_cast<const uint8_t*>(problem.source), problem.n,
                                                       problem.k, static_cast<uint8_t*>(problem.target));
                                                 }}};

constexpr Kernel<PackProblem> kUnpackKernels[] = {{.name = "reference",
                                                   .device = DeviceType::kCpu,
                                                   .supports = takes_all,
                                                   .workspace_bytes = nullptr,
                                                   .launch = [](const PackProblem& problem, Workspace, Stream) {
                                                     return unpack_int4_fragments(
                                                         static_cast<const uint8_t*>(problem.source), problem.n,
                                                         problem.k, static_cast<uint8_t*>(problem.target));
                                                   }}};

DimExpr fragment_rows(const DimExpr& n, const DimExpr& k) {
  return ceil_div(n, kFragmentColumns) * ceil_div(k, kFragmentDepth) * kFragmentRowsPerBlock;
}

/// Operand 0 is the source, operand 1 the target; `q` is the one with the unpacked weights.
template <int kUnpacked>
Status make_problem(const BoundCall& call, PackProblem* problem) {
  *problem = {.source = call.tensor(0).data,
              .target = call.tensor(1).data,
              .n = call.tensor(kUnpacked).shape[0],
              .k = call.tensor(kUnpacked).shape[1]};
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_pack_int4_fragments_operator() {
  OpSchema schema =
      SchemaBuilder(
          "pack_int4_fragments",
          "Packs INT4 weights into the fragment layout that int4_groupwise_gemm reads; padding has weight zero.")
          .operand(input("q")
                       .doc("values 0 to 15, each the weight plus 8")
                       .dims({symbol("N"), symbol("K")})
                       .dtypes({DType::kU8})
                       .strides(StrideRule::kContiguous))
          .operand(output("out")
                       .doc("packed weights")
                       .dims({fragment_rows(symbol("N"), symbol("K")), DimExpr(kFragmentRowBytes)})
                       .dtypes({DType::kI8})
                       .strides(StrideRule::kContiguous))
          .build();
  return std::make_unique<OperatorOver<PackProblem>>(std::move(schema), make_problem<0>, kPackKernels);
}

std::unique_ptr<Operator> make_unpack_int4_fragments_operator() {
  OpSchema schema = SchemaBuilder("unpack_int4_fragments", "The inverse of pack_int4_fragments; padding is dropped.")
                        .operand(input("packed")
                                     .doc("packed weights")
                                     .dims({fragment_rows(attribute("n"), attribute("k")), DimExpr(kFragmentRowBytes)})
                                     .dtypes({DType::kI8})
                                     .strides(StrideRule::kContiguous))
                        .operand(output("out")
                                     .doc("values 0 to 15, each the weight plus 8")
                                     .dims({attribute("n"), attribute("k")})
                                     .dtypes({DType::kU8})
                                     .strides(StrideRule::kContiguous))
                        .int_attribute("n", std::nullopt, "N, columns of the weight matrix", 0)
                        .int_attribute("k", std::nullopt, "K, depth of the weight matrix", 0)
                        .build();
  return std::make_unique<OperatorOver<PackProblem>>(std::move(schema), make_problem<1>, kUnpackKernels);
}

}  // namespace polyop
