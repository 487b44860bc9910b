#include <string>

#include "polyop/core/op_registry.h"
#include "polyop/ops/attention/attention.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/attention_problem.h"

namespace polyop {
namespace {

enum Operand : int {
  kQ,
  kK,
  kV,
  kQueryOffsets,
  kKvLengths,
  kKvOffsets,
  kPageTable,
  kMask,
  kTreeMask,
  kSinks,
  kKScale,
  kVScale,
  kOutputScale,
  kOut,
  kLse,
};
enum Attribute : int { kQueryForm, kKvForm, kCausal, kWindow, kScale, kNormalization, kReturnLse };

// Order of the choices of the attributes below.
constexpr AttentionQueryForm kQueryForms[] = {AttentionQueryForm::kPacked, AttentionQueryForm::kPadded};
constexpr AttentionKvForm kKvForms[] = {AttentionKvForm::kPaged, AttentionKvForm::kPacked, AttentionKvForm::kPadded};
constexpr AttentionCausal kCausals[] = {AttentionCausal::kLowerRight, AttentionCausal::kUpperLeft,
                                        AttentionCausal::kNone};
constexpr AttentionNormalization kNormalizations[] = {AttentionNormalization::kSoftmax, AttentionNormalization::kNone};

OpSchema make_schema() {
  const DimExpr sequences = symbol("B");
  const DimExpr padded_rows = symbol("S");
  const DimExpr packed_rows = symbol("T");
  const DimExpr query_heads = symbol("Hq");
  const DimExpr kv_heads = symbol("Hkv");
  const DimExpr head_dim = symbol("D");
  const DimExpr value_head_dim = symbol("Dv");
  const DimExpr pages = symbol("P");
  const DimExpr page_size = symbol("R");
  const DimExpr table_width = symbol("W");
  const DimExpr packed_keys = symbol("Tkv");
  const DimExpr padded_keys = symbol("Lmax");
  const DimExpr tree_words = symbol("tree_words");
  const std::vector<DType> floats = {DType::kF32, DType::kF16, DType::kBF16};

  const AttributeCondition packed_query = when("query_form", "packed");
  const AttributeCondition padded_query = when("query_form", "padded");
  const AttributeCondition paged_kv = when("kv_form", "paged");
  const AttributeCondition packed_kv = when("kv_form", "packed");
  const AttributeCondition padded_kv = when("kv_form", "padded");

  return SchemaBuilder(
             "attention",
             "softmax(scale q k^T) v for each sequence, query head h reading kv head h / (Hq / Hkv). A row with no "
             "visible key gives 0 and log-sum-exp -inf, and so do packed rows past query_offsets[B].")
      .operand(input("q")
                   .doc("queries")
                   .dims_when(packed_query, {packed_rows, query_heads, head_dim})
                   .dims_when(padded_query, {sequences, padded_rows, query_heads, head_dim})
                   .dtypes(floats))
      .operand(input("k")
                   .doc("keys, of q's dtype or quantized")
                   .dims_when(paged_kv, {pages, page_size, kv_heads, head_dim})
                   .dims_when(packed_kv, {packed_keys, kv_heads, head_dim})
                   .dims_when(padded_kv, {sequences, padded_keys, kv_heads, head_dim})
                   .dtypes_or_that_of({DType::kF8E4M3, DType::kI8}, "q"))
      .operand(input("v")
                   .doc("values; their head size may differ from that of the keys")
                   .dims_when(paged_kv, {pages, page_size, kv_heads, value_head_dim})
                   .dims_when(packed_kv, {packed_keys, kv_heads, value_head_dim})
                   .dims_when(padded_kv, {sequences, padded_keys, kv_heads, value_head_dim})
                   .dtype_of("k"))
      .operand(input("query_offsets")
                   .doc("rows of sequence b are query_offsets[b] to query_offsets[b + 1] of q")
                   .dims({sequences + 1})
                   .dtypes({DType::kI32})
                   .required_when(packed_query)
                   .cumulative(packed_rows))
      .operand(
          input("kv_lengths")
              .doc("cached keys of each sequence, those of its query rows included; absent with padded k: all Lmax")
              .dims({sequences})
              .dtypes({DType::kI32})
              .required_when(paged_kv)
              .optional_when(padded_kv)
              .values_when(paged_kv, 0, table_width * page_size)
              .values_when(padded_kv, 0, padded_keys))
      .operand(input("kv_offsets")
                   .doc("keys of sequence b are kv_offsets[b] to kv_offsets[b + 1] of k and v")
                   .dims({sequences + 1})
                   .dtypes({DType::kI32})
                   .required_when(packed_kv)
                   .cumulative(packed_keys))
      .operand(input("page_table")
                   .doc("page of each run of R keys of each sequence; entries past its length are not read")
                   .dims({sequences, table_width})
                   .dtypes({DType::kI32})
                   .required_when(paged_kv)
                   .used_values(0, pages - 1, ceil_div(element("kv_lengths"), page_size)))
      .operand(input("mask")
                   .doc("bool: true = visible; float: added to the scores, -inf hides. Only with padded q, k and v")
                   .broadcast_dims_when(padded_query, {sequences, query_heads, padded_rows, padded_keys})
                   .dtypes_or_that_of({DType::kBool}, "q")
                   .strides(StrideRule::kAny)
                   .optional_when(padded_kv))
      .operand(input("tree_mask")
                   .doc("bit c (least significant first) of a query row's words: it may see key kv_length - N + c, N "
                        "being its sequence's rows; earlier keys are always visible")
                   .dims_when(packed_query, {packed_rows, tree_words})
                   .dims_when(padded_query, {sequences * padded_rows, tree_words})
                   .dtypes({DType::kI32})
                   .optional())
      .operand(input("sinks")
                   .doc("logit of each query head that joins the softmax denominator only")
                   .dims({query_heads})
                   .dtypes({DType::kF32})
                   .optional())
      .operand(input("k_scale")
                   .doc("keys are k * k_scale, for each kv head or all; absent: 1")
                   .broadcast_dims({kv_heads})
                   .dtypes({DType::kF32})
                   .optional())
      .operand(input("v_scale")
                   .doc("values are v * v_scale, for each kv head or all; absent: 1")
                   .broadcast_dims({kv_heads})
                   .dtypes({DType::kF32})
                   .optional())
      .operand(input("output_scale")
                   .doc("an f8e4m3 output stores out / output_scale; absent: 1")
                   .dims({DimExpr(1)})
                   .dtypes({DType::kF32})
                   .optional())
      .operand(output("out")
                   .doc("result, of q's dtype, or f8e4m3 where the caller gives it so")
                   .dims_when(packed_query, {packed_rows, query_heads, value_head_dim})
                   .dims_when(padded_query, {sequences, padded_rows, query_heads, value_head_dim})
                   .dtypes_or_that_of({DType::kF8E4M3}, "q"))
      .operand(output("lse")
                   .doc("natural logarithm of the softmax denominator, sinks included")
                   .dims_when(packed_query, {packed_rows, query_heads})
                   .dims_when(padded_query, {sequences, padded_rows, query_heads})
                   .dtypes({DType::kF32})
                   .required_when(when("return_lse", true)))
      .choice_attribute("query_form", {{.name = "packed", .number = {}}, {.name = "padded", .number = {}}},
                        "packed: q [T, Hq, D] and query_offsets; padded: q [B, S, Hq, D]")
      .choice_attribute(
          "kv_form",
          {{.name = "paged", .number = {}}, {.name = "packed", .number = {}}, {.name = "padded", .number = {}}},
          "paged: k [P, R, Hkv, D], page_table and kv_lengths; packed: k [Tkv, Hkv, D] and kv_offsets; "
          "padded: k [B, Lmax, Hkv, D]")
      .choice_attribute(
          "causal",
          {{.name = "lower_right", .number = {}}, {.name = "upper_left", .number = {}}, {.name = "none", .number = {}}},
          "lower_right: row i of s_q sees keys up to i + s_kv - s_q; upper_left: up to i")
      .int_attribute("window", -1, "keys that a row sees, its own position included; -1: all", -1)
      .rsqrt_attribute("scale", head_dim, "factor of the scores")
      .choice_attribute("normalization", {{.name = "softmax", .number = {}}, {.name = "none", .number = {}}},
                        "none: the scaled scores are the weights")
      .bool_attribute("return_lse", false, "whether lse is wanted")
      .constrain(1, Relation::kAtMost, query_heads, "q", -2)
      .constrain(1, Relation::kAtMost, kv_heads, "k", -2)
      .constrain(1, Relation::kAtMost, head_dim, "q", -1)
      .constrain(query_heads, Relation::kMultipleOf, kv_heads, "k", -2)
      .constrain(1, Relation::kAtMost, page_size, "k", 1)
      .constrain(ceil_div(padded_rows, 32), Relation::kAtMost, tree_words, "tree_mask", 1)
      .constrain_rows(sequences, ceil_div(element("query_offsets", 1) - element("query_offsets"), 32),
                      Relation::kAtMost, tree_words, "tree_mask")
      .build();
}

const TensorView* given(const BoundCall& call, int operand) {
  return call.has(operand) ? &call.tensor(operand) : nullptr;
}

template <class T>
const T* data_of(const BoundCall& call, int operand) {
  return call.has(operand) ? static_cast<const T*>(call.tensor(operand).data) : nullptr;
}

// Rows of heads of an operand [outer, rows, heads, width] or [rows, heads, width]; `inner_axes` follow the heads.
HeadRows head_rows(const TensorView& tensor, int inner_axes) {
  const int head_axis = tensor.rank - 1 - inner_axes;
  return {.data = tensor.data,
          .dtype = tensor.dtype,
          .outer_stride = head_axis == 2 ? tensor.strides[0] : 0,
          .row_stride = tensor.strides[head_axis - 1],
          .head_stride = tensor.strides[head_axis]};
}

AttentionKvScale kv_scale(const TensorView* scale) {
  if (scale == nullptr) return {};
  return {.data = static_cast<const float*>(scale->data),
          .head_stride = scale->rank == 1 && scale->shape[0] > 1 ? scale->strides[0] : 0};
}

AttentionMask dense_mask(const TensorView* mask) {
  if (mask == nullptr) return {};
  // Right-aligned: missing leading axes and axes of extent 1 are shared by all.
  const auto stride = [&](int axis_from_last) -> int64_t {
    const int axis = mask->rank - 1 - axis_from_last;
    return axis < 0 || mask->shape[axis] == 1 ? 0 : mask->strides[axis];
  };
  return {.data = mask->data,
          .dtype = mask->dtype,
          .sequence_stride = stride(3),
          .head_stride = stride(2),
          .row_stride = stride(1),
          .key_stride = stride(0)};
}

Status check_combinations(const BoundCall& call) {
  const TensorView& out = call.tensor(kOut);
  if (call.has(kOutputScale) && out.dtype != DType::kF8E4M3) {
    return invalid_argument("attention: output_scale is given, but belongs only to an f8e4m3 out; out is " +
                            std::string(dtype_name(out.dtype)));
  }
  if (kNormalizations[call.attributes[kNormalization].integer] == AttentionNormalization::kSoftmax) return Status::ok();
  if (call.has(kSinks)) return invalid_argument("attention: sinks belong only to normalization = softmax");
  if (call.has(kLse)) return invalid_argument("attention: lse belongs only to normalization = softmax");
  return Status::ok();
}

Status make_problem(const BoundCall& call, AttentionProblem* problem) {
  POLYOP_RETURN_IF_ERROR(check_combinations(call));
  const TensorView& q = call.tensor(kQ);
  const TensorView& k = call.tensor(kK);
  const TensorView& v = call.tensor(kV);
  AttentionProblem& p = *problem;
  p = {};
  p.query_form = kQueryForms[call.attributes[kQueryForm].integer];
  p.kv_form = kKvForms[call.attributes[kKvForm].integer];
  p.num_query_heads = q.shape[q.rank - 2];
  p.num_kv_heads = k.shape[k.rank - 2];
  p.head_dim = q.shape[q.rank - 1];
  p.value_head_dim = v.shape[v.rank - 1];

  p.q = head_rows(q, 1);
  p.out = head_rows(call.tensor(kOut), 1);
  if (call.has(kLse)) p.lse = head_rows(call.tensor(kLse), 0);
  if (p.query_form == AttentionQueryForm::kPacked) {
    p.num_sequences = call.tensor(kQueryOffsets).shape[0] - 1;
    p.num_query_rows = q.shape[0];
    p.query_offsets = data_of<int32_t>(call, kQueryOffsets);
  } else {
    p.num_sequences = q.shape[0];
    p.padded_query_length = q.shape[1];
    p.num_query_rows = q.shape[0] * q.shape[1];
  }
  p.output_scale = data_of<float>(call, kOutputScale);

  p.k = head_rows(k, 1);
  p.v = head_rows(v, 1);
  p.k_scale = kv_scale(given(call, kKScale));
  p.v_scale = kv_scale(given(call, kVScale));
  p.kv_lengths = data_of<int32_t>(call, kKvLengths);
  p.kv_offsets = data_of<int32_t>(call, kKvOffsets);
  if (p.kv_form == AttentionKvForm::kPaged) {
    const TensorView& table = call.tensor(kPageTable);
    p.page_table = static_cast<const int32_t*>(table.data);
    p.page_table_stride = table.strides[0];
    p.num_pages = k.shape[0];
    p.page_size = k.shape[1];
    p.kv_capacity = table.shape[1] * p.page_size;
  } else {
    p.kv_capacity = k.shape[p.kv_form == AttentionKvForm::kPadded ? 1 : 0];
  }

  p.causal = kCausals[call.attributes[kCausal].integer];
  p.window = call.attributes[kWindow].integer;
  p.mask = dense_mask(given(call, kMask));
  if (const TensorView* tree = given(call, kTreeMask)) {
    p.tree_mask = {.words = static_cast<const int32_t*>(tree->data), .row_stride = tree->strides[0]};
    p.most_rows = tree->shape[1] * 32;
  }
  p.scale = static_cast<float>(call.attributes[kScale].real);
  p.sinks = data_of<float>(call, kSinks);
  p.normalization = kNormalizations[call.attributes[kNormalization].integer];
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_attention_operator() {
  return std::make_unique<OperatorOver<AttentionProblem>>(make_schema(), make_problem, attention_kernels());
}

}  // namespace polyop
