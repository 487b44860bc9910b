#include <string>
#include <string_view>

#include "polyop/core/op_registry.h"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append.h"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop {

std::span<const Kernel<QkNormRopeAppendProblem>> qk_norm_rope_append_kernels();

namespace {

enum Operand : int {
  kQ,
  kK,
  kV,
  kKCache,
  kVCache,
  kCosSin,
  kUpdateOffsets,
  kWritePositions,
  kPageTable,
  kPositionIds,
  kQNormWeight,
  kKNormWeight,
  kKScale,
  kVScale,
  kQOut,
};
enum Attribute : int { kEpsilon, kInterleaved, kCacheForm };

OpSchema make_schema() {
  const DimExpr tokens = symbol("T");
  const DimExpr query_heads = symbol("Hq");
  const DimExpr kv_heads = symbol("Hkv");
  const DimExpr head_dim = symbol("D");
  const DimExpr rotary_dim = symbol("Drot");
  const DimExpr table_rows = symbol("Lrot");
  const DimExpr sequences = symbol("B");
  const DimExpr page_size = symbol("R");
  const DimExpr paged_capacity = symbol("W") * page_size;
  const DimExpr linear_capacity = symbol("Lmax");
  const std::vector<Dim> pages = {symbol("P"), page_size, kv_heads, head_dim};
  const std::vector<Dim> linear = {sequences, kv_heads, linear_capacity, head_dim};

  const AttributeCondition is_paged = when("cache_form", "paged");
  const AttributeCondition is_linear = when("cache_form", "linear");

  // Of sequence b: where its first token goes, how many come, and where the last one ends.
  const DimExpr start = element("write_positions");
  const DimExpr new_tokens = element("update_offsets", 1) - element("update_offsets");
  const DimExpr end = start + element("update_offsets", 1) - element("update_offsets");
  // A sequence without tokens touches no page.
  const DimExpr columns = minimum(new_tokens, 1) * ceil_div(end, page_size);

  return SchemaBuilder("qk_norm_rope_append",
                       "RMS norm of each query and key head (optional), rotary embedding of both, and the append of "
                       "keys and values to a paged or linear cache, in one call. Every other element of the cache "
                       "keeps its bits. A token without a slot (position_ids -1, or a row from update_offsets[B] on) "
                       "is left out: nothing that it points to is read.")
      .operand(input("q")
                   .doc("queries")
                   .dims({tokens, query_heads, head_dim})
                   .dtypes({DType::kF32, DType::kF16, DType::kBF16}))
      .operand(input("k")
                   .doc("keys before norm and rotation; left as they are")
                   .dims({tokens, kv_heads, head_dim})
                   .dtype_of("q"))
      .operand(input("v").doc("values").dims({tokens, kv_heads, head_dim}).dtype_of("q"))
      .operand(in_out("k_cache")
                   .doc("key cache: pages, or one row of positions a sequence")
                   .dims_when(is_paged, pages)
                   .dims_when(is_linear, linear)
                   .dtypes_or_that_of({DType::kF8E4M3, DType::kI8}, "q"))
      .operand(in_out("v_cache")
                   .doc("value cache")
                   .dims_when(is_paged, pages)
                   .dims_when(is_linear, linear)
                   .dtype_of("k_cache"))
      .operand(input("cos_sin")
                   .doc("row p: Drot/2 cosines, then Drot/2 sines of the angles of position p")
                   .dims({table_rows, rotary_dim})
                   .dtypes({DType::kF32}))
      .operand(input("update_offsets")
                   .doc("tokens of sequence b are rows update_offsets[b] to update_offsets[b + 1] of q, k and v")
                   .dims({sequences + 1})
                   .dtypes({DType::kI32})
                   .cumulative(tokens))
      .operand(input("write_positions")
                   .doc("cache position of each sequence's first token; absent: 0")
                   .dims({sequences})
                   .dtypes({DType::kI32})
                   .optional()
                   .values_when(is_paged, 0, paged_capacity)
                   .values_when(is_linear, 0, linear_capacity))
      .operand(input("page_table")
                   .doc("page of each run of R positions of each sequence; only the pages written to are read from it")
                   .dims({sequences, symbol("W")})
                   .dtypes({DType::kI32})
                   .required_when(is_paged)
                   .used_values_when(is_paged, 0, symbol("P") - 1, floor_div(start, page_size), columns))
      .operand(input("position_ids")
                   .doc("position of each token in cos_sin, -1: no slot; absent: its position in the cache")
                   .dims({tokens})
                   .dtypes({DType::kI32, DType::kI64})
                   .optional()
                   .values(QkNormRopeAppendProblem::kNoSlot, table_rows - 1))
      .operand(input("q_norm_weight")
                   .doc("weight of the RMS norm of each query head; absent: no norm")
                   .dims({head_dim})
                   .dtypes_or_that_of({DType::kF32}, "q")
                   .optional())
      .operand(input("k_norm_weight")
                   .doc("weight of the RMS norm of each key head")
                   .dims({head_dim})
                   .dtypes_or_that_of({DType::kF32}, "q")
                   .present_with("q_norm_weight"))
      .operand(input("k_scale")
                   .doc("an f8e4m3 or i8 cache stores k / k_scale; absent: 1")
                   .broadcast_dims({kv_heads})
                   .dtypes({DType::kF32})
                   .optional())
      .operand(input("v_scale")
                   .doc("an f8e4m3 or i8 cache stores v / v_scale; absent: 1")
                   .broadcast_dims({kv_heads})
                   .dtypes({DType::kF32})
                   .optional())
      .operand(output("q_out")
                   .doc("normed and rotated queries; may be q itself; rows of tokens without a slot keep their bits")
                   .dims({tokens, query_heads, head_dim})
                   .dtype_of("q")
                   .may_alias("q"))
      .float_attribute("epsilon", 1e-6, "added to the mean square of a head; at least 0")
      .bool_attribute("interleaved", false,
                      "true: pairs are channels (2j, 2j + 1); false: they are (j, j + Drot/2), the half-split form")
      .choice_attribute("cache_form", {{.name = "paged", .number = {}}, {.name = "linear", .number = {}}},
                        "paged: k_cache [P, R, Hkv, D] and a page_table; linear: k_cache [B, Hkv, Lmax, D]")
      .constrain(rotary_dim, Relation::kMultipleOf, 2, "cos_sin", 1)
      .constrain(rotary_dim, Relation::kAtMost, head_dim, "cos_sin", 1)
      .constrain_rows(sequences, end, Relation::kAtMost, paged_capacity, "update_offsets")
      .constrain_rows(sequences, end, Relation::kAtMost, linear_capacity, "update_offsets")
      .build();
}

Status check_arguments(const BoundCall& call) {
  std::string_view scale_name;
  if (call.has(kVScale)) scale_name = "v_scale";
  if (call.has(kKScale)) scale_name = "k_scale";
  POLYOP_RETURN_IF_ERROR(
      check_kv_cache_dtypes("qk_norm_rope_append", call.tensor(kKCache).dtype, call.tensor(kK).dtype, scale_name));
  const double epsilon = call.attributes[kEpsilon].real;
  if (!(epsilon >= 0.0)) {
    return invalid_argument("qk_norm_rope_append: attribute epsilon is " + std::to_string(epsilon) +
                            ", wanted at least 0");
  }
  return Status::ok();
}

/// Without position_ids the cache positions must be rows of cos_sin. On a GPU the kernel checks each of them.
Status check_cache_positions(const QkNormRopeAppendProblem& problem) {
  const KvCacheAppend& append = problem.append;
  for (int64_t b = 0; b < append.num_sequences; ++b) {
    const int64_t tokens = append.token_offset(b + 1) - append.token_offset(b);
    const int64_t end = append.write_position(b) + tokens;
    if (tokens == 0 || end <= problem.rotary.num_positions) continue;
    return invalid_argument("qk_norm_rope_append: cos_sin axis 0 (Lrot) is " +
                            std::to_string(problem.rotary.num_positions) + ", wanted at least " + std::to_string(end) +
                            ": without position_ids the tokens of sequence " + std::to_string(b) +
                            " have their cache positions");
  }
  return Status::ok();
}

/// False for an operand of a graph that has not run.
bool has_values(const BoundCall& call, int operand) {
  return !call.has(operand) || call.tensor(operand).data != nullptr;
}

HeadNorm norm_of(const BoundCall& call, int weight) {
  if (!call.has(weight)) return {};
  return {.weight = call.tensor(weight).data, .weight_dtype = call.tensor(weight).dtype};
}

Status make_problem(const BoundCall& call, QkNormRopeAppendProblem* problem) {
  POLYOP_RETURN_IF_ERROR(check_arguments(call));
  const bool is_paged = call.attributes[kCacheForm].integer == 0;
  const TensorView& q = call.tensor(kQ);
  const TensorView& k = call.tensor(kK);
  const TensorView& v = call.tensor(kV);
  const TensorView& q_out = call.tensor(kQOut);
  const TensorView& cache = call.tensor(kKCache);
  const TensorView& v_cache = call.tensor(kVCache);
  const TensorView& cos_sin = call.tensor(kCosSin);
  *problem = {.append = {.planes = {make_kv_cache_plane(cache, is_paged, k, call.operands[kKScale]),
                                    make_kv_cache_plane(v_cache, is_paged, v, call.operands[kVScale])},
                         .num_planes = 2,
                         .cache_dtype = cache.dtype,
                         .update_dtype = q.dtype,
                         .num_sequences = call.tensor(kUpdateOffsets).shape[0] - 1,
                         .num_kv_heads = k.shape[1],
                         .head_dim = k.shape[2],
                         .page_size = cache.shape[is_paged ? 1 : 2],
                         .num_pages = cache.shape[0],
                         .capacity = cache.shape[is_paged ? 1 : 2],
                         .num_tokens = k.shape[0],
                         .update_offsets = static_cast<const int32_t*>(call.tensor(kUpdateOffsets).data)},
              .rotary = {.rotary_dim = cos_sin.shape[1],
                         .interleaved = call.attributes[kInterleaved].integer != 0,
                         .cos_sin = static_cast<const float*>(cos_sin.data),
                         .cos_sin_stride = cos_sin.strides[0],
                         .num_positions = cos_sin.shape[0]},
              .q = q.data,
              .q_out = q_out.data,
              .num_query_heads = q.shape[1],
              .q_token_stride = q.strides[0],
              .q_head_stride = q.strides[1],
              .q_out_token_stride = q_out.strides[0],
              .q_out_head_stride = q_out.strides[1],
              .q_norm = norm_of(call, kQNormWeight),
              .k_norm = norm_of(call, kKNormWeight),
              .epsilon = static_cast<float>(call.attributes[kEpsilon].real)};
  if (is_paged) {
    const TensorView& table = call.tensor(kPageTable);
    problem->append.page_table = static_cast<const int32_t*>(table.data);
    problem->append.page_table_stride = table.strides[0];
    problem->append.capacity *= table.shape[1];
  }
  if (call.has(kWritePositions)) {
    problem->append.write_positions = static_cast<const int32_t*>(call.tensor(kWritePositions).data);
  }
  if (call.has(kPositionIds)) {
    problem->rotary.position_ids = call.tensor(kPositionIds).data;
    problem->rotary.position_ids_are_i64 = call.tensor(kPositionIds).dtype == DType::kI64;
  } else if (call.device.type == DeviceType::kCpu && has_values(call, kUpdateOffsets) &&
             has_values(call, kWritePositions)) {
    POLYOP_RETURN_IF_ERROR(check_cache_positions(*problem));
  }
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_qk_norm_rope_append_operator() {
  return std::make_unique<OperatorOver<QkNormRopeAppendProblem>>(make_schema(), make_problem,
                                                                 qk_norm_rope_append_kernels());
}

}  // namespace polyop
