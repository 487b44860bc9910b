// Which strided views share memory: what the aliasing checks of shape binding need.
#pragma once

#include "polyop/core/tensor_view.h"

namespace polyop {

/// True when two indices of `tensor` may reach the same element. Exact for views made by slicing and permuting dense
/// memory; other views may be called overlapping although they are not, never the other way.
bool overlaps_itself(const TensorView& tensor);

/// True when some byte may belong to both views. Views that interleave with a common row stride, such as the q and k
/// columns of one fused projection, are told apart; otherwise address ranges decide.
bool may_overlap(const TensorView& a, const TensorView& b);

/// True when both views address the same elements in the same order.
bool same_view(const TensorView& a, const TensorView& b);

}  // namespace polyop
