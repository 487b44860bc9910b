// kv_cache_update_runs: writes keys and values into the cache in runs of rows that lie in one page.
// Math      cache row write_position + t of sequence b = token t of sequence b, as bits or as round(x / scale)
// Shapes    pages [P, R, Hkv, D] or [B, Hkv, Lmax, D] · k, v [T, Hkv, D] or [B, S, Hkv, D] · page_table [B, W]
// Layout    D dense, other strides free. Where heads and rows are dense on both sides a run is one memcpy
// Work      one task = about kTaskBytes of consecutive tokens of the whole batch, whatever the sequences they belong
//           to; a task finds its first sequence by binary search and walks on from there
// Memory    each update element is read once, each cache element written once; page ids of written pages only
// Roofline  copy bandwidth
// Numerics  bits are copied, NaN payloads too; quantization as in quantize_rows.h
// Limits    page ids and positions are in range: shape binding has checked them
#include <algorithm>

#include "polyop/cpu/kv_cache_runs.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop::cpu {
namespace {

// Update bytes per task: large against the cost of claiming one, small against a core's share of a long prompt.
constexpr int64_t kTaskBytes = 128 * 1024;

}  // namespace

Status kv_cache_update_runs(const KvCacheUpdateProblem& problem, Workspace, Stream) {
  const int64_t num_tokens = problem.token_offset(problem.num_sequences);
  const int64_t token_bytes =
      problem.num_planes * problem.num_kv_heads * problem.head_dim * dtype_bytes(problem.update_dtype);
  if (token_bytes == 0) return Status::ok();
  const int64_t tokens_per_task = std::max<int64_t>(1, kTaskBytes / token_bytes);
  const int64_t tasks = (num_tokens + tokens_per_task - 1) / tokens_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](int64_t task, int) {
    const int64_t begin = task * tokens_per_task;
    for_each_run(problem, begin, std::min(num_tokens, begin + tokens_per_task), [&](const KvCacheRun& run) {
      for (int32_t plane = 0; plane < problem.num_planes; ++plane) store_run(problem, problem.planes[plane], run);
    });
  });
  return Status::ok();
}

}  // namespace polyop::cpu
