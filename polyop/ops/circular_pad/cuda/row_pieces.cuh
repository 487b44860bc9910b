// The pieces of output rows that circular_pad_rows puts together in shared memory: where they come from and go to.
#pragma once

#include <cstdint>
#include <type_traits>

#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop::cuda {

constexpr int kBlockBytes = 16;  // of an access

/// What the host knows of all pieces alike.
struct PiecePlan {
  int64_t num_pieces = 0;
  int64_t piece_elements = 0;  // of all pieces of a row but the last
  uint32_t pieces_per_row = 1;
  uint32_t pieces_per_warp = 1;
  int64_t extent_bytes = 0;       // of a row of x
  const char* x_begin = nullptr;  // what x spans
  const char* x_end = nullptr;
  int32_t left_bytes = 0;   // of a slot, for what wraps before the run that is brought; whole blocks
  uint32_t slot_bytes = 0;  // shared memory of a piece, and of a warp
  uint32_t warp_bytes = 0;
};

/// Bytes from an address to the next block.
__device__ inline int32_t to_next_block(const void* address) {
  return static_cast<int32_t>(-reinterpret_cast<uintptr_t>(address) % kBlockBytes);
}

/// A run of an output row, in bytes, that is put together in shared memory. It repeats a run of the row of x that ends
/// with that, and then the row from its first element on. What blocks of x hold of the longer of the two is brought.
struct alignas(kBlockBytes) Piece {
  const char* from;     // first block of x that is brought
  int32_t from_blocks;  // blocks that are brought
  int32_t origin;       // of the piece's first byte in its slot
  char* to;             // the first whole block of out
  int32_t lead;         // bytes before that
  int32_t blocks;       // whole blocks of out
  const char* first;    // what the first byte repeats
  int32_t until;        // bytes before it goes on with the first element of the row of x
  int32_t count;        // all bytes
  int32_t begin;        // bytes before those that are brought
  int32_t end;          // bytes up to the last one that is brought
};

/// Element offsets of an output row and of the row of x it repeats.
struct RowOffsets {
  int64_t x = 0;
  int64_t out = 0;
};

/// Index is 32 bits wide where all extents and paddings allow it.
template <class Index>
__device__ int64_t wrapped(const CircularPadProblem& p, int32_t axis, Index out_index) {
  using Signed = std::make_signed_t<Index>;
  const auto extent = static_cast<Signed>(p.x_extents[axis]);
  Signed source = static_cast<Signed>(out_index) - static_cast<Signed>(p.pads_before[axis]);
  if (source < 0) source += extent;
  if (source >= extent) source -= extent;
  if (source < 0 || source >= extent) {
    source %= extent;
    if (source < 0) source += extent;
  }
  return source;
}

template <class Index>
__device__ RowOffsets row_offsets(const CircularPadProblem& p, Index row) {
  RowOffsets offsets;
#pragma unroll
  for (int32_t axis = kMaxRank - 2; axis >= 0; --axis) {
    if (axis >= p.rank - 1) continue;
    const auto extent = static_cast<Index>(p.out_extents[axis]);
    const Index rest = row / extent;
    const Index index = row - rest * extent;
    row = rest;
    offsets.x += wrapped(p, axis, index) * p.x_strides[axis];
    offsets.out += static_cast<int64_t>(index) * p.out_strides[axis];
  }
  return offsets;
}

template <int kElementBytes, class Index>
__device__ Piece piece_of(const CircularPadProblem& p, const PiecePlan& plan, Index index) {
  const int32_t last = p.rank - 1;
  const Index row = plan.pieces_per_row == 1 ? index : index / static_cast<Index>(plan.pieces_per_row);
  const Index begin = (index - row * static_cast<Index>(plan.pieces_per_row)) * static_cast<Index>(plan.piece_elements);
  const RowOffsets offsets = row_offsets<Index>(p, row);
  const int64_t elements = min(plan.piece_elements, p.out_extents[last] - static_cast<int64_t>(begin));
  const int64_t element = wrapped(p, last, begin);
  const auto count = static_cast<int32_t>(elements) * kElementBytes;
  const auto until = static_cast<int32_t>(min(elements, p.x_extents[last] - element)) * kElementBytes;
  const char* first = static_cast<const char*>(p.x) + (offsets.x + element) * kElementBytes;
  char* to = static_cast<char*>(p.out) + (offsets.out + static_cast<int64_t>(begin)) * kElementBytes;
  const bool wraps = count - until > until;
  int32_t run_begin = wraps ? until : 0;
  int32_t run_end = wraps ? static_cast<int32_t>(min(int64_t{count}, until + plan.extent_bytes)) : until;
  // Blocks of x are read as a whole, but nothing outside of what x spans.
  const char* source = first - (wraps ? plan.extent_bytes : 0);  // of the piece's first byte, if it were in the run
  const char* from = source + run_begin;
  const char* from_end = source + run_end;
  from -= reinterpret_cast<uintptr_t>(from) % kBlockBytes;
  from_end += to_next_block(from_end);
  if (from < plan.x_begin) from += kBlockBytes;
  if (from_end > plan.x_end) from_end -= kBlockBytes;
  run_begin = max(run_begin, static_cast<int32_t>(from - source));
  run_end = min(run_end, static_cast<int32_t>(from_end - source));
  if (run_begin >= run_end) run_begin = run_end = 0, from_end = from;
  const int32_t lead = min(to_next_block(to), count);
  return {.from = from,
          .from_blocks = static_cast<int32_t>(from_end - from) / kBlockBytes,
          .origin = plan.left_bytes - static_cast<int32_t>(from - source),
          .to = to + lead,
          .lead = lead,
          .blocks = (count - lead) / kBlockBytes,
          .first = first,
          .until = until,
          .count = count,
          .begin = run_begin,
          .end = run_end};
}

}  // namespace polyop::cuda
