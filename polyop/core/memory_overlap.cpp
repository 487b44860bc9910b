#include "polyop/core/memory_overlap.h"

#include <cstdint>

namespace polyop {
namespace {

// Bytes from the first to one past the last element over axes [first_axis, rank). Strides are not negative here.
int64_t span_bytes(const TensorView& tensor, int first_axis) {
  int64_t last = 0;
  for (int axis = first_axis; axis < tensor.rank; ++axis) last += (tensor.shape[axis] - 1) * tensor.strides[axis];
  return (last + 1) * dtype_bytes(tensor.dtype);
}

int outermost_axis(const TensorView& tensor) {
  int outermost = -1;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] > 1 && (outermost < 0 || tensor.strides[axis] > tensor.strides[outermost])) outermost = axis;
  }
  return outermost;
}

}  // namespace

bool overlaps_itself(const TensorView& tensor) {
  std::array<int, kMaxRank> order;  // axes of more than one element, by rising stride
  int count = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] == 0) return false;
    if (tensor.shape[axis] == 1) continue;
    int place = count++;
    for (; place > 0 && tensor.strides[order[place - 1]] > tensor.strides[axis]; --place)
      order[place] = order[place - 1];
    order[place] = axis;
  }
  int64_t reach = 0;  // farthest element of the axes so far; the next stride must step past it
  for (int i = 0; i < count; ++i) {
    if (tensor.strides[order[i]] <= reach) return true;
    reach += (tensor.shape[order[i]] - 1) * tensor.strides[order[i]];
  }
  return false;
}

std::pair<uintptr_t, uintptr_t> address_range(const TensorView& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  return {begin, begin + static_cast<uintptr_t>(span_bytes(tensor, 0))};
}

bool may_overlap(const TensorView& a, const TensorView& b) {
  if (a.data == nullptr || b.data == nullptr || a.num_elements() == 0 || b.num_elements() == 0) return false;
  const auto [a_begin, a_end] = address_range(a);
  const auto [b_begin, b_end] = address_range(b);
  if (a_end <= b_begin || b_end <= a_begin) return false;

  // Same row pitch: compare the columns within one row.
  const int a_axis = outermost_axis(a);
  const int b_axis = outermost_axis(b);
  if (a_axis != 0 || b_axis != 0) return true;
  const int64_t pitch = a.strides[0] * dtype_bytes(a.dtype);
  if (pitch <= 0 || pitch != b.strides[0] * dtype_bytes(b.dtype)) return true;
  const int64_t a_width = span_bytes(a, 1);
  const int64_t b_width = span_bytes(b, 1);
  // Column of b relative to a, in [0, pitch).
  const auto delta = static_cast<int64_t>(b_begin - a_begin);
  const int64_t column = ((delta % pitch) + pitch) % pitch;
  return column < a_width || column + b_width > pitch;
}

bool same_view(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int axis = 0; axis < a.rank; ++axis) {
    if (a.shape[axis] != b.shape[axis]) return false;
    if (a.shape[axis] > 1 && a.strides[axis] != b.strides[axis]) return false;
  }
  return true;
}

}  // namespace polyop
