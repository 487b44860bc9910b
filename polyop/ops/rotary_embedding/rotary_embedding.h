// rotary_embedding as the registry sees it.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// The operator rotary_embedding: schema in rotary_embedding_schema.cpp, kernels in rotary_embedding_kernels.cpp.
std::unique_ptr<Operator> make_rotary_embedding_operator();

}  // namespace polyop
