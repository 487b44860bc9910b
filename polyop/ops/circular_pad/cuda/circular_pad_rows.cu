// circular_pad_rows: each output row is one run of the input row with its two ends wrapped around.
// Math      out[..., i] = x[..., (i - left) mod extent]; a copy, no arithmetic
// Shapes    x [X...] · out [X + pads...], rank 0 to 8, elements of 1, 2, 4 or 8 bytes, any strides
// Work      one warp a row, in turns: 16-byte stores on the output's own 16-byte grid, each fed by the one or two
// 16-byte
//           blocks of x that hold its bytes, shifted into place; ends of a row and wrapped elements one by one
// Memory    each element of out written once, each element of x read once from device memory (repeats hit a cache)
// Roofline  bandwidth: (bytes of out + bytes of x) / copy rate; target 92% of a plain copy
// Numerics  bits are copied
// Limits    none
#include <cuda_runtime.h>

#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerMultiprocessor = 8;

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

// ---- kernel ---------------------------------------------------------------------------------------------------------

template <class Element, class Index>
__global__ void __launch_bounds__(kThreads) circular_pad_rows_kernel(const CircularPadProblem p, Index num_rows) {
  constexpr int kPerStore = 16 / sizeof(Element);
  const int32_t last = p.rank - 1;
  const int64_t x_width = p.x_extents[last];
  const int64_t width = p.out_extents[last];
  const int64_t left = p.pads_before[last];
  const int64_t x_step = p.x_strides[last];
  const int64_t out_step = p.out_strides[last];
  const int lane = threadIdx.x % 32;
  for (Index row = static_cast<Index>(blockIdx.x) * kWarps + threadIdx.x / 32; row < num_rows;
       row += static_cast<Index>(gridDim.x) * kWarps) {
    const RowOffsets offsets = row_offsets(p, row);
    const Element* from = static_cast<const Element*>(p.x) + offsets.x;
    Element* to = static_cast<Element*>(p.out) + offsets.out;
    const auto element = [&](int64_t i) {
      int64_t source = i - left;
      if (source < 0 || source >= x_width) source = p.source_index(last, i);
      return from[source * x_step];
    };
    if (out_step != 1 || x_step != 1) {
      for (int64_t i = lane; i < width; i += 32) to[i * out_step] = element(i);
      continue;
    }
    // Elements before the first 16-byte boundary of the output row.
    const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(Element) % kPerStore);
    const int64_t head = min(width, misaligned == 0 ? int64_t{0} : kPerStore - misaligned);
    const int64_t stores = (width - head) / kPerStore;
    if (lane < head) to[lane] = element(lane);
    for (int64_t i = head + stores * kPerStore + lane; i < width; i += 32) to[i] = element(i);
#pragma unroll 4
    for (int64_t store = lane; store < stores; store += 32) {
      const int64_t first = head + store * kPerStore;
      const int64_t source = first - left;
      Vector<Element, kPerStore> vector;
      if (source >= 0 && source + kPerStore <= x_width) {
        const uint4 bytes = load_unaligned(from + source);
        vector = *reinterpret_cast<const Vector<Element, kPerStore>*>(&bytes);
      } else {
#pragma unroll
        for (int i = 0; i < kPerStore; ++i) vector.values[i] = element(first + i);
      }
      store_vector(to + first, vector);
    }
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <class Element>
Status launch(const CircularPadProblem& problem, int64_t num_rows, Stream stream) {
  const int64_t most = int64_t{device_numbers().num_multiprocessors} * kBlocksPerMultiprocessor;
  const auto blocks = static_cast<unsigned>(blocks_for(num_rows, kWarps, most));
  if (num_rows < (int64_t{1} << 30)) {
    circular_pad_rows_kernel<Element, uint32_t>
        <<<blocks, kThreads, 0, stream_of(stream)>>>(problem, static_cast<uint32_t>(num_rows));
  } else {
    circular_pad_rows_kernel<Element, uint64_t>
        <<<blocks, kThreads, 0, stream_of(stream)>>>(problem, static_cast<uint64_t>(num_rows));
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
  int64_t num_rows = 1;
  for (int32_t axis = 0; axis + 1 < p.rank; ++axis) num_rows *= p.out_extents[axis];
  if (num_rows == 0 || p.out_extents[p.rank - 1] == 0) return Status::ok();
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
