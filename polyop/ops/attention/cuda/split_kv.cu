// When split_kv takes a call, and its launch: plan, scratch memory, type and head size.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "polyop/core/dispatch.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cuda/split_kv_kernel.cuh"

namespace polyop::cuda {
namespace {

constexpr int kWideRows = 64;
constexpr int kWidestHeadDim = 192;  // above, the sums of a lane and 64 keys of scores exceed its registers
constexpr int64_t kMostWideScratchBytes = int64_t{1} << 31;  // above, sequences of many rows are not split

struct HostPlan {
  SplitPlan plan;
  SplitScratch scratch;  // counts only
  int64_t num_slots = 0;
  int64_t num_blocks = 0;
};

HostPlan make_plan(const AttentionProblem& p) {
  HostPlan host;
  SplitPlan& plan = host.plan;
  plan.group_size = static_cast<int32_t>(p.group_size());
  plan.rows_per_tile = p.head_dim <= kWidestHeadDim ? kWideRows : kRowsPerWarp;
  plan.target_items = device_numbers().num_multiprocessors;
  const int64_t rows = p.num_query_rows * plan.group_size;
  const auto heads = p.num_kv_heads;
  const int64_t slot_bytes = p.head_dim * 4 + 8;
  const int64_t wanted = (plan.target_items + heads - 1) / heads;  // chunks of a sequence with one row tile
  const int64_t chunks_by_least = (p.kv_capacity + kLeastChunk - 1) / kLeastChunk;
  const int64_t narrow_chunks =
      wanted <= 1 ? 1 : std::min(chunks_by_least, std::max(wanted, (p.kv_capacity + kMostChunk - 1) / kMostChunk));
  SplitScratch& scratch = host.scratch;
  scratch.most_narrow_chunks = static_cast<int32_t>(std::max<int64_t>(1, narrow_chunks));
  if (scratch.most_narrow_chunks > 1 && plan.group_size <= kRowsPerWarp) {
    scratch.narrow_by_sequence = p.num_sequences * kRowsPerWarp < rows;
    const int64_t narrow_rows = scratch.narrow_by_sequence ? p.num_sequences * kRowsPerWarp : rows;
    scratch.narrow_slots = narrow_rows * heads * scratch.most_narrow_chunks;
  }
  const int64_t wide_chunks = std::max<int64_t>(1, std::min(wanted, chunks_by_least));
  scratch.most_wide_chunks = static_cast<int32_t>(wide_chunks);
  int64_t wide_slots = 0;
  if (wide_chunks > 1) {
    // A split sequence has fewer than target_items tiles of all heads, so at most twice as many items.
    const int64_t each = int64_t{2} * kWideRows * plan.target_items;
    const int64_t by_row = rows * heads * wide_chunks;
    const int64_t by_sequence = p.num_sequences * each;
    scratch.wide_slots_each = by_sequence < by_row ? each : 0;
    wide_slots = std::min(by_row, by_sequence);
    if (wide_slots * slot_bytes > kMostWideScratchBytes) {
      plan.splits_wide = false;
      wide_slots = 0;
    }
    const bool all_narrow =
        p.query_form == AttentionQueryForm::kPadded && p.padded_query_length * plan.group_size <= kRowsPerWarp;
    if (all_narrow) wide_slots = 0;
  }
  host.num_slots = scratch.narrow_slots + wide_slots;
  host.num_blocks =
      (rows / kRowsPerWarp + p.num_sequences) * heads * std::max(scratch.most_narrow_chunks, scratch.most_wide_chunks);
  return host;
}

/// q and k of the same 16-bit type compute in it; 8-bit caches in f16.
template <class Fn>
Status visit_types(const AttentionProblem& p, Fn&& fn) {
  switch (p.k.dtype) {
    case DType::kF16:
      return fn.template operator()<__half, __half>();
    case DType::kBF16:
      return fn.template operator()<__nv_bfloat16, __nv_bfloat16>();
    case DType::kF8E4M3:
      return fn.template operator()<__half, Fp8>();
    default:
      return fn.template operator()<__half, int8_t>();
  }
}

}  // namespace

Status supports_split_kv(const AttentionProblem& p) {
  if (p.q.dtype != DType::kF16 && p.q.dtype != DType::kBF16) return unsupported("q is neither f16 nor bf16");
  if (p.head_dim != p.value_head_dim) return unsupported("D and Dv differ");
  const Status head_dim =
      visit_values<64, 80, 96, 128, 192, 256>(p.head_dim, []<int kHeadDim>() { return Status::ok(); });
  if (!head_dim.is_ok()) return unsupported("D " + head_dim.message());
  if (p.mask.data != nullptr) return unsupported("it has a dense mask");
  if (p.normalization != AttentionNormalization::kSoftmax) return unsupported("normalization is not softmax");
  if (p.weight_quantization != AttentionWeightQuantization::kNone) return unsupported("weights are quantized");
  if (p.num_query_rows * p.num_query_heads > (int64_t{1} << 30) || p.kv_capacity > (int64_t{1} << 30)) {
    return unsupported("more than 2^30 rows of heads or keys");
  }
  if (p.k.outer_stride != p.v.outer_stride || p.k.row_stride != p.v.row_stride || p.k.head_stride != p.v.head_stride) {
    return unsupported("k and v have other strides");
  }
  const int64_t kv_bytes = dtype_bytes(p.k.dtype);
  AccessWidth kv;
  kv.address(p.k.data).address(p.v.data);
  kv.distance(p.k.outer_stride * kv_bytes).distance(p.k.row_stride * kv_bytes).distance(p.k.head_stride * kv_bytes);
  if (kv.widest() < 16) return unsupported("rows of k or v are not 16-byte aligned");
  AccessWidth q;
  q.address(p.q.data).distance(p.q.outer_stride * 2).distance(p.q.row_stride * 2).distance(p.q.head_stride * 2);
  if (q.widest() < 4) return unsupported("heads of q are not 4-byte aligned");
  return Status::ok();
}

int64_t split_kv_workspace_bytes(const AttentionProblem& problem) {
  return kSemaphoreBytes + make_plan(problem).num_slots * (problem.head_dim * 4 + 8) + kWorkspaceAlignment;
}

Status split_kv(const AttentionProblem& problem, Workspace workspace, Stream stream) {
  if (problem.num_query_rows * problem.num_query_heads == 0) return Status::ok();
  HostPlan host = make_plan(problem);
  host.scratch.semaphores = semaphores(workspace);
  host.scratch.parts = static_cast<float*>(scratch(workspace));
  host.scratch.sums = reinterpret_cast<float2*>(host.scratch.parts + host.num_slots * problem.head_dim);
  return visit_types(problem, [&]<class Compute, class Kv>() {
    return visit_values<64, 80, 96, 128, 192, 256>(problem.head_dim, [&]<int kHeadDim>() {
      return launch_split_kv<Compute, Kv, kHeadDim>(problem, host.plan, host.scratch, host.num_blocks, stream);
    });
  });
}

}  // namespace polyop::cuda
