// qk_norm_rope_append as the registry sees it.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// The operator qk_norm_rope_append: schema in qk_norm_rope_append_schema.cpp, kernels in
/// qk_norm_rope_append_kernels.cpp.
std::unique_ptr<Operator> make_qk_norm_rope_append_operator();

}  // namespace polyop
