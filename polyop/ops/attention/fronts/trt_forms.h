// What TRT_Attention and TRT_QuantizedAttention have in common: tensor forms, lengths, masks.
#pragma once

#include "polyop/core/op_schema.h"
#include "polyop/core/shape_binding.h"
#include "polyop/core/status.h"
#include "polyop/ops/attention/attention_problem.h"

namespace polyop {

/// Where the shared operands stand in a front's schema; -1 has none.
struct TrtOperands {
  int q = 0;
  int k = 1;
  int v = 2;
  int mask = 3;
  int query_lengths = -1;
  int kv_lengths = -1;
  int y = -1;
};

/// Q, K, V and attn_mask, which may be given while `mask_allowed` holds.
void add_trt_inputs(SchemaBuilder& builder, const AttributeCondition& mask_allowed);

/// query_lengths, kv_lengths and Y.
void add_trt_lengths_and_output(SchemaBuilder& builder);

/// query_form, kv_form: attributes 0 and 1.
void add_trt_forms(SchemaBuilder& builder);

/// TRT_decomposable and TRT_normalization_op.
void add_trt_execution(SchemaBuilder& builder);

/// Divisibility and extents of heads, and masks of packed sequences that cover the longest of them.
void add_trt_constraints(SchemaBuilder& builder);

/// Refuses what the schema cannot say: a padded Q with packed K and V, a mask over total tokens.
Status check_trt_forms(const BoundCall& call, const TrtOperands& operands);

/// Fills shapes, pointers, lengths and mask of the problem; causal kind and weights are the front's.
void fill_trt_problem(const BoundCall& call, const TrtOperands& operands, AttentionProblem* problem);

}  // namespace polyop
