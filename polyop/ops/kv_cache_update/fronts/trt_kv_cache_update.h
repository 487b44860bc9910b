// TensorRT's cache layer as an operator over KvCacheUpdateProblem.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// TRT_KVCacheUpdate: Y = past_cache with the update's rows written (see trt_kv_cache_update.cpp).
std::unique_ptr<Operator> make_trt_kv_cache_update_operator();

}  // namespace polyop
