// circular_pad_row_pieces: circular padding by copying runs of dense memory.
// Math      out[i] = x[(i - before) mod extent] on every axis; no arithmetic on elements
// Shapes    x [X...] · out [X + pads...], rank 0 to 8
// Layout    last axis dense on both sides, other strides free
// Work      one task = about kTaskBytes of output rows; a row is at most ceil(row / extent) + 1 memcpy calls
// Memory    each input row is read once per output row that repeats it, each output byte is written once
// Roofline  copy bandwidth; rows of a few bytes are bound by the call overhead of memcpy instead
// Numerics  bits are copied, NaN payloads too
#include <algorithm>
#include <cstring>

#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop::cpu {
namespace {

// Output bytes per task: large against the cost of claiming one (below 100 ns), small against a core's share.
constexpr int64_t kTaskBytes = 128 * 1024;

// One output row; `x_row` is the input row that it repeats. Extents and `first` in bytes; first = source of out[0].
void copy_row(const char* x_row, int64_t x_bytes, int64_t first, char* out_row, int64_t out_bytes) {
  int64_t piece = std::min(x_bytes - first, out_bytes);
  std::memcpy(out_row, x_row + first, piece);
  for (int64_t done = piece; done < out_bytes; done += piece) {
    piece = std::min(x_bytes, out_bytes - done);
    std::memcpy(out_row + done, x_row, piece);
  }
}

}  // namespace

Status supports_circular_pad_row_pieces(const CircularPadProblem& problem) {
  if (problem.rank == 0) return Status::ok();
  const int32_t last = problem.rank - 1;
  const bool x_dense = problem.x_strides[last] == 1 || problem.x_extents[last] <= 1;
  const bool out_dense = problem.out_strides[last] == 1 || problem.out_extents[last] <= 1;
  return x_dense && out_dense ? Status::ok() : unsupported("the last axis of x or out is not dense");
}

Status circular_pad_row_pieces(const CircularPadProblem& problem, Workspace, Stream) {
  const int32_t last = problem.rank - 1;
  int64_t rows = 1;
  for (int32_t axis = 0; axis < last; ++axis) rows *= problem.out_extents[axis];
  const int64_t x_bytes = (last < 0 ? 1 : problem.x_extents[last]) * problem.element_bytes;
  const int64_t out_bytes = (last < 0 ? 1 : problem.out_extents[last]) * problem.element_bytes;
  if (rows == 0 || out_bytes == 0) return Status::ok();
  const int64_t first = last < 0 ? 0 : problem.source_index(last, 0) * problem.element_bytes;

  const int64_t rows_per_task = std::max<int64_t>(1, kTaskBytes / out_bytes);
  const int64_t tasks = (rows + rows_per_task - 1) / rows_per_task;
  ThreadPool::shared().parallel_for(tasks, [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) {
      int64_t x_offset = 0;
      int64_t out_offset = 0;
      int64_t rest = row;
      for (int32_t axis = last - 1; axis >= 0; --axis) {
        const int64_t index = rest % problem.out_extents[axis];
        rest /= problem.out_extents[axis];
        x_offset += problem.source_index(axis, index) * problem.x_strides[axis];
        out_offset += index * problem.out_strides[axis];
      }
      copy_row(static_cast<const char*>(problem.x) + x_offset * problem.element_bytes, x_bytes, first,
               static_cast<char*>(problem.out) + out_offset * problem.element_bytes, out_bytes);
    }
  });
  return Status::ok();
}

}  // namespace polyop::cpu
