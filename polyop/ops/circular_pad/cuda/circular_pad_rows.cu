// circular_pad_rows: each output row is one run of the input row with its two ends wrapped around.
// Math      out[..., i] = x[..., (i - left) mod extent]; a copy, no arithmetic
// Shapes    x [X...] · out [X + pads...], rank 0 to 8, elements of 1, 2, 4 or 8 bytes, any strides
// Work      axes without padding join their neighbours first; rows longer than kPieceBytes are cut into pieces. A warp
//           takes a few pieces, a group of its lanes one at a time: the aligned 16-byte blocks of x inside the piece go
//           to shared memory without passing registers, all other elements are put before and behind them, and
//           from there the piece leaves in the 16-byte blocks of out, shifted on the way. No warp waits for another
// Memory    each element of out written once, each element of x read once from device memory (repeats hit a cache);
//           shared: kPieceBytes a warp and what surrounds a piece
// Roofline  bandwidth: (bytes of out + bytes of x) / copy rate; target 92% of a plain copy
// Numerics  bits are copied
// Limits    none; a last axis that is not dense on both sides is copied element by element
#include <cuda_runtime.h>

#include <algorithm>

#include "polyop/cuda/launch.h"
#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kBlockBytes = 16;    // of an access
constexpr int kPieceBytes = 4096;  // of a piece at most
constexpr int kWarpBytes = 3584;   // of shared memory that a warp fills with short pieces; more means fewer warps

// ---- device helpers -------------------------------------------------------------------------------------------------

/// What the host knows of all pieces alike.
struct PiecePlan {
  int64_t num_pieces = 0;
  int64_t piece_elements = 0;  // of all pieces of a row but the last
  uint32_t pieces_per_row = 1;
  uint32_t pieces_per_warp = 1;
  int32_t lanes_per_piece = 32;  // power of two
  int32_t left_bytes = 0;        // room for elements that wrap on the left, whole blocks
  int32_t slot_bytes = 0;        // shared memory of a piece, whole blocks
};

/// A run of an output row. It stands at the head of its slot in shared memory; the bytes follow.
template <class Element>
struct alignas(kBlockBytes) Piece {
  const Element* row;  // element 0 of the row of x
  Element* to;
  int64_t first;   // index in the unwrapped row of x of the first element; negative on the left
  int32_t left;    // elements that wrap before the row's own begin
  int32_t middle;  // elements of the row itself
  int32_t count;   // all elements
};

/// Element offsets of an output row and of the row of x it repeats.
struct RowOffsets {
  int64_t x = 0;
  int64_t out = 0;
};

__device__ inline int64_t wrapped(const CircularPadProblem& p, int32_t axis, int64_t out_index) {
  const int64_t source = out_index - p.pads_before[axis];
  return source < 0 || source >= p.x_extents[axis] ? p.source_index(axis, out_index) : source;
}

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
    offsets.x += wrapped(p, axis, index) * p.x_strides[axis];
    offsets.out += index * p.out_strides[axis];
  }
  return offsets;
}

template <class Element, class Index>
__device__ Piece<Element> piece_of(const CircularPadProblem& p, const PiecePlan& plan, Index index) {
  const int32_t last = p.rank - 1;
  const Index row = plan.pieces_per_row == 1 ? index : index / static_cast<Index>(plan.pieces_per_row);
  const int64_t begin =
      static_cast<int64_t>(index - row * static_cast<Index>(plan.pieces_per_row)) * plan.piece_elements;
  const RowOffsets offsets = row_offsets<Index>(p, row);
  const int64_t count = min(plan.piece_elements, p.out_extents[last] - begin);
  const int64_t first = begin - p.pads_before[last];
  const int64_t middle_begin = min(max(first, int64_t{0}), first + count);
  const int64_t middle_end = max(min(first + count, p.x_extents[last]), middle_begin);
  return {.row = static_cast<const Element*>(p.x) + offsets.x,
          .to = static_cast<Element*>(p.out) + offsets.out + begin,
          .first = first,
          .left = static_cast<int32_t>(middle_begin - first),
          .middle = static_cast<int32_t>(middle_end - middle_begin),
          .count = static_cast<int32_t>(count)};
}

/// Bytes that an address lies behind a 16-byte block's begin.
__device__ inline uint32_t behind_block(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) % kBlockBytes);
}

