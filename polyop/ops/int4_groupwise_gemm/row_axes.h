// RowAxes: where the rows of a matrix start when its rows are several leading axes of a strided tensor.
#pragma once

#include <array>
#include <cstdint>

#include "polyop/core/tensor_view.h"

namespace polyop {

/// Leading axes with those that one stride can walk merged: a dense tensor has at most one.
struct RowAxes {
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> extents{};  // outermost first, none is 1
  std::array<int64_t, kMaxRank> strides{};  // elements

  /// All axes of `tensor` but the last.
  static RowAxes of_leading_axes(const TensorView& tensor) {
    RowAxes rows;
    for (int32_t axis = 0; axis + 1 < tensor.rank; ++axis) rows.append(tensor.shape[axis], tensor.strides[axis]);
    return rows;
  }

  /// `extent` rows that lie `stride` elements apart.
  static RowAxes of(int64_t extent, int64_t stride) {
    RowAxes rows;
    rows.append(extent, stride);
    return rows;
  }

  /// Elements from the first row to row `row`, counted in row-major order.
  [[nodiscard]] int64_t offset(int64_t row) const {
    int64_t sum = 0;
    for (int32_t axis = rank - 1; axis > 0; --axis) {
      sum += row % extents[axis] * strides[axis];
      row /= extents[axis];
    }
    return rank == 0 ? 0 : sum + row * strides[0];
  }

 private:
  void append(int64_t extent, int64_t stride) {
    if (extent == 1) return;
    const bool continues = rank > 0 && strides[rank - 1] == extent * stride;  // one step outside = all steps inside
    if (!continues) extents[rank++] = 1;
    extents[rank - 1] *= extent;
    strides[rank - 1] = stride;
  }
};

}  // namespace polyop
