// circular_pad_rows: each output row is one run of the input row with its two ends wrapped around.
// Math      out[..., i] = x[..., (i - left) mod extent]; a copy, no arithmetic
// Shapes    x [X...] · out [X + pads...], rank 0 to 8, elements of 1, 2, 4 or 8 bytes, any strides
// Work      axes without padding join their neighbours first; rows longer than kPieceBytes are cut into pieces. A warp
//           takes a few pieces and counts through the 16-byte blocks of all of them, so that no lane waits for a row's
//           end: first the blocks of x go to shared memory without passing registers, then the whole blocks of out
//           leave from there, shifted on the way, and at last the elements at the ends of the pieces one by one. No
//           warp waits for another
// Memory    each element of out written once, each element of x read once from device memory (repeats hit a cache);
//           shared: kWarpBytes a warp and what surrounds a piece
// Roofline  bandwidth: (bytes of out + bytes of x) / copy rate; target 92% of a plain copy
// Numerics  bits are copied
// Limits    none; a last axis that is not dense on both sides is copied element by element
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>

#include "polyop/cuda/division.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/circular_pad/circular_pad_problem.h"
#include "polyop/ops/circular_pad/cuda/row_pieces.cuh"

namespace polyop::cuda {
namespace {

constexpr int kThreads = 64;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksWanted = 16;  // on a multiprocessor
constexpr int kPieceBytes = 4096;  // of a piece at most
constexpr int kWarpBytes = 2304;   // of out that a warp writes, in short pieces: more means fewer warps

// ---- device helpers -------------------------------------------------------------------------------------------------

/// 16 bytes of the 32 in low and high, from the `offset` % 16-th on; offset is a multiple of the element.
template <int kElementBytes>
__device__ uint4 shifted(const uint4& low, const uint4& high, uint32_t offset) {
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = offset & 8 ? w[i + 2] : w[i];
  if constexpr (kElementBytes <= 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = offset & 4 ? w[i + 1] : w[i];
  }
  if constexpr (kElementBytes < 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], offset * 8);
  }
  return {w[0], w[1], w[2], w[3]};
}

/// visit(index of a piece, item) for `each` items of every piece, the next 32 by the warp's lanes at once.
template <class Visit>
__device__ void for_each_item(uint32_t num_pieces, uint32_t each, const Visit& visit) {
  each = max(each, 2u);
  const SmallDivisor by_each(each);
  for (uint32_t number = threadIdx.x % 32; number < num_pieces * each; number += 32) {
    const uint32_t index = by_each.quotient(number);
    visit(index, number - index * each);
  }
}

/// The pieces of one warp, in its shared memory: slots, each with room left of what is brought, then the descriptions.
struct WarpPieces {
  const PiecePlan& plan;
  char* slots;
  const Piece* pieces;
  uint32_t num_pieces;

  [[nodiscard]] __device__ char* slot(uint32_t index) const { return slots + index * plan.slot_bytes; }
};

/// Starts the copies of the blocks of x, `most` of a piece.
__device__ inline void fetch_blocks(const WarpPieces& warp, uint32_t most) {
  const uint32_t slots = shared_address(warp.slots) + warp.plan.left_bytes;
  for_each_item(warp.num_pieces, most, [&](uint32_t index, uint32_t block) {
    const Piece& piece = warp.pieces[index];
    if (block >= static_cast<uint32_t>(piece.from_blocks)) return;
    copy_async_16(slots + index * warp.plan.slot_bytes + block * kBlockBytes, piece.from + block * kBlockBytes, true);
  });
}