/// The 16 bytes of shared memory from `address` on, by the one or two blocks that hold them.
__device__ inline uint4 load_unaligned(const char* address) {
  const uint32_t offset = behind_block(address);
  const auto* block = reinterpret_cast<const uint4*>(address - offset);
  const uint4 low = block[0];
  if (offset == 0) return low;
  const uint4 high = block[1];
  const uint32_t shift = offset % 4 * 8;
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

/// Where the first element of a piece stands in its slot: its own row's elements are as far from a block as in x.
template <class Element>
__device__ char* origin_of(const PiecePlan& plan, char* slot, const Piece<Element>& piece) {
  const uint32_t skew = behind_block(piece.row + piece.first + piece.left);
  return slot + sizeof(Piece<Element>) + plan.left_bytes + skew - piece.left * static_cast<int32_t>(sizeof(Element));
}

/// Starts the copies of the whole blocks of the piece's own part of the row, and puts all other elements around them.
/// The two never meet in a block: nothing says which of them would be last.
template <class Element>
__device__ void gather(const CircularPadProblem& p, const PiecePlan& plan, char* slot, int lane) {
  constexpr int kPerBlock = kBlockBytes / static_cast<int>(sizeof(Element));
  const auto piece = *reinterpret_cast<const Piece<Element>*>(slot);
  auto* origin = reinterpret_cast<Element*>(origin_of(plan, slot, piece));
  const Element* own = piece.row + piece.first + piece.left;
  const int before = static_cast<int>((kBlockBytes - behind_block(own)) % kBlockBytes / sizeof(Element));
  const int blocks = max(piece.middle - before, 0) / kPerBlock;
  const int begin = piece.left + before;  // element of the first block
  const uint32_t to = shared_address(origin + begin);
  for (int i = lane; i < blocks; i += plan.lanes_per_piece) {
    copy_async_16(to + i * kBlockBytes, own + before + i * kPerBlock, true);
  }
  const int32_t last = p.rank - 1;
  for (int i = lane; i < piece.count - blocks * kPerBlock; i += plan.lanes_per_piece) {
    const int at = i < begin ? i : i + blocks * kPerBlock;
    const int64_t source = wrapped(p, last, piece.first + at + p.pads_before[last]);
    origin[at] = piece.row[source];
  }
}

/// Writes the piece: whole blocks of out, and single elements at both ends.
template <class Element>
__device__ void scatter(const PiecePlan& plan, char* slot, int lane) {
  constexpr int kPerBlock = kBlockBytes / static_cast<int>(sizeof(Element));
  const auto piece = *reinterpret_cast<const Piece<Element>*>(slot);
  const char* origin = origin_of(plan, slot, piece);
  const int to_block = static_cast<int>((kBlockBytes - behind_block(piece.to)) % kBlockBytes / sizeof(Element));
  const int before = min(to_block, piece.count);
  const int blocks = (piece.count - before) / kPerBlock;
  const char* from = origin + before * sizeof(Element);
  auto* to = reinterpret_cast<uint4*>(piece.to + before);
  for (int i = lane; i < blocks; i += plan.lanes_per_piece) __stcs(to + i, load_unaligned(from + i * kBlockBytes));
  for (int i = lane; i < piece.count - blocks * kPerBlock; i += plan.lanes_per_piece) {
    const int at = i < before ? i : i + blocks * kPerBlock;
    piece.to[at] = reinterpret_cast<const Element*>(origin)[at];
  }
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <class Element, class Index>
__global__ void __launch_bounds__(kThreads)
    circular_pad_pieces_kernel(const CircularPadProblem p, const PiecePlan plan) {
  extern __shared__ uint4 shared_blocks[];
  const uint32_t lane = threadIdx.x % 32;
  const Index first =
      (static_cast<Index>(blockIdx.x) * kWarps + threadIdx.x / 32) * static_cast<Index>(plan.pieces_per_warp);
  if (first >= static_cast<Index>(plan.num_pieces)) return;
  const auto pieces =
      static_cast<int>(min(static_cast<Index>(plan.pieces_per_warp), static_cast<Index>(plan.num_pieces) - first));
  char* slots = reinterpret_cast<char*>(shared_blocks) + threadIdx.x / 32 * plan.pieces_per_warp * plan.slot_bytes;
  if (static_cast<int>(lane) < pieces) {
    *reinterpret_cast<Piece<Element>*>(slots + lane * plan.slot_bytes) =
        piece_of<Element>(p, plan, first + static_cast<Index>(lane));
  }
  __syncwarp();  // shows the pieces to all lanes
  const int group = static_cast<int>(lane) / plan.lanes_per_piece;
  const int groups = 32 / plan.lanes_per_piece;
  const int lane_in_group = static_cast<int>(lane) % plan.lanes_per_piece;
  for (int i = group; i < pieces; i += groups) gather<Element>(p, plan, slots + i * plan.slot_bytes, lane_in_group);
  copy_async_wait_all();
  __syncwarp();  // shows every lane's copies and wrapped elements to all lanes
  for (int i = group; i < pieces; i += groups) scatter<Element>(plan, slots + i * plan.slot_bytes, lane_in_group);
}

/// A last axis with any strides: one warp a row, element by element.
template <class Element>
__global__ void __launch_bounds__(kThreads)
    circular_pad_elements_kernel(const CircularPadProblem p, const int64_t num_rows) {
  const int32_t last = p.rank - 1;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < num_rows;
       row += int64_t{gridDim.x} * kWarps) {
    const RowOffsets offsets = row_offsets<uint64_t>(p, static_cast<uint64_t>(row));
    for (int64_t at = threadIdx.x % 32; at < p.out_extents[last]; at += 32) {
      static_cast<Element*>(p.out)[offsets.out + at * p.out_strides[last]] =
          static_cast<const Element*>(p.x)[offsets.x + wrapped(p, last, at) * p.x_strides[last]];
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
  constexpr auto kElementBytes = static_cast<int64_t>(sizeof(Element));
  const int32_t last = p.rank - 1;
  const int64_t width = p.out_extents[last];
  const int64_t wanted_warps = int64_t{device_numbers().num_multiprocessors} * 32;
  if (p.x_strides[last] != 1 || p.out_strides[last] != 1) {
    const auto blocks = static_cast<unsigned>(blocks_for(num_rows, kWarps, wanted_warps));
    circular_pad_elements_kernel<Element><<<blocks, kThreads, 0, stream_of(stream)>>>(p, num_rows);
    return launch_status("circular_pad: cuda_rows");
  }
  const auto whole_blocks = [](int64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes; };
  PiecePlan plan;
  plan.pieces_per_row = static_cast<uint32_t>((width * kElementBytes + kPieceBytes - 1) / kPieceBytes);
  const int64_t piece_bytes = whole_blocks((width + plan.pieces_per_row - 1) / plan.pieces_per_row * kElementBytes);
  plan.piece_elements = piece_bytes / kElementBytes;
  plan.num_pieces = num_rows * plan.pieces_per_row;
  plan.left_bytes = static_cast<int32_t>(
      whole_blocks(std::clamp<int64_t>(p.pads_before[last], 0, plan.piece_elements) * kElementBytes));
  // Behind the left part up to a block of skew, the piece, and up to a block that load_unaligned reads and drops.
  const int64_t slot_bytes =
      static_cast<int64_t>(sizeof(Piece<Element>)) + plan.left_bytes + piece_bytes + 2 * kBlockBytes;
  plan.slot_bytes = static_cast<int32_t>(slot_bytes);
  const int64_t fitting = std::clamp<int64_t>(kWarpBytes / slot_bytes, 1, 32);
  plan.pieces_per_warp = static_cast<uint32_t>(std::clamp<int64_t>(plan.num_pieces / wanted_warps, 1, fitting));
  while (plan.lanes_per_piece > 1 && plan.lanes_per_piece / 2 * kBlockBytes >= piece_bytes) plan.lanes_per_piece /= 2;
  const int64_t warps = (plan.num_pieces + plan.pieces_per_warp - 1) / plan.pieces_per_warp;
  const auto blocks = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  const int shared_bytes = kWarps * static_cast<int>(plan.pieces_per_warp) * plan.slot_bytes;
  const auto kernel = plan.num_pieces < (int64_t{1} << 30) ? circular_pad_pieces_kernel<Element, uint32_t>
                                                           : circular_pad_pieces_kernel<Element, uint64_t>;
  kernel<<<blocks, kThreads, shared_bytes, stream_of(stream)>>>(p, plan);
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
