#include <string_view>

#include "polyop/core/op_registry.h"
#include "polyop/ops/kv_cache_update/kv_cache_update.h"
#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop {

std::span<const Kernel<KvCacheUpdateProblem>> kv_cache_update_kernels();

namespace {

enum Operand : int {
  kKCache,
  kVCache,
  kK,
  kV,
  kUpdateOffsets,
  kWritePositions,
  kPageTable,
  kKScale,
  kVScale,
};
enum Attribute : int { kCacheForm, kUpdateForm };

OpSchema make_schema() {
  const DimExpr kv_heads = symbol("Hkv");
  const DimExpr head_dim = symbol("D");
  const DimExpr sequences = symbol("B");
  const DimExpr padded_tokens = symbol("S");
  const DimExpr page_size = symbol("R");
  const DimExpr paged_capacity = symbol("W") * page_size;
  const DimExpr linear_capacity = symbol("Lmax");
  const std::vector<Dim> pages = {symbol("P"), page_size, kv_heads, head_dim};
  const std::vector<Dim> linear = {sequences, kv_heads, linear_capacity, head_dim};
  const std::vector<Dim> packed = {symbol("T"), kv_heads, head_dim};
  const std::vector<Dim> padded = {sequences, padded_tokens, kv_heads, head_dim};
  const std::vector<DType> cache_dtypes = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kI8};
  const std::vector<DType> update_dtypes = {DType::kF32, DType::kF16, DType::kBF16};

  const AttributeCondition is_paged = when("cache_form", "paged");
  const AttributeCondition is_linear = when("cache_form", "linear");
  const AttributeCondition is_packed = when("update_form", "packed");
  const AttributeCondition is_padded = when("update_form", "padded");

  // Of sequence b: where its first token goes, how many come, and where the last one ends.
  const DimExpr start = element("write_positions");
  const DimExpr packed_tokens = element("update_offsets", 1) - element("update_offsets");
  const DimExpr packed_end = start + element("update_offsets", 1) - element("update_offsets");
  const DimExpr padded_end = start + padded_tokens;
  // A sequence without tokens touches no page.
  const DimExpr packed_columns = minimum(packed_tokens, 1) * ceil_div(packed_end, page_size);
  const DimExpr padded_columns = minimum(padded_tokens, 1) * ceil_div(padded_end, page_size);

  return SchemaBuilder("kv_cache_update",
                       "Writes the keys and values of each sequence's tokens into its cache from a given position on. "
                       "Every other element of the cache keeps its bits.")
      .operand(in_out("k_cache")
                   .doc("key cache: pages, or one row of positions a sequence")
                   .dims_when(is_paged, pages)
                   .dims_when(is_linear, linear)
                   .dtypes(cache_dtypes))
      .operand(in_out("v_cache")
                   .doc("value cache; absent: keys only")
                   .dims_when(is_paged, pages)
                   .dims_when(is_linear, linear)
                   .dtype_of("k_cache")
                   .optional())
      .operand(input("k")
                   .doc("keys to store: of k_cache's dtype, or any float for an f8e4m3 or i8 cache")
                   .dims_when(is_packed, packed)
                   .dims_when(is_padded, padded)
                   .dtypes(update_dtypes))
      .operand(input("v")
                   .doc("values to store")
                   .dims_when(is_packed, packed)
                   .dims_when(is_padded, padded)
                   .dtype_of("k")
                   .present_with("v_cache"))
      .operand(input("update_offsets")
                   .doc("tokens of sequence b are rows update_offsets[b] to update_offsets[b + 1] of k and v")
                   .dims({sequences + 1})
                   .dtypes({DType::kI32})
                   .required_when(is_packed)
                   .cumulative(symbol("T")))
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
                   .used_values_when(is_packed, 0, symbol("P") - 1, floor_div(start, page_size), packed_columns)
                   .used_values_when(is_padded, 0, symbol("P") - 1, floor_div(start, page_size), padded_columns))
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
      .choice_attribute("cache_form", {{.name = "paged", .number = {}}, {.name = "linear", .number = {}}},
                        "paged: k_cache [P, R, Hkv, D] and a page_table; linear: k_cache [B, Hkv, Lmax, D]")
      .choice_attribute("update_form", {{.name = "packed", .number = {}}, {.name = "padded", .number = {}}},
                        "packed: k [T, Hkv, D] and update_offsets; padded: k [B, S, Hkv, D]")
      .constrain(padded_tokens, Relation::kAtMost, paged_capacity, "k", 1)
      .constrain(padded_tokens, Relation::kAtMost, linear_capacity, "k", 1)
      .constrain_rows(sequences, packed_end, Relation::kAtMost, paged_capacity, "update_offsets")
      .constrain_rows(sequences, packed_end, Relation::kAtMost, linear_capacity, "update_offsets")
      .constrain_rows(sequences, padded_end, Relation::kAtMost, paged_capacity, "write_positions")
      .constrain_rows(sequences, padded_end, Relation::kAtMost, linear_capacity, "write_positions")
      .build();
}

