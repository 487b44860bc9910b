// circular_pad_rows: each output row is one run of the input row with its two ends wrapped around.
// Math      out[..., i] = x[..., (i - left) mod extent]; a copy, no arithmetic
// Shapes    x [X...] · out [X + pads...], rank 0 to 8, elements of 1, 2, 4 or 8 bytes, any strides
// Work      axes without padding join their neighbours first. A warp takes up to 32 rows: lane i finds out where row i
//           lies, then the lanes walk over the 16-byte blocks of all rows' middles, on the output's own 16-byte grid
//           and several at a time, each fed by the one or two 16-byte blocks of x that hold its bytes, shifted into
//           place; then over the elements that are left, at the ends of rows
// Memory    each element of out written once, each element of x read once from device memory (repeats hit a cache)
// Roofline  bandwidth: (bytes of out + bytes of x) / copy rate; target 92% of a plain copy
// Numerics  bits are copied
// Limits    none
#include <cuda_runtime.h>

#include <algorithm>

#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerWarp = 32;
constexpr int kAhead = 4;  // blocks of a lane that are on their way together

// ---- device helpers -------------------------------------------------------------------------------------------------

/// The 16 bytes from `address` on, by the one or two aligned 16-byte blocks that hold them. All lanes that work on one
/// row are equally far from such a block, so the branches do not diverge.
__device__ uint4 load_unaligned(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  const auto* block = reinterpret_cast<const uint4*>(bits & ~uintptr_t{15});
  const auto offset = static_cast<unsigned>(bits & 15);
  const uint4 low = __ldg(block);
  if (offset == 0) return low;
  const uint4 high = __ldg(block + 1);
  const unsigned shift = offset % 4 * 8;
  const auto join = [shift](uint32_t a, uint32_t b) { return __funnelshift_r(a, b, shift); };
  switch (offset / 4) {
    case 0:
      return {join(low.x, low.y), join(low.y, low.z), join(low.z, low.w), join(low.w, high.x)};
    case 1:
      return {join(low.y, low.z), join(low.z, low.w), join(low.w, high.x), join(high.x, high.y)};
    case 2:
      return {join(low.z, low.w), join(low.w, high.x), join(high.x, high.y), join(high.y, high.z)};
    default:
      return {join(low.w, high.x), join(high.x, high.y), join(high.y, high.z), join(high.z, high.w)};
  }
}

/// What the host knows of all rows alike.
struct RowPlan {
  int64_t num_rows = 0;
  uint32_t rows_per_warp = 1;
  uint32_t middle_begin = 0;  // elements of an output row that repeat x without wrapping
  uint32_t middle_end = 0;
  uint32_t most_stores = 0;  // 16-byte blocks in a row's middle
  uint32_t most_rest = 0;    // elements outside of them
};

/// Element offsets of an output row and of the row of x it repeats.
struct RowOffsets {
  int64_t x = 0;
  int64_t out = 0;
};

template <class Index>
__device__ RowOffsets row_offsets(const CircularPadProblem& p, Index row) {
  RowOffsets offsets;
#pragma unroll
  for (int32_t axis = kMaxRank - 2; axis >= 0; --axis) {
    if (axis >= p.rank - 1) continue;
    const auto extent = static_cast<Index>(p.out_extents[axis]);
    const Index rest = row / extent;
    const auto index = static_cast<int64_t>(row - rest * extent);
    row = rest;
    int64_t source = index - p.pads_before[axis];
    if (source < 0 || source >= p.x_extents[axis]) source = p.source_index(axis, index);
    offsets.x += source * p.x_strides[axis];
    offsets.out += index * p.out_strides[axis];
  }
  return offsets;
}

/// Elements [begin, begin + kPerStore * count) of a row that are whole 16-byte blocks of its middle.
template <class Element>
struct RowBlocks {
  uint32_t begin = 0;
  uint32_t count = 0;

  __device__ RowBlocks(const RowPlan& plan, const Element* to) {
    constexpr uint32_t kPerStore = 16 / sizeof(Element);
    const auto first = reinterpret_cast<uintptr_t>(to + plan.middle_begin) / sizeof(Element) % kPerStore;
    begin = plan.middle_begin + (first == 0 ? 0 : kPerStore - static_cast<uint32_t>(first));
    count = begin < plan.middle_end ? (plan.middle_end - begin) / kPerStore : 0;
  }
};

