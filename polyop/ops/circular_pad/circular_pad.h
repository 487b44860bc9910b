// circular_pad as the registry sees it.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// The operator circular_pad: schema in circular_pad_schema.cpp, kernels in circular_pad_kernels.cpp.
std::unique_ptr<Operator> make_circular_pad_operator();

}  // namespace polyop
