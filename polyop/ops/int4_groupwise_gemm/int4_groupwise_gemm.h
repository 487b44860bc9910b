// int4_groupwise_gemm as the registry sees it.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// The operator int4_groupwise_gemm: schema in int4_groupwise_gemm_schema.cpp, kernels in
/// int4_groupwise_gemm_kernels.cpp.
std::unique_ptr<Operator> make_int4_groupwise_gemm_operator();

}  // namespace polyop
