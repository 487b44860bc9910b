// TRT_KVCacheUpdate: Y = past_cache with the rows of the update written from each sequence's write index on. Y may be
// the memory of past_cache; otherwise the cache is copied first. Rows that fall outside of the cache are left out.
#include "polyop/ops/kv_cache_update/fronts/trt_kv_cache_update.h"

#include <cstring>
#include <limits>
#include <string>

#include "polyop/ops/kv_cache_update/fronts/trt_kv_cache_update_problem.h"

namespace polyop {
namespace {

enum Operand : int { kPastCache, kUpdate, kWriteIndices, kUpdateLengths, kY };
enum Attribute : int { kUpdateForm, kMode, kAxis };

constexpr int64_t kSequenceAxis = 2;
constexpr int kCacheRank = 4;

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

Status make_problem(const BoundCall& call, TrtKvCacheUpdateProblem* problem) {
  const int64_t axis = call.attributes[kAxis].integer;
  if (axis != kSequenceAxis && axis != kSequenceAxis - kCacheRank) {
    return invalid_argument("trt_kv_cache_update: attribute axis is " + std::to_string(axis) +
                            ", wanted -2 (or 2, the same axis)");
  }
  const TensorView& past = call.tensor(kPastCache);
  const TensorView& update = call.tensor(kUpdate);
  const TensorView& result = call.tensor(kY);
  const bool is_packed = call.attributes[kUpdateForm].integer != 0;
  const auto numbers = [&call](int operand) {
    return call.has(operand) ? static_cast<const int32_t*>(call.tensor(operand).data) : nullptr;
  };
  *problem = {.update = {.planes = {KvCachePlane{.cache = result.data,
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
                         .num_pages = result.shape[0],
                         .capacity = result.shape[kSequenceAxis],
                         .num_tokens = update.shape[0] * (is_packed ? 1 : update.shape[2]),
                         .padded_tokens = is_packed ? 0 : update.shape[2],
                         .update_offsets = numbers(kUpdateLengths),
                         .write_positions = numbers(kWriteIndices),
                         .skips_outside = true},
              .past_cache = past.data,
              .past_sequence_stride = past.strides[0],
              .past_head_stride = past.strides[1],
              .past_row_stride = past.strides[2]};
  return Status::ok();
}

/// Copies the rows of past_cache to Y unless both are one.
void copy_past(const TrtKvCacheUpdateProblem& p) {
  if (p.is_in_place() || p.cache_bytes() == 0) return;
  const KvCachePlane& result = p.result();
  if (p.is_dense()) {
    std::memcpy(result.cache, p.past_cache, static_cast<size_t>(p.cache_bytes()));
    return;
  }
  const int64_t item = dtype_bytes(p.update.cache_dtype);
  for (int64_t b = 0; b < p.num_sequences(); ++b) {
    for (int64_t head = 0; head < p.update.num_kv_heads; ++head) {
      const int64_t source = b * p.past_sequence_stride + head * p.past_head_stride;
      const int64_t target = b * result.page_stride + head * result.cache_head_stride;
      for (int64_t row = 0; row < p.update.page_size; ++row) {
        std::memcpy(static_cast<char*>(result.cache) + (target + row * result.row_stride) * item,
                    static_cast<const char*>(p.past_cache) + (source + row * p.past_row_stride) * item,
                    static_cast<size_t>(p.row_bytes()));
      }
    }
  }
}

template <Status (*kStore)(const KvCacheUpdateProblem&, Workspace, Stream)>
Status copy_and_store(const TrtKvCacheUpdateProblem& problem, Workspace workspace, Stream stream) {
  copy_past(problem);
  return kStore(problem.update, workspace, stream);
}

std::span<const Kernel<TrtKvCacheUpdateProblem>> kernels() {
  static constexpr Kernel<TrtKvCacheUpdateProblem> kKernels[] = {
      {.name = "cpu_runs",
       .device = DeviceType::kCpu,
       .supports = [](const TrtKvCacheUpdateProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = copy_and_store<cpu::kv_cache_update_runs>},
      {.name = "reference",
       .device = DeviceType::kCpu,
       .supports = [](const TrtKvCacheUpdateProblem&) { return Status::ok(); },
       .workspace_bytes = nullptr,
       .launch = copy_and_store<kv_cache_update_reference>},
#ifdef POLYOP_CUDA
      {.name = "cuda_tokens",
       .device = DeviceType::kCuda,
       .supports = cuda::supports_trt_kv_cache_update_tokens,
       .workspace_bytes = nullptr,
       .launch = cuda::trt_kv_cache_update_tokens},
#endif
  };
  return kKernels;
}

}  // namespace

std::unique_ptr<Operator> make_trt_kv_cache_update_operator() {
  return std::make_unique<OperatorOver<TrtKvCacheUpdateProblem>>(make_schema(), make_problem, kernels());
}

}  // namespace polyop
