// When split_kv takes a call, and its launch: plan, scratch memory, type and head size.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <string>

#include "polyop/core/dispatch.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cuda/split_host.h"
#include "polyop/ops/attention/cuda/split_kv_kernel.cuh"

namespace polyop::cuda {
namespace {

constexpr int kWideRows = 64;
constexpr int64_t kMostCost = int64_t{1} << 29;              // of all items, and their number: half of 32 bits
constexpr int64_t kMostWideScratchBytes = int64_t{1} << 31;  // above, sequences of many rows are not split

struct HostPlan {
  SplitPlan plan;
  SplitScratch scratch;    // counts only
  int64_t most_items = 0;  // of a team
  int64_t narrow_floats = 0;
  int64_t wide_slots = 0;
  int num_blocks = 0;
};

/// Blocks side by side that read heads of the same keys: the largest divisor of Hkv up to eight whose teams leave
/// hardly more blocks idle than those of a smaller one.
int32_t team_of(int64_t num_kv_heads, int num_blocks) {
  int32_t best = 1;
  for (int32_t team = 2; team <= std::min(8, num_blocks); ++team) {
    if (num_kv_heads % team == 0 && num_blocks % team <= num_blocks % best + num_blocks / 64) best = team;
  }
  return best;
}

HostPlan make_plan(const AttentionProblem& p, const SplitResources& resources) {
  HostPlan host;
  SplitPlan& plan = host.plan;
  plan.group_size = static_cast<int32_t>(p.group_size());
  plan.narrow_rows = p.head_dim <= 128 ? 16 : 8;
  plan.rows_per_tile = p.head_dim <= kWidestHeadDim ? kWideRows : plan.narrow_rows;
  plan.wide_target_items = device_numbers().num_multiprocessors;
  const auto heads = p.num_kv_heads;
  plan.team = team_of(heads, resources.num_blocks);
  plan.head_groups = static_cast<int32_t>(heads) / plan.team;
  plan.most_chunks = static_cast<int32_t>(std::min<int64_t>(kMostChunks, divide_up64(resources.num_blocks, heads)));
  plan.round_shift = std::countr_zero(static_cast<uint32_t>(resources.round_keys));
  plan.by_group_size = FixedDivisor(plan.group_size);
  plan.by_most_chunks = FixedDivisor(plan.most_chunks);
  describe_keys(p, &plan);
  const int64_t rows = p.num_query_rows * plan.group_size;
  const int64_t most_chunks =
      std::max<int64_t>(1, std::min<int64_t>(plan.most_chunks, divide_up64(p.kv_capacity, kLeastChunk)));
  const int64_t most_tiles = (rows / kLeastTileRows + p.num_sequences) * plan.head_groups;  // of a team
  // A sequence of several row tiles has wide_target_items, and what its last chunks have too much.
  host.most_items = std::min(most_tiles * most_chunks,
                             most_tiles + p.num_sequences * (plan.head_groups * most_chunks + plan.wide_target_items));
  const int64_t most_rounds = std::max<int64_t>(most_chunks * 2, divide_up64(p.kv_capacity, resources.round_keys));
  while (plan.cost_shift < 31 && host.most_items + most_tiles * (most_rounds >> plan.cost_shift) > kMostCost)
    ++plan.cost_shift;
  const int64_t num_teams = std::clamp<int64_t>(host.most_items, 1, std::max(1, resources.num_blocks / plan.team));
  host.num_blocks = static_cast<int>(num_teams * plan.team);
  SplitScratch& scratch = host.scratch;
  const int64_t most_rows = p.query_form == AttentionQueryForm::kPadded ? p.padded_query_length : p.num_query_rows;
  const int64_t tile_rows = std::min<int64_t>(plan.narrow_rows, most_rows * plan.group_size);
  scratch.narrow_rows = static_cast<int32_t>((tile_rows + 1) / 2 * 2);  // parts are 16-byte aligned
  // Items of one sequence cost the same; of several a block may have all chunks but one of a cheap tile.
  const int64_t leading = p.num_sequences == 1 ? divide_up64(host.most_items, num_teams) : most_chunks;
  scratch.most_leading = static_cast<int32_t>(std::min(most_chunks, leading));
  const int64_t parts = host.num_blocks * (int64_t{scratch.most_leading} + 1);
  host.narrow_floats = parts * scratch.narrow_rows * (p.head_dim + 2);

  const bool all_narrow =
      p.query_form == AttentionQueryForm::kPadded && p.padded_query_length * plan.group_size <= plan.narrow_rows;
  if (most_chunks == 1 || all_narrow || plan.rows_per_tile == plan.narrow_rows) return host;
  scratch.most_wide_chunks = static_cast<int32_t>(most_chunks);
  // A split sequence has fewer than wide_target_items tiles of all heads, so at most twice as many items.
  const int64_t each = int64_t{2} * kWideRows * plan.wide_target_items;
  const int64_t by_row = rows * heads * most_chunks;
  const int64_t by_sequence = p.num_sequences * each;
  scratch.wide_slots_each = by_sequence < by_row ? each : 0;
  host.wide_slots = std::min(by_row, by_sequence);
  if (host.wide_slots * (p.head_dim * 4 + 8) > kMostWideScratchBytes) {
    plan.splits_wide = false;
    host.wide_slots = 0;
  }
  return host;
}

/// What most sequences have, by the average: lengths are known on the device only.
RowKind main_kind(const AttentionProblem& p, const SplitPlan& plan) {
  const int64_t rows = divide_up64(p.num_query_rows, std::max<int64_t>(1, p.num_sequences)) * p.group_size();
  if (rows <= 8 || plan.rows_per_tile == 8) return RowKind::kEight;
  return rows <= plan.narrow_rows ? RowKind::kSixteen : RowKind::kWide;
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

SplitResources resources_for(const AttentionProblem& p) {
  SplitResources resources;
  const Status status = visit_types(p, [&]<class Compute, class Kv>() {
    return visit_values<64, 80, 96, 128, 192, 256>(p.head_dim, [&]<int kHeadDim>() {
      resources = split_resources<Kv, kHeadDim>();
      return Status::ok();
    });
  });
  return status.is_ok() ? resources : SplitResources{};
}

}  // namespace

Status supports_split_kv(const AttentionProblem& p) {
  if (p.q.dtype != DType::kF16 && p.q.dtype != DType::kBF16) return unsupported("q is neither f16 nor bf16");
  if (p.head_dim != p.value_head_dim) return unsupported("D and Dv differ");
  const Status head_dim =
      visit_values<64, 80, 96, 128, 192, 256>(p.head_dim, []<int kHeadDim>() { return Status::ok(); });
  if (!head_dim.is_ok()) return unsupported("D " + head_dim.message());
  POLYOP_RETURN_IF_ERROR(supports_split_weights(p));
  POLYOP_RETURN_IF_ERROR(supports_split_keys(p));
  const int64_t kv_bytes = dtype_bytes(p.k.dtype);
  AccessWidth kv;
  kv.address(p.k.data).address(p.v.data);
  kv.distance(p.k.outer_stride * kv_bytes).distance(p.k.row_stride * kv_bytes).distance(p.k.head_stride * kv_bytes);
  if (kv.widest() < 16) return unsupported("rows of k or v are not 16-byte aligned");
  AccessWidth q;
  q.address(p.q.data).distance(p.q.outer_stride * 2).distance(p.q.row_stride * 2).distance(p.q.head_stride * 2);
  if (q.widest() < 4) return unsupported("heads of q are not 4-byte aligned");
  if (make_plan(p, resources_for(p)).most_items > kMostCost) return unsupported("more than 2^29 chunks of row tiles");
  return Status::ok();
}

int64_t split_kv_workspace_bytes(const AttentionProblem& problem) {
  const HostPlan host = make_plan(problem, resources_for(problem));
  return kSemaphoreBytes + host.narrow_floats * 4 + host.wide_slots * (problem.head_dim * 4 + 8) + kWorkspaceAlignment;
}

Status split_kv(const AttentionProblem& problem, Workspace workspace, Stream stream) {
  if (problem.num_query_rows * problem.num_query_heads == 0) return Status::ok();
  const SplitResources resources = resources_for(problem);
  if (resources.num_blocks == 0)
    return unsupported("attention: cuda_split_kv: too little shared memory for the stages");
  HostPlan host = make_plan(problem, resources);
  host.scratch.semaphores = semaphores(workspace);
  host.scratch.narrow = static_cast<float*>(scratch(workspace));
  host.scratch.wide = host.scratch.narrow + host.narrow_floats;
  host.scratch.wide_sums = reinterpret_cast<float2*>(host.scratch.wide + host.wide_slots * problem.head_dim);
  return visit_types(problem, [&]<class Compute, class Kv>() {
    return visit_values<64, 80, 96, 128, 192, 256>(problem.head_dim, [&]<int kHeadDim>() {
      return launch_split_kv<Compute, Kv, kHeadDim>(problem, host.plan, host.scratch, main_kind(problem, host.plan),
                                                    host.num_blocks, resources.shared_bytes, stream);
    });
  });
}

}  // namespace polyop::cuda