/// Puts the other elements, `most` of a piece, beside those that were brought; none is where another is read.
template <class Element>
__device__ void wrap_elements(const WarpPieces& warp, uint32_t most) {
  constexpr int kBytes = sizeof(Element);
  const PiecePlan& plan = warp.plan;
  const auto extent = static_cast<uint32_t>(min(plan.extent_bytes, int64_t{1} << 30));
  for_each_item(warp.num_pieces, most, [&](uint32_t index, uint32_t item) {
    const Piece& piece = warp.pieces[index];
    auto at = static_cast<int32_t>(item) * kBytes;
    if (at >= piece.begin) at += piece.end - piece.begin;
    if (at >= piece.count) return;
    const char* source = piece.first + at;
    if (at >= piece.until) {
      const auto behind = static_cast<uint32_t>(at - piece.until);
      source = piece.first + piece.until - plan.extent_bytes + (behind < extent ? behind : behind % extent);
    }
    char* origin = warp.slot(index) + piece.origin;
    const int64_t repeated = source - piece.from + plan.left_bytes - piece.origin;  // byte of the piece
    const bool is_brought = repeated >= piece.begin && repeated < piece.end;
    *reinterpret_cast<Element*>(origin + at) = is_brought ? *reinterpret_cast<const Element*>(origin + repeated)
                                                          : __ldg(reinterpret_cast<const Element*>(source));
  });
}

/// Writes the whole blocks of out, `most` of a piece.
template <int kElementBytes>
__device__ void store_blocks(const WarpPieces& warp, uint32_t most) {
  for_each_item(warp.num_pieces, most, [&](uint32_t index, uint32_t block) {
    const Piece& piece = warp.pieces[index];
    if (block >= static_cast<uint32_t>(piece.blocks)) return;
    const uint32_t offset = static_cast<uint32_t>(piece.origin + piece.lead) + block * kBlockBytes;
    const auto* words = reinterpret_cast<const uint4*>(warp.slot(index)) + offset / kBlockBytes;
    const uint4 low = words[0];
    const uint4 high = words[offset % kBlockBytes == 0 ? 0 : 1];
    __stcs(reinterpret_cast<uint4*>(piece.to) + block, shifted<kElementBytes>(low, high, offset));
  });
}

/// Writes what is no whole block of out at both ends, `most` elements of a piece.
template <class Element>
__device__ void store_ends(const WarpPieces& warp, uint32_t most) {
  for_each_item(warp.num_pieces, most, [&](uint32_t index, uint32_t item) {
    const Piece& piece = warp.pieces[index];
    auto at = static_cast<int32_t>(item * sizeof(Element));
    if (at >= piece.lead) at += piece.blocks * kBlockBytes;
    if (at >= piece.count) return;
    *reinterpret_cast<Element*>(piece.to + (at - piece.lead)) =
        *reinterpret_cast<const Element*>(warp.slot(index) + piece.origin + at);
  });
}

// ---- kernels --------------------------------------------------------------------------------------------------------