__device__ inline int64_t shuffle(int64_t value, uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Element, class Index>
__global__ void __launch_bounds__(kThreads) circular_pad_rows_kernel(const CircularPadProblem p, const RowPlan plan) {
  constexpr uint32_t kPerStore = 16 / sizeof(Element);
  const int32_t last = p.rank - 1;
  const auto left = static_cast<int32_t>(plan.most_stores > 0 ? p.pads_before[last] : 0);
  const uint32_t lane = threadIdx.x % 32;
  const auto first_row =
      (static_cast<Index>(blockIdx.x) * kWarps + threadIdx.x / 32) * static_cast<Index>(plan.rows_per_warp);
  if (first_row >= static_cast<Index>(plan.num_rows)) return;
  const auto rows =
      static_cast<uint32_t>(min(static_cast<Index>(plan.rows_per_warp), static_cast<Index>(plan.num_rows) - first_row));
  const RowOffsets own = row_offsets<Index>(p, first_row + min(lane, rows - 1));
  const auto* x = static_cast<const Element*>(p.x);
  auto* out = static_cast<Element*>(p.out);

  const uint32_t stores = rows * plan.most_stores;
  for (uint32_t first = 0; first < stores; first += 32 * kAhead) {
    uint4 bytes[kAhead];
    Element* to[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t store = first + i * 32 + lane;
      const uint32_t row = min(store / plan.most_stores, rows - 1);
      const Element* from_row = x + shuffle(own.x, row);
      Element* to_row = out + shuffle(own.out, row);
      const RowBlocks<Element> blocks(plan, to_row);
      const uint32_t block = store - row * plan.most_stores;
      to[i] = nullptr;
      if (store < stores && block < blocks.count) {
        const uint32_t at = blocks.begin + block * kPerStore;
        to[i] = to_row + at;
        bytes[i] = load_unaligned(from_row + (static_cast<int32_t>(at) - left));
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (to[i] != nullptr) *reinterpret_cast<uint4*>(to[i]) = bytes[i];
    }
  }
  const uint32_t rest = rows * plan.most_rest;  // most_rest is below 2^26, see launch
  for (uint32_t first = 0; first < rest; first += 32) {
    const uint32_t slot = first + lane;
    const uint32_t row = min(slot / plan.most_rest, rows - 1);
    const Element* from_row = x + shuffle(own.x, row);
    Element* to_row = out + shuffle(own.out, row);
    const RowBlocks<Element> blocks(plan, to_row);
    int64_t at = slot - row * plan.most_rest;
    if (blocks.count > 0 && at >= blocks.begin) at += blocks.count * kPerStore;
    if (slot >= rest || at >= p.out_extents[last]) continue;
    int64_t source = at - p.pads_before[last];
    if (source < 0 || source >= p.x_extents[last]) source = p.source_index(last, at);
    to_row[at * p.out_strides[last]] = from_row[source * p.x_strides[last]];
  }
}

/// Rows of any length: one warp a row, element by element.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    circular_pad_elements_kernel(const CircularPadProblem p, const int64_t num_rows) {
  const int32_t last = p.rank - 1;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < num_rows;
       row += int64_t{gridDim.x} * kWarps) {
    const RowOffsets offsets = row_offsets<uint64_t>(p, static_cast<uint64_t>(row));
    for (int64_t at = threadIdx.x % 32; at < p.out_extents[last]; at += 32) {
      const int64_t source = p.source_index(last, at);
      static_cast<Element*>(p.out)[offsets.out + at * p.out_strides[last]] =
          static_cast<const Element*>(p.x)[offsets.x + source * p.x_strides[last]];
    }
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

/// Joins an axis without padding to the one before it where both tensors are dense there: fewer, longer rows, but not
/// so few that they are too few for all warps.
void join_axes(CircularPadProblem* p) {
  constexpr int64_t kMostWidth = int64_t{1} << 14;
  for (int32_t axis = p->rank - 1; axis > 0; --axis) {
    const int64_t extent = p->x_extents[axis];
    const bool joins = extent == p->out_extents[axis] && p->pads_before[axis] == 0 &&
                       p->x_strides[axis - 1] == extent * p->x_strides[axis] &&
                       p->out_strides[axis - 1] == extent * p->out_strides[axis];
    const bool is_last = axis == p->rank - 1;
    if (!joins || (is_last && p->out_extents[axis - 1] * extent > kMostWidth)) continue;
    p->x_extents[axis - 1] *= extent;
    p->out_extents[axis - 1] *= extent;
    p->pads_before[axis - 1] *= extent;
    p->x_strides[axis - 1] = p->x_strides[axis];
    p->out_strides[axis - 1] = p->out_strides[axis];
    for (int32_t later = axis; later + 1 < p->rank; ++later) {
      p->x_extents[later] = p->x_extents[later + 1];
      p->out_extents[later] = p->out_extents[later + 1];
      p->pads_before[later] = p->pads_before[later + 1];
      p->x_strides[later] = p->x_strides[later + 1];
      p->out_strides[later] = p->out_strides[later + 1];
    }
    --p->rank;
  }
}

template <class Element>
Status launch(const CircularPadProblem& p, int64_t num_rows, Stream stream) {
  constexpr int64_t kPerStore = 16 / sizeof(Element);
  constexpr int64_t kLongRow = int64_t{1} << 26;  // 32 of them are counted in 32 bits
  const int32_t last = p.rank - 1;
  const int64_t width = p.out_extents[last];
  const int64_t wanted_warps = int64_t{device_numbers().num_multiprocessors} * 32;
  if (width >= kLongRow || p.x_extents[last] >= kLongRow || std::abs(p.pads_before[last]) >= kLongRow) {
    const auto blocks = static_cast<unsigned>(blocks_for(num_rows, kWarps, wanted_warps));
    circular_pad_elements_kernel<Element><<<blocks, kThreads, 0, stream_of(stream)>>>(p, num_rows);
    return launch_status("circular_pad: cuda_rows");
  }
  RowPlan plan = {.num_rows = num_rows};
  if (p.x_strides[last] == 1 && p.out_strides[last] == 1) {
    const int64_t begin = std::clamp<int64_t>(p.pads_before[last], 0, width);
    const int64_t end = std::clamp<int64_t>(p.pads_before[last] + p.x_extents[last], begin, width);
    plan.middle_begin = static_cast<uint32_t>(begin);
    plan.middle_end = static_cast<uint32_t>(end);
    plan.most_stores = static_cast<uint32_t>((end - begin) / kPerStore);
  }
  // Where a row's blocks begin depends on its address: they are one fewer than most_stores at least.
  plan.most_rest = static_cast<uint32_t>(width - std::max<int64_t>(0, int64_t{plan.most_stores} - 1) * kPerStore);
  plan.rows_per_warp = static_cast<uint32_t>(std::clamp<int64_t>(num_rows / wanted_warps, 1, kRowsPerWarp));
  const int64_t warps = (num_rows + plan.rows_per_warp - 1) / plan.rows_per_warp;
  const int64_t blocks = (warps + kWarps - 1) / kWarps;
  if (num_rows < (int64_t{1} << 30)) {
    circular_pad_rows_kernel<Element, uint32_t>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(p, plan);
  } else {
    circular_pad_rows_kernel<Element, uint64_t>
        <<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(p, plan);
  }
  return launch_status("circular_pad: cuda_rows");
}

}  // namespace

Status circular_pad_rows(const CircularPadProblem& problem, Workspace, Stream stream) {
  CircularPadProblem p = problem;
  if (p.rank == 0) {  // a scalar is a row of one
    p.rank = 1;
    p.x_extents[0] = p.out_extents[0] = 1;
    p.x_strides[0] = p.out_strides[0] = 1;
  }
  for (int32_t axis = 0; axis < p.rank; ++axis) {
    if (p.out_extents[axis] == 0) return Status::ok();
  }
  join_axes(&p);
  int64_t num_rows = 1;
  for (int32_t axis = 0; axis + 1 < p.rank; ++axis) num_rows *= p.out_extents[axis];
  switch (p.element_bytes) {
    case 1:
      return launch<uint8_t>(p, num_rows, stream);
    case 2:
      return launch<uint16_t>(p, num_rows, stream);
    case 4:
      return launch<uint32_t>(p, num_rows, stream);
    default:
      return launch<unsigned long long>(p, num_rows, stream);
  }
}

}  // namespace polyop::cuda
