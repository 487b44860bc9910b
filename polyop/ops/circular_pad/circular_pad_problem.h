// CircularPadProblem: one bound call of circular_pad; the only thing its kernels receive.
#pragma once

#include <array>
#include <cstdint>

#include "polyop/core/kernel_list.h"
#include "polyop/core/tensor_view.h"

namespace polyop {

struct CircularPadProblem {
  const void* x = nullptr;  // [X...], any strides
  void* out = nullptr;      // [X + pads...], any strides
  int64_t element_bytes = 0;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> x_extents{};
  std::array<int64_t, kMaxRank> x_strides{};  // elements
  std::array<int64_t, kMaxRank> out_extents{};
  std::array<int64_t, kMaxRank> out_strides{};  // elements
  std::array<int64_t, kMaxRank> pads_before{};  // elements, by axis, outermost first; negative crops

  /// Index on `axis` of x that output index `out_index` repeats, in [0, extent).
  [[nodiscard]] constexpr int64_t source_index(int32_t axis, int64_t out_index) const {
    const int64_t extent = x_extents[axis];
    const int64_t remainder = (out_index - pads_before[axis]) % extent;
    return remainder < 0 ? remainder + extent : remainder;
  }
};

/// Copies element by element; the specification in code.
Status circular_pad_reference(const CircularPadProblem& problem, Workspace workspace, Stream stream);

namespace cpu {

/// Copies rows in contiguous pieces with all threads; needs the last axis dense on both sides.
Status circular_pad_row_pieces(const CircularPadProblem& problem, Workspace workspace, Stream stream);
Status supports_circular_pad_row_pieces(const CircularPadProblem& problem);

}  // namespace cpu

namespace cuda {

/// Rows in pieces through shared memory, 16-byte accesses on both sides; takes every call.
Status circular_pad_rows(const CircularPadProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda
}  // namespace polyop