template <class Element, class Index>
__global__ void __launch_bounds__(kThreads, kBlocksWanted)
    circular_pad_pieces_kernel(const __grid_constant__ CircularPadProblem p, const __grid_constant__ PiecePlan plan) {
  constexpr uint32_t kBytes = sizeof(Element);
  constexpr uint32_t kAllLanes = 0xffffffffu;
  extern __shared__ uint4 shared_blocks[];
  const uint32_t lane = threadIdx.x % 32;
  const Index first =
      (static_cast<Index>(blockIdx.x) * kWarps + threadIdx.x / 32) * static_cast<Index>(plan.pieces_per_warp);
  if (first >= static_cast<Index>(plan.num_pieces)) return;
  const auto num_pieces =
      static_cast<uint32_t>(min(static_cast<Index>(plan.pieces_per_warp), static_cast<Index>(plan.num_pieces) - first));
  char* slots = reinterpret_cast<char*>(shared_blocks) + threadIdx.x / 32 * plan.warp_bytes;
  auto* pieces = reinterpret_cast<Piece*>(slots + plan.pieces_per_warp * plan.slot_bytes);
  uint32_t brought = 0;
  uint32_t wrapped_bytes = 0;
  uint32_t blocks = 0;
  uint32_t end_bytes = 0;
  if (lane < num_pieces) {
    const Piece piece = piece_of<kBytes, Index>(p, plan, first + static_cast<Index>(lane));
    pieces[lane] = piece;
    brought = static_cast<uint32_t>(piece.from_blocks);
    wrapped_bytes = static_cast<uint32_t>(piece.count - (piece.end - piece.begin));
    blocks = static_cast<uint32_t>(piece.blocks);
    end_bytes = static_cast<uint32_t>(piece.count) - blocks * kBlockBytes;
  }
  wrapped_bytes = __reduce_max_sync(kAllLanes, wrapped_bytes);
  end_bytes = __reduce_max_sync(kAllLanes, end_bytes);
  __syncwarp();  // shows the pieces to all lanes
  const WarpPieces warp = {plan, slots, pieces, num_pieces};
  fetch_blocks(warp, __reduce_max_sync(kAllLanes, brought));
  copy_async_wait_all();
  __syncwarp();  // shows every lane's copies to all lanes
  if (wrapped_bytes > 0) {
    wrap_elements<Element>(warp, wrapped_bytes / kBytes);
    __syncwarp();  // shows every lane's elements to all lanes
  }
  store_blocks<kBytes>(warp, __reduce_max_sync(kAllLanes, blocks));
  if (end_bytes > 0) store_ends<Element>(warp, end_bytes / kBytes);
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
          static_cast<const Element*>(p.x)[offsets.x + wrapped(p, last, static_cast<uint64_t>(at)) * p.x_strides[last]];
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
  PiecePlan plan;
  plan.pieces_per_row = static_cast<uint32_t>((width * kElementBytes + kPieceBytes - 1) / kPieceBytes);
  const int64_t even_share = (width + plan.pieces_per_row - 1) / plan.pieces_per_row * kElementBytes;
  const int64_t piece_bytes = (even_share + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  plan.piece_elements = piece_bytes / kElementBytes;
  plan.num_pieces = num_rows * plan.pieces_per_row;
  const int64_t fitting = std::clamp<int64_t>(kWarpBytes / piece_bytes, 1, 32);
  plan.pieces_per_warp = static_cast<uint32_t>(std::clamp<int64_t>(plan.num_pieces / wanted_warps, 1, fitting));
  plan.extent_bytes = p.x_extents[last] * kElementBytes;
  int64_t span = 1;  // elements
  for (int32_t axis = 0; axis < p.rank; ++axis) span += (p.x_extents[axis] - 1) * p.x_strides[axis];
  plan.x_begin = static_cast<const char*>(p.x);
  plan.x_end = plan.x_begin + span * kElementBytes;
  // Left of the run that is brought stands the shorter one: the left padding where that is known to be it.
  const bool is_padding = plan.pieces_per_row == 1 && p.pads_before[last] >= 0 &&
                          p.pads_before[last] <= p.x_extents[last] && width <= 2 * p.x_extents[last];
  const int64_t left = is_padding ? p.pads_before[last] * kElementBytes : piece_bytes / 2;
  plan.left_bytes = static_cast<int32_t>((left + kBlockBytes - 1) / kBlockBytes * kBlockBytes) + kBlockBytes;
  // Behind it the piece, wherever its run begins in a block, and a block that is read and dropped.
  plan.slot_bytes = static_cast<uint32_t>(plan.left_bytes + piece_bytes + 2 * kBlockBytes);
  plan.warp_bytes = plan.pieces_per_warp * (plan.slot_bytes + static_cast<uint32_t>(sizeof(Piece)));
  const int64_t warps = (plan.num_pieces + plan.pieces_per_warp - 1) / plan.pieces_per_warp;
  const auto blocks = static_cast<unsigned>((warps + kWarps - 1) / kWarps);
  const auto is_small = [](int64_t number) { return std::abs(number) < int64_t{1} << 30; };
  bool all_small = is_small(plan.num_pieces);
  for (int32_t axis = 0; axis < p.rank; ++axis) {
    all_small =
        all_small && is_small(p.x_extents[axis]) && is_small(p.out_extents[axis]) && is_small(p.pads_before[axis]);
  }
  const auto kernel =
      all_small ? circular_pad_pieces_kernel<Element, uint32_t> : circular_pad_pieces_kernel<Element, uint64_t>;
  kernel<<<blocks, kThreads, kWarps * plan.warp_bytes, stream_of(stream)>>>(p, plan);
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
