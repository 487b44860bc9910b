// TensorRT's two attention layers as operators over the one AttentionProblem.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// TRT_Attention: no scale, causal kind none, upper_left or lower_right (see trt_attention.cpp).
std::unique_ptr<Operator> make_trt_attention_operator();

/// TRT_QuantizedAttention: scaled, weights quantized to FP8 or INT8 (see trt_quantized_attention.cpp).
std::unique_ptr<Operator> make_trt_quantized_attention_operator();

}  // namespace polyop
