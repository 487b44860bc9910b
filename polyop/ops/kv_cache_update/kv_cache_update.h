// kv_cache_update as the registry sees it.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// The operator kv_cache_update: schema in kv_cache_update_schema.cpp, kernels in kv_cache_update_kernels.cpp.
std::unique_ptr<Operator> make_kv_cache_update_operator();

}  // namespace polyop
