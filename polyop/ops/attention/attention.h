// attention as the registry sees it.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// The operator attention: schema in attention_schema.cpp, kernels in attention_kernels.cpp.
std::unique_ptr<Operator> make_attention_operator();

}  // namespace polyop
