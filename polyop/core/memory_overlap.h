// Which strided views share memory: what the aliasing checks of shape binding need.
#pragma once

#include <cstdint>
#include <utility>

#include "polyop/core/tensor_view.h"

namespace polyop {

/// Addresses of the first byte and of one past the last byte of a view that is not empty.
std::pair<uintptr_t, uintptr_t> address_range(const TensorView& tensor);

/// True when two indices of `tensor` may reach the same element. Exact for views made by slicing and permuting dense
/// memory; other views may be called overlapping although they are not, never the other way.
bool overlaps_itself(const TensorView& tensor);

/// True when some byte may belong to both views. Views that interleave with a common row stride, such as the q and k
/// columns of one fused projection, are told apart; otherwise address ranges decide.
bool may_overlap(const TensorView& a, const TensorView& b);

/// True when both views address the same elements in the same order.
bool same_view(const TensorView& a, const TensorView& b);

}  // namespace polyop
