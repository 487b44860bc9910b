#include "polyop/ops/attention/fronts/trt_forms.h"

#include <string>

namespace polyop {
namespace {

// Order of the choices of query_form and kv_form.
enum Form : int64_t { kPadded, kPacked };
enum Attribute : int { kQueryForm, kKvForm };

const char* const kPaddedName = "padded_bhnd";
const char* const kPackedName = "packed_nhd";

// Symbols: Lmax is the padded key axis; mask_rows and mask_keys are extents of a mask over packed sequences.
DimExpr sequences() { return symbol("B"); }
DimExpr query_heads() { return symbol("Hq"); }
DimExpr kv_heads() { return symbol("Hkv"); }
DimExpr head_dim() { return symbol("D"); }
DimExpr padded_rows() { return symbol("S"); }
DimExpr packed_rows() { return symbol("T"); }
DimExpr padded_keys() { return symbol("Lmax"); }
DimExpr packed_keys() { return symbol("Tkv"); }

AttributeCondition padded_query() { return when("query_form", kPaddedName); }
AttributeCondition packed_query() { return when("query_form", kPackedName); }
AttributeCondition padded_kv() { return when("kv_form", kPaddedName); }
AttributeCondition packed_kv() { return when("kv_form", kPackedName); }

OperandSchema kv_operand(const char* name, const char* doc) {
  return input(name)
      .doc(doc)
      .dims_when(padded_kv(), {sequences(), kv_heads(), padded_keys(), head_dim()})
      .dims_when(packed_kv(), {packed_keys(), kv_heads(), head_dim()})
      .dtype_of("Q");
}

// Rows of heads of a padded [B, H, N, D] or packed [T, H, D] tensor.
HeadRows head_rows(const TensorView& tensor) {
  const bool padded = tensor.rank == 4;
  return {.data = tensor.data,
          .dtype = tensor.dtype,
          .outer_stride = padded ? tensor.strides[0] : 0,
          .row_stride = tensor.strides[padded ? 2 : 0],
          .head_stride = tensor.strides[1]};
}

const int32_t* lengths_of(const BoundCall& call, int operand) {
  return call.has(operand) ? static_cast<const int32_t*>(call.tensor(operand).data) : nullptr;
}

/// Extent of a mask's axis, counted from the last; 1 where it is missing.
int64_t mask_extent(const TensorView& mask, int axis_from_last) {
  const int axis = mask.rank - 1 - axis_from_last;
  return axis < 0 ? 1 : mask.shape[axis];
}

}  // namespace

void add_trt_inputs(SchemaBuilder& builder, const AttributeCondition& mask_allowed) {
  builder
      .operand(input("Q")
                   .doc("queries")
                   .dims_when(padded_query(), {sequences(), query_heads(), padded_rows(), head_dim()})
                   .dims_when(packed_query(), {packed_rows(), query_heads(), head_dim()})
                   .dtypes({DType::kF32, DType::kF16, DType::kBF16}))
      .operand(kv_operand("K", "keys"))
      .operand(kv_operand("V", "values"))
      .operand(input("attn_mask")
                   .doc("bool: true = may attend; otherwise added to the scores, -inf hides. Of packed sequences: rows "
                        "and keys inside each sequence, at least as many as the longest has")
                   .broadcast_dims_when(padded_query(), {sequences(), query_heads(), padded_rows(), padded_keys()})
                   .broadcast_dims_when(padded_kv(), {sequences(), query_heads(), symbol("mask_rows"), padded_keys()})
                   .broadcast_dims({sequences(), query_heads(), symbol("mask_rows"), symbol("mask_keys")})
                   .dtypes_or_that_of({DType::kBool}, "Q")
                   .strides(StrideRule::kAny)
                   .optional_when(mask_allowed));
}

void add_trt_lengths_and_output(SchemaBuilder& builder) {
  builder
      .operand(
          input("query_lengths")
              .doc("packed: rows of sequence b are query_lengths[b] to query_lengths[b + 1] of Q; padded: not used")
              .dims({sequences() + 1})
              .dtypes({DType::kI32})
              .required_when(packed_query())
              .optional()
              .cumulative_when(packed_query(), packed_rows()))
      .operand(input("kv_lengths")
                   .doc("packed: keys of sequence b are kv_lengths[b] to kv_lengths[b + 1] of K and V; padded: number "
                        "of keys of each sequence, absent: all")
                   .dims_when(packed_kv(), {sequences() + 1})
                   .dims_when(padded_kv(), {sequences()})
                   .dtypes({DType::kI32})
                   .required_when(packed_kv())
                   .optional()
                   .cumulative_when(packed_kv(), packed_keys())
                   .values_when(padded_kv(), 0, padded_keys()))
      .operand(output("Y")
                   .doc("result, in Q's form")
                   .dims_when(padded_query(), {sequences(), query_heads(), padded_rows(), head_dim()})
                   .dims_when(packed_query(), {packed_rows(), query_heads(), head_dim()})
                   .dtype_of("Q"));
}

void add_trt_forms(SchemaBuilder& builder) {
  const std::vector<Choice> forms = {{.name = kPaddedName, .number = {}}, {.name = kPackedName, .number = {}}};
  builder.choice_attribute("query_form", forms, "padded_bhnd: Q and Y [B, Hq, S, D]; packed_nhd: [T, Hq, D]")
      .choice_attribute("kv_form", forms, "padded_bhnd: K and V [B, Hkv, Lmax, D]; packed_nhd: [Tkv, Hkv, D]");
}

void add_trt_execution(SchemaBuilder& builder) {
  builder
      .bool_attribute("TRT_decomposable", false,
                      "whether TensorRT may use several kernels; the result does not depend on it")
      .choice_attribute("TRT_normalization_op", {{.name = "softmax", .number = {}}, {.name = "none", .number = {}}},
                        "none: the scores are the weights, those of hidden keys 0");
}

void add_trt_constraints(SchemaBuilder& builder) {
  const auto length_of = [](const char* operand) { return element(operand, 1) - element(operand); };
  builder.constrain(1, Relation::kAtMost, query_heads(), "Q", 1)
      .constrain(1, Relation::kAtMost, kv_heads(), "K", 1)
      .constrain(1, Relation::kAtMost, head_dim(), "Q", -1)
      .constrain(query_heads(), Relation::kMultipleOf, kv_heads(), "K", 1)
      .constrain_rows(sequences(), length_of("query_lengths"), Relation::kAtMost, symbol("mask_rows"), "attn_mask")
      .constrain_rows(sequences(), length_of("kv_lengths"), Relation::kAtMost, symbol("mask_keys"), "attn_mask");
}

Status check_trt_forms(const BoundCall& call, const TrtOperands& operands) {
  const std::string& name = call.schema->name();
  const bool query_is_packed = call.attributes[kQueryForm].integer == kPacked;
  const bool kv_is_packed = call.attributes[kKvForm].integer == kPacked;
  if (kv_is_packed && !query_is_packed) {
    return invalid_argument(name + ": kv_form is packed_nhd and query_form padded_bhnd, wanted a packed query_form");
  }
  if (!kv_is_packed || !call.has(operands.mask)) return Status::ok();
  // [T, Tkv] over several sequences: nobody says whether its rows count tokens of the batch or of one sequence.
  const TensorView& mask = call.tensor(operands.mask);
  const int64_t rows = call.tensor(operands.q).shape[0];
  const int64_t keys = call.tensor(operands.k).shape[0];
  const bool is_total = mask_extent(mask, 1) == rows && mask_extent(mask, 0) == keys && rows * keys > 1;
  if (is_total && mask_extent(mask, 3) == 1 && call.extent("B") > 1) {
    return invalid_argument(name + ": attn_mask covers all " + std::to_string(rows) + " x " + std::to_string(keys) +
                            " packed tokens, wanted rows and keys inside each sequence");
  }
  return Status::ok();
}

void fill_trt_problem(const BoundCall& call, const TrtOperands& operands, AttentionProblem* problem) {
  const TensorView& q = call.tensor(operands.q);
  const TensorView& k = call.tensor(operands.k);
  AttentionProblem& p = *problem;
  p = {};
  const bool query_is_packed = call.attributes[kQueryForm].integer == kPacked;
  const bool kv_is_packed = call.attributes[kKvForm].integer == kPacked;
  p.query_form = query_is_packed ? AttentionQueryForm::kPacked : AttentionQueryForm::kPadded;
  p.kv_form = kv_is_packed ? AttentionKvForm::kPacked : AttentionKvForm::kPadded;
  p.num_sequences = call.extent("B");
  p.num_query_heads = q.shape[1];
  p.num_kv_heads = k.shape[1];
  p.head_dim = q.shape[q.rank - 1];
  p.value_head_dim = p.head_dim;

  p.q = head_rows(q);
  p.out = head_rows(call.tensor(operands.y));
  if (query_is_packed) {
    p.num_query_rows = q.shape[0];
    p.query_offsets = lengths_of(call, operands.query_lengths);
  } else {
    p.padded_query_length = q.shape[2];
    p.num_query_rows = q.shape[0] * q.shape[2];
  }

  p.k = head_rows(k);
  p.v = head_rows(call.tensor(operands.v));
  (kv_is_packed ? p.kv_offsets : p.kv_lengths) = lengths_of(call, operands.kv_lengths);
  p.kv_capacity = k.shape[kv_is_packed ? 0 : 2];

  if (!call.has(operands.mask)) return;
  const TensorView& mask = call.tensor(operands.mask);
  // Right-aligned: missing leading axes and axes of extent 1 are shared by all.
  const auto stride = [&](int axis_from_last) {
    return mask_extent(mask, axis_from_last) == 1 ? 0 : mask.strides[mask.rank - 1 - axis_from_last];
  };
  p.mask = {.data = mask.data,
            .dtype = mask.dtype,
            .sequence_stride = stride(3),
            .head_stride = stride(2),
            .row_stride = stride(1),
            .key_stride = stride(0)};
  if (mask_extent(mask, 1) > 1) p.most_rows = mask_extent(mask, 1);
  if (mask_extent(mask, 0) > 1) p.most_keys = mask_extent(mask, 0);
}

}  // namespace polyop
