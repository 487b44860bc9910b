// When cuda_wgmma takes a call, and its launch: plan, scratch memory, type and head size.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>

#include "polyop/core/dispatch.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/cuda/split_host.h"
#include "polyop/ops/attention/cuda/wgmma_kernel.cuh"

namespace polyop::cuda {
namespace {

constexpr int64_t kMostSplitRows = 16;  // of a sequence, on average: up to here split_kv works at the speed of memory
constexpr int64_t kMostScratchBytes = int64_t{1} << 31;  // above, no sequence is split

struct WgmmaHostPlan {
  SplitPlan plan;
  SplitScratch scratch;  // counts only
  int64_t part_floats = 0;
  int lanes = 1;
  int num_blocks = 1;
};

WgmmaHostPlan make_wgmma_plan(const AttentionProblem& p) {
  WgmmaHostPlan host;
  SplitPlan& plan = host.plan;
  const int64_t heads = p.num_kv_heads;
  const int64_t blocks = device_numbers().num_multiprocessors;
  plan.group_size = static_cast<int32_t>(p.group_size());
  plan.wide_target_items = static_cast<int32_t>(blocks);
  describe_keys(p, &plan);
  const int64_t rows = p.num_query_rows * plan.group_size;
  const int64_t most_units = (rows / kWgmmaTileRows + p.num_sequences) * heads;
  host.lanes = heads % 2 == 0 || most_units >= 2 * blocks ? 2 : 1;
  const int64_t most_rows = divide_up64(most_units, host.lanes) + p.num_sequences;  // of one unit in each lane
  const auto part_floats = static_cast<int64_t>(kWgmmaTileRows * (p.head_dim + 2));
  for (int64_t wanted = divide_up64(blocks, heads);; wanted = 1) {
    // A window's keys may touch one chunk more than they fill.
    const int64_t chunks =
        wanted == 1 ? 1 : std::min(wanted + 1, std::max<int64_t>(1, divide_up64(p.kv_capacity, kLeastChunk)));
    const int64_t groups = std::max<int64_t>(1, std::min(blocks / host.lanes, most_rows * chunks));
    host.num_blocks = static_cast<int>(groups * host.lanes);
    // One sequence's items are shared out evenly; of several, a block may have all the last chunks of a tile.
    const int64_t most_items = p.num_sequences == 1 ? divide_up64(most_rows * chunks, groups) : chunks;
    host.scratch.most_leading = static_cast<int32_t>(std::min(chunks, most_items));
    host.part_floats = chunks == 1 ? 0 : host.num_blocks * (int64_t{host.scratch.most_leading} + 1) * part_floats;
    if (host.part_floats * 4 <= kMostScratchBytes) break;
    plan.splits_wide = false;
  }
  return host;
}

bool is_built_for_device() {
  constexpr int kMostDevices = 64;
  static std::array<bool, kMostDevices> built;
  static std::array<std::once_flag, kMostDevices> asked;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return false;
  std::call_once(asked[device], [device] { built[device] = wgmma_is_built<__half, 128>(); });
  return built[device];
}

}  // namespace

Status supports_wgmma(const AttentionProblem& p) {
  if (p.q.dtype != DType::kF16 && p.q.dtype != DType::kBF16) return unsupported("q is neither f16 nor bf16");
  if (p.k.dtype != p.q.dtype) return unsupported("k is not of q's dtype");
  if (p.head_dim != p.value_head_dim) return unsupported("D and Dv differ");
  const Status head_dim = visit_values<64, 128>(p.head_dim, []<int kHeadDim>() { return Status::ok(); });
  if (!head_dim.is_ok()) return unsupported("D " + head_dim.message());
  POLYOP_RETURN_IF_ERROR(supports_split_weights(p));
  if (p.num_query_rows * p.group_size() <= kMostSplitRows * p.num_sequences) {
    return unsupported("sequences have " + std::to_string(kMostSplitRows) + " rows x heads of a kv head or fewer");
  }
  POLYOP_RETURN_IF_ERROR(supports_split_keys(p));
  AccessWidth width;
  for (const HeadRows* rows : {&p.q, &p.k, &p.v}) {
    width.address(rows->data).distance(rows->outer_stride * 2).distance(rows->row_stride * 2);
    width.distance(rows->head_stride * 2);
  }
  if (width.widest() < 16) return unsupported("rows of q, k or v are not 16-byte aligned");
  AccessWidth out;
  const int64_t out_bytes = dtype_bytes(p.out.dtype);
  out.address(p.out.data).distance(p.out.outer_stride * out_bytes).distance(p.out.row_stride * out_bytes);
  if (out.distance(p.out.head_stride * out_bytes).widest() < 4)
    return unsupported("heads of out are not 4-byte aligned");
  if (!is_built_for_device()) return unsupported("needs sm_90");
  return Status::ok();
}

int64_t wgmma_workspace_bytes(const AttentionProblem& problem) {
  return kSemaphoreBytes + make_wgmma_plan(problem).part_floats * 4 + kWorkspaceAlignment;
}

Status wgmma(const AttentionProblem& problem, Workspace workspace, Stream stream) {
  if (problem.num_query_rows * problem.num_query_heads == 0) return Status::ok();
  WgmmaHostPlan host = make_wgmma_plan(problem);
  host.scratch.semaphores = semaphores(workspace);
  host.scratch.narrow = static_cast<float*>(scratch(workspace));
  const auto launch = [&]<class T>() {
    return visit_values<64, 128>(problem.head_dim, [&]<int kHeadDim>() {
      return launch_wgmma<T, kHeadDim>(problem, host.plan, host.scratch, host.lanes, host.num_blocks, stream);
    });
  };
  if (problem.q.dtype == DType::kF16) return launch.operator()<__half>();
  return launch.operator()<__nv_bfloat16>();
}

}  // namespace polyop::cuda
