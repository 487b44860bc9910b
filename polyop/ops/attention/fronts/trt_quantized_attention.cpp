// TRT_QuantizedAttention: Q and K are each multiplied by r = sqrt(scale) in their own dtype, and the final weights pass
// quantize and dequantize before they meet V.
#include <cmath>
#include <string>

#include "polyop/core/numeric_types.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/fronts/trt_attention.h"
#include "polyop/ops/attention/fronts/trt_forms.h"

namespace polyop {
namespace {

enum Operand : int { kQuantizeScale = 4 };
enum Attribute : int {
  kQueryForm,
  kKvForm,
  kIsCausal,
  kQueryHeads,
  kKvHeads,
  kScale,
  kQuantizeTo,
  kDecomposable,
  kNormalization
};

constexpr TrtOperands kOperands = {.query_lengths = 5, .kv_lengths = 6, .y = 7};

// Order of the choices of the attributes below.
constexpr AttentionWeightQuantization kQuantizations[] = {AttentionWeightQuantization::kF8E4M3,
                                                          AttentionWeightQuantization::kInt8};
constexpr AttentionNormalization kNormalizations[] = {AttentionNormalization::kSoftmax, AttentionNormalization::kNone};

// Numbers of ONNX's TensorProto.DataType.
constexpr int64_t kOnnxF8E4M3 = 17;
constexpr int64_t kOnnxInt8 = 3;

OpSchema make_schema() {
  SchemaBuilder builder("trt_quantized_attention",
                        "Attention with Q and K each multiplied by sqrt(scale) and quantized weights: TensorRT's "
                        "TRT_QuantizedAttention. w' = s * clamp(round(w / s)) of the final weight w; without "
                        "normalization_quantize_scale w' = w.");
  add_trt_inputs(builder, when("is_causal", false));
  builder.operand(input("normalization_quantize_scale")
                      .doc("s, one positive number; absent: weights are not quantized")
                      .broadcast_dims({DimExpr(1)})
                      .dtypes({DType::kF32, DType::kF16, DType::kBF16})
                      .optional());
  add_trt_lengths_and_output(builder);
  add_trt_forms(builder);
  builder.bool_attribute("is_causal", false, "row i sees keys up to i (upper left)")
      .int_attribute("q_num_heads", 0, "Hq, checked where given", 0)
      .int_attribute("kv_num_heads", 0, "Hkv, checked where given", 0)
      .rsqrt_attribute("scale", symbol("D"), "factor of the scores: its square root multiplies Q and K")
      .choice_attribute("normalization_quantize_to_type",
                        {{.name = "fp8", .number = kOnnxF8E4M3}, {.name = "int8", .number = kOnnxInt8}},
                        "fp8: E4M3, saturated to +-448; int8: saturated to -128 .. 127");
  add_trt_execution(builder);
  add_trt_constraints(builder);
  const auto checked_heads = [&builder](const char* heads, const char* name, const char* operand) {
    builder.constrain(minimum(attribute(name), 1) * symbol(heads), Relation::kEqual, attribute(name), operand, 1);
  };
  checked_heads("Hq", "q_num_heads", "Q");
  checked_heads("Hkv", "kv_num_heads", "K");
  return builder.build();
}

float rounded(float value, DType dtype) {
  if (dtype == DType::kF16) return F16::from_float(value).to_float();
  return dtype == DType::kBF16 ? BF16::from_float(value).to_float() : value;
}

// r as the importer of TensorRT makes it: of a given scale the square root, rounded once; of the default
// 1 / sqrt(D) step by step in the input type. A given float that is exactly the default has exact steps: both ways
// agree.
float operand_scale(double scale, int64_t head_dim, DType dtype) {
  if (scale != 1.0 / std::sqrt(static_cast<double>(head_dim))) {
    return rounded(std::sqrt(static_cast<float>(scale)), dtype);
  }
  const float root = rounded(std::sqrt(static_cast<float>(head_dim)), dtype);
  return rounded(std::sqrt(rounded(1.0f / root, dtype)), dtype);
}

float read_number(const TensorView& tensor) {
  switch (tensor.dtype) {
    case DType::kF16:
      return static_cast<const F16*>(tensor.data)->to_float();
    case DType::kBF16:
      return static_cast<const BF16*>(tensor.data)->to_float();
    default:
      return *static_cast<const float*>(tensor.data);
  }
}

Status check_quantize_scale(const TensorView& tensor) {
  if (tensor.data == nullptr || tensor.device.type != DeviceType::kCpu) return Status::ok();
  const float value = read_number(tensor);
  if (std::isfinite(value) && value > 0.0f) return Status::ok();
  return invalid_argument("trt_quantized_attention: normalization_quantize_scale is " + std::to_string(value) +
                          ", wanted a positive finite number");
}

Status make_problem(const BoundCall& call, AttentionProblem* problem) {
  POLYOP_RETURN_IF_ERROR(check_trt_forms(call, kOperands));
  fill_trt_problem(call, kOperands, problem);
  AttentionProblem& p = *problem;
  const AttributeValue& scale = call.attributes[kScale];
  if (!(scale.real >= 0.0) || !std::isfinite(scale.real)) {
    return invalid_argument("trt_quantized_attention: attribute scale is " + std::to_string(scale.real) +
                            ", wanted a finite number of at least 0");
  }
  p.causal = call.attributes[kIsCausal].integer != 0 ? AttentionCausal::kUpperLeft : AttentionCausal::kNone;
  p.normalization = kNormalizations[call.attributes[kNormalization].integer];
  p.operand_scale = operand_scale(scale.real, p.head_dim, p.q.dtype);
  if (call.has(kQuantizeScale)) {
    const TensorView& quantize_scale = call.tensor(kQuantizeScale);
    POLYOP_RETURN_IF_ERROR(check_quantize_scale(quantize_scale));
    p.weight_quantization = kQuantizations[call.attributes[kQuantizeTo].integer];
    if (quantize_scale.dtype == DType::kF32) {
      p.weight_scale = static_cast<const float*>(quantize_scale.data);
    } else if (call.device.type == DeviceType::kCpu) {
      p.weight_scale_value = quantize_scale.data != nullptr ? read_number(quantize_scale) : 1.0f;
    } else {
      return unsupported("trt_quantized_attention: normalization_quantize_scale is " +
                         std::string(dtype_name(quantize_scale.dtype)) + ", wanted f32 on a GPU");
    }
  }
  if (call.device.type == DeviceType::kCuda && p.operand_scale != 1.0f) {
    return unsupported("trt_quantized_attention: no CUDA kernel multiplies Q and K in their own dtype");
  }
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_trt_quantized_attention_operator() {
  return std::make_unique<OperatorOver<AttentionProblem>>(make_schema(), make_problem, attention_kernels());
}

}  // namespace polyop
