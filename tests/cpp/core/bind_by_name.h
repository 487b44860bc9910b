// Binding with operands and attributes by name: what the tests of the schema language share.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "polyop/core/call.h"
#include "polyop/core/shape_binding.h"

namespace polyop::testing {

/// Operands and attributes of one call in schema order. Keeps them alive for what is bound from it.
class CallByName {
 public:
  CallByName(const OpSchema& schema, std::vector<NamedTensor> operands, std::vector<NamedAttribute> attributes)
      : schema_(schema), operands_(std::move(operands)), attributes_(std::move(attributes)) {
    for (const NamedTensor& operand : operands_) {
      tensors_[static_cast<size_t>(schema.operand_index(operand.name))] = &operand.tensor;
    }
    for (const NamedAttribute& attribute : attributes_) {
      values_[static_cast<size_t>(schema.attribute_index(attribute.name))] = attribute.value;
    }
  }

  [[nodiscard]] Status bind(BoundCall* call) const {
    return bind_call(schema_, std::span(tensors_).first(schema_.operands().size()),
                     std::span<const AttributeValue>(values_).first(schema_.attributes().size()), call);
  }
  [[nodiscard]] Status infer(std::span<OutputShape> outputs) const {
    return infer_outputs(schema_, std::span(tensors_).first(schema_.operands().size()),
                         std::span<const AttributeValue>(values_).first(schema_.attributes().size()), outputs);
  }

 private:
  const OpSchema& schema_;
  std::vector<NamedTensor> operands_;
  std::vector<NamedAttribute> attributes_;
  std::array<const TensorView*, kMaxOperands> tensors_{};
  std::array<AttributeValue, kMaxAttributes> values_{};
};

/// The text of the refusal; empty when the call fits.
inline std::string bind_text(const OpSchema& schema, std::vector<NamedTensor> operands,
                             std::vector<NamedAttribute> attributes = {}) {
  BoundCall call;
  const Status status = CallByName(schema, std::move(operands), std::move(attributes)).bind(&call);
  if (!status.is_ok() && status.code() != StatusCode::kInvalidArgument) return "(wrong code) " + status.message();
  return status.message();
}

/// A view of memory that is never read: shape checks only look at the view.
inline TensorView shaped(std::initializer_list<int64_t> shape, DType dtype = DType::kF32) {
  alignas(64) static std::array<char, 1 << 16> memory{};
  return TensorView::contiguous(memory.data(), dtype, shape);
}

}  // namespace polyop::testing
