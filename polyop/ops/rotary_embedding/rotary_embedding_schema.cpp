#include <string>

#include "polyop/core/op_registry.h"
#include "polyop/ops/rotary_embedding/rotary_embedding.h"
#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

namespace polyop {

std::span<const Kernel<RotaryEmbeddingProblem>> rotary_embedding_kernels();

namespace {

enum Operand : int { kQ, kK, kCosSin, kPositionIds, kQOut, kKOut };
enum Attribute : int { kInterleaved };

OpSchema make_schema() {
  const DimExpr tokens = symbol("T");
  const DimExpr query_heads = symbol("Hq");
  const DimExpr kv_heads = symbol("Hkv");
  const DimExpr head_dim = symbol("D");
  const DimExpr rotary_dim = symbol("Drot");
  return SchemaBuilder("rotary_embedding",
                       "Rotates pairs of channels of each query and key head by the angles of the token's position. "
                       "Channels from Drot on pass through. The outputs may be the inputs themselves.")
      .operand(input("q")
                   .doc("queries")
                   .dims({tokens, query_heads, head_dim})
                   .dtypes({DType::kF32, DType::kF16, DType::kBF16}))
      .operand(input("k").doc("keys").dims({tokens, kv_heads, head_dim}).dtype_of("q").optional())
      .operand(input("cos_sin")
                   .doc("row p: Drot/2 cosines, then Drot/2 sines of the angles of position p")
                   .dims({symbol("Lmax"), rotary_dim})
                   .dtypes({DType::kF32}))
      .operand(input("position_ids")
                   .doc("position of each token; absent: token t has position t")
                   .dims({tokens})
                   .dtypes({DType::kI32, DType::kI64})
                   .optional()
                   .values(0, symbol("Lmax") - 1))
      .operand(output("q_out")
                   .doc("rotated queries; may be q itself")
                   .dims({tokens, query_heads, head_dim})
                   .dtype_of("q")
                   .may_alias("q"))
      .operand(output("k_out")
                   .doc("rotated keys; may be k itself")
                   .dims({tokens, kv_heads, head_dim})
                   .dtype_of("q")
                   .present_with("k")
                   .may_alias("k"))
      .bool_attribute("interleaved", false,
                      "true: pairs are channels (2j, 2j + 1); false: they are (j, j + Drot/2), the half-split form")
      .constrain(rotary_dim, Relation::kMultipleOf, 2, "cos_sin", 1)
      .constrain(rotary_dim, Relation::kAtMost, head_dim, "cos_sin", 1)
      .build();
}

RotaryHeads heads_of(const TensorView& x, const TensorView& out) {
  return {.x = x.data,
          .out = out.data,
          .num_heads = x.shape[1],
          .x_token_stride = x.strides[0],
          .x_head_stride = x.strides[1],
          .out_token_stride = out.strides[0],
          .out_head_stride = out.strides[1]};
}

Status make_problem(const BoundCall& call, RotaryEmbeddingProblem* problem) {
  const TensorView& q = call.tensor(kQ);
  const TensorView& cos_sin = call.tensor(kCosSin);
  if (!call.has(kPositionIds) && cos_sin.shape[0] < q.shape[0]) {
    return invalid_argument("rotary_embedding: cos_sin axis 0 (Lmax) is " + std::to_string(cos_sin.shape[0]) +
                            ", wanted at least T = " + std::to_string(q.shape[0]) +
                            ": without position_ids token t has position t");
  }
  problem->heads[0] = heads_of(q, call.tensor(kQOut));
  problem->dtype = q.dtype;
  problem->num_tokens = q.shape[0];
  problem->head_dim = q.shape[2];
  problem->rotary_dim = cos_sin.shape[1];
  problem->interleaved = call.attributes[kInterleaved].integer != 0;
  problem->cos_sin = static_cast<const float*>(cos_sin.data);
  problem->cos_sin_stride = cos_sin.strides[0];
  problem->num_positions = cos_sin.shape[0];
  if (call.has(kK)) {
    problem->heads[1] = heads_of(call.tensor(kK), call.tensor(kKOut));
    problem->num_inputs = 2;
  }
  if (call.has(kPositionIds)) {
    problem->position_ids = call.tensor(kPositionIds).data;
    problem->position_ids_are_i64 = call.tensor(kPositionIds).dtype == DType::kI64;
  }
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_rotary_embedding_operator() {
  return std::make_unique<OperatorOver<RotaryEmbeddingProblem>>(make_schema(), make_problem,
                                                                rotary_embedding_kernels());
}

}  // namespace polyop
