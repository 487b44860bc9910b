// kv_cache_update_runs: writes keys and values into the cache in runs of rows that lie in one page.
// Math      cache row write_position + t of sequence b = token t of sequence b, as bits or as round(x / scale)
// Shapes    pages [P, R, Hkv, D] or [B, Hkv, Lmax, D] · k, v [T, Hkv, D] or [B, S, Hkv, D] · page_table [B, W]
// Layout    D dense, other strides free. Where heads and rows are dense on both sides a run is one memcpy
// Work      one task = about kTaskBytes of consecutive tokens of the whole batch, whatever the sequences they belong
// to;
//           a task finds its first sequence by binary search and walks on from there
// Memory    each update element is read once, each cache element written once; page ids of written pages only
// Roofline  copy bandwidth
// Numerics  bits are copied, NaN payloads too; quantization as in quantize_rows.h
// Limits    page ids and positions are in range: shape binding has checked them
#include <algorithm>
#include <cstring>

#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/kv_cache_update/cpu/quantize_rows.h"
#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop::cpu {
namespace {

// Update bytes per task: large against the cost of claiming one, small against a core's share of a long prompt.
constexpr int64_t kTaskBytes = 128 * 1024;

/// Consecutive tokens of one sequence that go to consecutive rows of one page.
struct Run {
  int64_t sequence;
  int64_t token;
  int64_t tokens;
  int64_t page;
  int64_t row;
};

template <int64_t kBytes>
void copy_rows_of(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) std::memcpy(to + row * to_stride, from + row * from_stride, kBytes);
}

/// `rows` rows of `bytes`; strides in bytes. Short rows of the usual sizes are copied without a call.
void copy_rows(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t rows, int64_t bytes) {
  if (from_stride == bytes && to_stride == bytes) {
    std::memcpy(to, from, static_cast<size_t>(rows * bytes));
    return;
  }
  switch (bytes) {
    case 128:
      return copy_rows_of<128>(from, from_stride, to, to_stride, rows);
    case 256:
      return copy_rows_of<256>(from, from_stride, to, to_stride, rows);
    default:
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(to + row * to_stride, from + row * from_stride, static_cast<size_t>(bytes));
      }
  }
}

void store_run(const KvCacheUpdateProblem& problem, const KvCachePlane& plane, const Run& run) {
  const int64_t head_dim = problem.head_dim;
  const bool one_block = problem.num_kv_heads == 1 || (plane.cache_head_stride == head_dim &&
                                                       plane.update_head_stride == head_dim && plane.scale_stride == 0);
  const int64_t blocks = one_block ? 1 : problem.num_kv_heads;
  const int64_t width = one_block ? problem.num_kv_heads * head_dim : head_dim;  // elements
  const int64_t update_bytes = dtype_bytes(problem.update_dtype);
  const int64_t cache_bytes = dtype_bytes(problem.cache_dtype);
  const char* from =
      static_cast<const char*>(plane.update) + problem.update_offset(plane, run.sequence, run.token) * update_bytes;
  char* to =
      static_cast<char*>(plane.cache) + (run.page * plane.page_stride + run.row * plane.row_stride) * cache_bytes;
  for (int64_t block = 0; block < blocks; ++block) {
    const char* block_from = from + block * plane.update_head_stride * update_bytes;
    char* block_to = to + block * plane.cache_head_stride * cache_bytes;
    if (problem.quantizes()) {
      quantize_rows({.from = block_from,
                     .from_dtype = problem.update_dtype,
                     .from_stride = plane.update_token_stride,
                     .to = block_to,
                     .to_dtype = problem.cache_dtype,
                     .to_stride = plane.row_stride,
                     .rows = run.tokens,
                     .width = width,
                     .scale = plane.scale == nullptr ? 1.0f : plane.scale[block * plane.scale_stride]});
    } else {
      copy_rows(block_from, plane.update_token_stride * update_bytes, block_to, plane.row_stride * cache_bytes,
                run.tokens, width * cache_bytes);
    }
  }
}

/// The sequence that token `token` of the whole batch belongs to.
int64_t sequence_of(const KvCacheUpdateProblem& problem, int64_t token) {
  if (!problem.is_packed()) return token / problem.padded_tokens;
  const int32_t* offsets = problem.update_offsets;
  return std::upper_bound(offsets, offsets + problem.num_sequences + 1, token) - offsets - 1;
}

/// Tokens [begin, end) of the whole batch.
void store_tokens(const KvCacheUpdateProblem& problem, int64_t begin, int64_t end) {
  for (int64_t sequence = sequence_of(problem, begin); begin < end; ++sequence) {
    const int64_t sequence_begin = problem.token_offset(sequence);
    const int64_t next_sequence = std::min(end, problem.token_offset(sequence + 1));
    const auto [first_stored, stored_end] = problem.stored_tokens(sequence);
    begin = std::max(begin, sequence_begin + first_stored);
    const int64_t sequence_end = std::min(next_sequence, sequence_begin + stored_end);
    while (begin < sequence_end) {
      const int64_t position = problem.write_position(sequence) + begin - sequence_begin;
      const int64_t column = position / problem.page_size;
      const int64_t row = position - column * problem.page_size;
      const Run run = {.sequence = sequence,
                       .token = begin - sequence_begin,
                       .tokens = std::min(problem.page_size - row, sequence_end - begin),
                       .page = problem.page(sequence, column),
                       .row = row};
      for (int32_t plane = 0; plane < problem.num_planes; ++plane) store_run(problem, problem.planes[plane], run);
      begin += run.tokens;
    }
    begin = next_sequence;
  }
}

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
    store_tokens(problem, begin, std::min(num_tokens, begin + tokens_per_task));
  });
  return Status::ok();
}

}  // namespace polyop::cpu