KvCachePlane make_plane(const BoundCall& call, int cache_operand, int update_operand, int scale_operand) {
  const bool is_paged = call.attributes[kCacheForm].integer == 0;
  return make_kv_cache_plane(call.tensor(cache_operand), is_paged, call.tensor(update_operand),
                             call.operands[scale_operand]);
}

Status check_dtypes(const BoundCall& call) {
  std::string_view scale_name;
  if (call.has(kVScale)) scale_name = "v_scale";
  if (call.has(kKScale)) scale_name = "k_scale";
  POLYOP_RETURN_IF_ERROR(
      check_kv_cache_dtypes("kv_cache_update", call.tensor(kKCache).dtype, call.tensor(kK).dtype, scale_name));
  if (call.has(kVScale) && !call.has(kVCache)) {
    return invalid_argument("kv_cache_update: v_scale is given without v_cache");
  }
  return Status::ok();
}

Status make_problem(const BoundCall& call, KvCacheUpdateProblem* problem) {
  POLYOP_RETURN_IF_ERROR(check_dtypes(call));
  const bool is_paged = call.attributes[kCacheForm].integer == 0;
  const TensorView& cache = call.tensor(kKCache);
  const TensorView& update = call.tensor(kK);
  *problem = {.planes = {make_plane(call, kKCache, kK, kKScale)},
              .num_planes = 1,
              .cache_dtype = cache.dtype,
              .update_dtype = update.dtype,
              .num_kv_heads = cache.shape[is_paged ? 2 : 1],
              .head_dim = cache.shape[3],
              .page_size = cache.shape[is_paged ? 1 : 2]};
  if (call.has(kVCache)) {
    problem->planes[1] = make_plane(call, kVCache, kV, kVScale);
    problem->num_planes = 2;
  }
  if (is_paged) {
    const TensorView& table = call.tensor(kPageTable);
    problem->page_table = static_cast<const int32_t*>(table.data);
    problem->page_table_stride = table.strides[0];
    problem->num_sequences = table.shape[0];
    problem->capacity = table.shape[1] * problem->page_size;
  } else {
    problem->capacity = problem->page_size;
    problem->num_sequences = cache.shape[0];
  }
  problem->num_pages = cache.shape[0];
  problem->num_tokens = update.shape[0] * (call.has(kUpdateOffsets) ? 1 : update.shape[1]);
  if (call.has(kUpdateOffsets)) {
    problem->update_offsets = static_cast<const int32_t*>(call.tensor(kUpdateOffsets).data);
  } else {
    problem->padded_tokens = update.shape[1];
  }
  if (call.has(kWritePositions)) {
    problem->write_positions = static_cast<const int32_t*>(call.tensor(kWritePositions).data);
  }
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_kv_cache_update_operator() {
  return std::make_unique<OperatorOver<KvCacheUpdateProblem>>(make_schema(), make_problem, kv_cache_update_kernels());
}

}  // namespace polyop
