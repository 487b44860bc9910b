#include <cstring>

#include "polyop/ops/circular_pad/circular_pad_problem.h"

namespace polyop {

Status circular_pad_reference(const CircularPadProblem& problem, Workspace, Stream) {
  const auto* x = static_cast<const char*>(problem.x);
  auto* out = static_cast<char*>(problem.out);
  for (int32_t axis = 0; axis < problem.rank; ++axis) {
    if (problem.out_extents[axis] == 0) return Status::ok();
  }
  std::array<int64_t, kMaxRank> index{};
  while (true) {
    int64_t x_offset = 0;
    int64_t out_offset = 0;
    for (int32_t axis = 0; axis < problem.rank; ++axis) {
      x_offset += problem.source_index(axis, index[axis]) * problem.x_strides[axis];
      out_offset += index[axis] * problem.out_strides[axis];
    }
    std::memcpy(out + out_offset * problem.element_bytes, x + x_offset * problem.element_bytes, problem.element_bytes);
    int32_t axis = problem.rank - 1;
    while (axis >= 0 && ++index[axis] == problem.out_extents[axis]) index[axis--] = 0;
    if (axis < 0) return Status::ok();
  }
}

}  // namespace polyop
