// TRT_KVCacheUpdate: Y = past_cache with the rows of the update written from each sequence's write index on. Y may be
// the memory of past_cache; otherwise the cache is copied first. Rows that fall outside of the cache are left out.
#include "polyop/ops/kv_cache_update/fronts/trt_kv_cache_update.h"

#include <cstring>
#include <limits>
#include <string>

#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop {
namespace {

enum Operand : int { kPastCache, kUpdate, kWriteIndices, kUpdateLengths, kY };
enum Attribute : int { kUpdateForm, kMode, kAxis };

constexpr int64_t kSequenceAxis = 2;
constexpr int kCacheRank = 4;

/// The update, and the cache that Y starts from.
struct CacheUpdate {
  KvCacheUpdateProblem update;
  TensorView past;
  TensorView result;
};

OpSchema make_schema() {
  const DimExpr sequences = symbol("B");
  const DimExpr update_sequences = symbol("Bu");
  const DimExpr heads = symbol("Hkv");
  const DimExpr capacity = symbol("Lmax");
  const DimExpr head_dim = symbol("D");
  const DimExpr padded_tokens = symbol("S");
  const DimExpr packed_tokens = symbol("T");
  const AttributeCondition padded = when("update_form", "padded_bhnd");
  const AttributeCondition packed = when("update_form", "packed_nhd");
  return SchemaBuilder("trt_kv_cache_update",
                       "past_cache with each sequence's new rows written from its write index on: TensorRT's "
                       "TRT_KVCacheUpdate. Rows past the end of the cache are left out; everything else keeps its "
                       "bits.")
      .operand(input("past_cache")
                   .doc("the cache so far")
                   .dims({sequences, heads, capacity, head_dim})
                   .dtypes({DType::kF32, DType::kF16, DType::kBF16}))
      .operand(input("update")
                   .doc("rows to write; of fewer sequences than the cache has: the others stay")
                   .dims_when(padded, {update_sequences, heads, padded_tokens, head_dim})
                   .dims_when(packed, {packed_tokens, heads, head_dim})
                   .dtype_of("past_cache"))
      .operand(input("write_indices")
                   .doc("position of each sequence's first new row; absent: 0")
                   .dims({update_sequences})
                   .dtypes({DType::kI32})
                   .optional()
                   .values(0, std::numeric_limits<int32_t>::max()))
      .operand(input("update_lengths")
                   .doc("rows of sequence b are update_lengths[b] to update_lengths[b + 1] of update")
                   .dims({update_sequences + 1})
                   .dtypes({DType::kI32})
                   .required_when(packed)
                   .cumulative(packed_tokens))
      .operand(output("Y")
                   .doc("the cache afterwards; may be past_cache itself")
                   .dims({sequences, heads, capacity, head_dim})
                   .dtype_of("past_cache")
                   .may_alias("past_cache"))
      .choice_attribute("update_form", {{.name = "padded_bhnd", .number = {}}, {.name = "packed_nhd", .number = {}}},
                        "padded_bhnd: update [Bu, Hkv, S, D], every row is written; packed_nhd: [T, Hkv, D]")
      .choice_attribute("mode", {{.name = "linear", .number = {}}}, "linear: no wrap at the end of the cache")
      .int_attribute("axis", kSequenceAxis - kCacheRank, "axis of the cache that rows are written along")
      .constrain(update_sequences, Relation::kAtMost, sequences, "update", 0)
      .constrain(padded_tokens, Relation::kAtMost, capacity, "update", 2)
      .build();
}

Status make_problem(const BoundCall& call, CacheUpdate* problem) {
  const int64_t axis = call.attributes[kAxis].integer;
  if (axis != kSequenceAxis && axis != kSequenceAxis - kCacheRank) {
    return invalid_argument("trt_kv_cache_update: attribute axis is " + std::to_string(axis) +
                            ", wanted -2 (or 2, the same axis)");
  }
  const TensorView& update = call.tensor(kUpdate);
  const TensorView& result = call.tensor(kY);
  const bool is_packed = call.attributes[kUpdateForm].integer != 0;
  const auto numbers = [&call](int operand) {
    return call.has(operand) ? static_cast<const int32_t*>(call.tensor(operand).data) : nullptr;
  };
  problem->past = call.tensor(kPastCache);
  problem->result = result;
  problem->update = {.planes = {KvCachePlane{.cache = result.data,
                                             .page_stride = result.strides[0],
                                             .row_stride = result.strides[2],
                                             .cache_head_stride = result.strides[1],
                                             .update = update.data,
                                             .update_sequence_stride = is_packed ? 0 : update.strides[0],
                                             .update_token_stride = update.strides[is_packed ? 0 : 2],
                                             .update_head_stride = update.strides[1]}},
                     .num_planes = 1,
                     .cache_dtype = result.dtype,
                     .update_dtype = update.dtype,
                     .num_sequences = is_packed ? call.tensor(kUpdateLengths).shape[0] - 1 : update.shape[0],
                     .num_kv_heads = result.shape[1],
                     .head_dim = result.shape[3],
                     .page_size = result.shape[kSequenceAxis],
                     .padded_tokens = is_packed ? 0 : update.shape[2],
                     .update_offsets = numbers(kUpdateLengths),
                     .write_positions = numbers(kWriteIndices),
                     .skips_outside = true};
  return Status::ok();
}

/// Copies the rows of the cache to Y unless both are one.
void copy_cache(const CacheUpdate& problem) {
  const TensorView& from = problem.past;
  const TensorView& to = problem.result;
  if (from.data == to.data) return;
  const int64_t item = dtype_bytes(to.dtype);
  if (from.is_contiguous() && to.is_contiguous()) {
    if (to.num_elements() > 0) std::memcpy(to.data, from.data, static_cast<size_t>(to.num_elements() * item));
    return;
  }
  for (int64_t b = 0; b < to.shape[0]; ++b) {
    for (int64_t head = 0; head < to.shape[1]; ++head) {
      for (int64_t row = 0; row < to.shape[2]; ++row) {
        const int64_t source = b * from.strides[0] + head * from.strides[1] + row * from.strides[2];
        const int64_t target = b * to.strides[0] + head * to.strides[1] + row * to.strides[2];
        std::memcpy(static_cast<char*>(to.data) + target * item, static_cast<const char*>(from.data) + source * item,
                    static_cast<size_t>(to.shape[3] * item));
      }
    }
  }
}

template <Status (*kStore)(const KvCacheUpdateProblem&, Workspace, Stream)>
Status copy_and_store(const CacheUpdate& problem, Workspace workspace, Stream stream) {
  copy_cache(problem);
  return kStore(problem.update, workspace, stream);
}

std::span<const Kernel<CacheUpdate>> kernels() {
  static constexpr Kernel<CacheUpdate> kKernels[] = {
      {.name = "cpu_runs",
       .device = DeviceType::kCpu,
       .supports = [](const CacheUpdate&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = copy_and_store<cpu::kv_cache_update_runs>},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const CacheUpdate&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = copy_and_store<kv_cache_update_reference>},
  };
  return kKernels;
}

}  // namespace

std::unique_ptr<Operator> make_trt_kv_cache_update_operator() {
  return std::make_unique<OperatorOver<CacheUpdate>>(make_schema(), make_problem, kernels());
}

}  // namespace polyop
